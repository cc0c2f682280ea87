"""localspec: a desktop chat whose speculative decoding is exact, measured and explained."""

__version__ = "0.1.0"
