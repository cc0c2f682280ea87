"""Measures replies that are written at the same time: see `python -m tools.parallel --help`."""
