"""Scripts that run inside a peer's own environment, started by peers.worker as files.

Contract: standard library, the peer and numpy only; nothing of localspec is imported here.
"""
