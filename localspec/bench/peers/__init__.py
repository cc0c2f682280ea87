"""Other engines as sides of a comparison: installed apart, run in processes of their own.

Contract: an arm of another engine is opened once and runs prompt after prompt (adapter.Peer);
what cannot run here raises a LocalspecError that says why and what to do.
"""
