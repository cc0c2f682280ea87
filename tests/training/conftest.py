"""A tokenizer and a tiny decoder that the training tests share."""

from __future__ import annotations

from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from localspec.training import dialogues
from localspec.training.model import Decoder, ModelShape
from localspec.training.tokenizer import train_tokenizer

SEED = 7


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer of 420 entries, learnt from generated dialogues."""
    rng = Random(SEED)
    texts = [m["content"] for _ in range(200) for m in dialogues.generate(rng).messages()]
    return train_tokenizer(texts, 420)


@pytest.fixture
def decoder() -> Decoder:
    """A fresh two-layer decoder in fp32."""
    model = Decoder(ModelShape(420, 2, 32, 64, 2, context_length=256))
    model.initialise(SEED)
    with torch.no_grad():
        # Larger weights than those of a fresh model, so that a swapped pair of matrices shows.
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1)
    return model
