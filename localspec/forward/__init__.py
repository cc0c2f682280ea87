"""Compute: a target or draft model with a KV cache that can roll back. Knows no drafter."""
