"""The tests, mirroring localspec/. `python -m tests` runs them all from a bare checkout."""
