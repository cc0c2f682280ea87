"""The command line: one file a command. `flags` reads the words, `output` prints and ends.

A command takes its flags as parameters, calls the wings below and prints a result. Nothing imports
this wing but `python -m localspec`, `app.py` and the tools.
"""
