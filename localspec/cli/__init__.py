"""The command line: one file a command, and `flags` for what commands share.

A command parses flags, calls the wings below and prints a result. Nothing imports this wing but
`python -m localspec`.
"""
