"""Shapes of published models."""

from __future__ import annotations

from localspec.machine.shapes import ModelShape

LLAMA_8B = ModelShape(
    family="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128256,
    context_length=131072,
    is_tied=False,
)
