"""Enlarges a trained pair to the shape of a bigger one whose text stays the same."""
