"""A tiny decoder."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from tools.demo_pair.decoder import llama_config, new_decoder

SEED = 7


@pytest.fixture
def decoder() -> LlamaForCausalLM:
    """A fresh two-layer decoder in fp32."""
    model = new_decoder(llama_config(420, 2, 32, 64, 2, context_length=256), SEED)
    with torch.no_grad():
        # Larger weights than those of a fresh model, so that a swapped pair of matrices shows.
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1)
    return model
