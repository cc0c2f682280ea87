"""What a family does behind its output embedding, the head that drafters and training use does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from localspec.errors import ModelError
from localspec.forward.cache import KVCache
from localspec.forward.features import LAST
from localspec.forward.model import CausalLM, kv_shape
from localspec.training import target as module
from localspec.training.target import Target
from tests.tiny import CPU

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IDS = [3, 1, 4, 1, 5]


def granite() -> Any:
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


def cohere() -> Any:
    kinds = {"layer_types": ["full_attention"] * 2, "logit_scale": 0.25}
    return Cohere2ForCausalLM(Cohere2Config(**SIZES, **kinds))


def gemma() -> Any:
    """Capped so low that the cap shows."""
    kinds = {"layer_types": ["full_attention"] * 2, "final_logit_softcapping": 0.5}
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, **kinds))


@pytest.mark.parametrize("family", [granite, cohere, gemma])
def test_the_head_gives_the_logits_of_the_forward(family: Any, tmp_path: Any) -> None:
    torch.manual_seed(3)
    made = family().eval().requires_grad_(False)
    model = CausalLM(made, KVCache(kv_shape(made.config, 64), torch.float32, CPU))
    features = model.follow([LAST])
    own = model.forward(IDS)
    rows = features.rows(LAST, 0, len(IDS))
    assert torch.allclose(model.head(rows), own, atol=1e-5)
    assert torch.allclose(Target(made, tmp_path).teacher().head(rows), own, atol=1e-5)
    module.require_known_head(Target(made, tmp_path))


def test_a_head_that_is_not_known_is_refused_before_anything_is_trained(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    made = granite().eval().requires_grad_(False)
    monkeypatch.setattr(module, "scaled", lambda logits, config: logits)
    with pytest.raises(ModelError, match="not known here"):
        module.require_known_head(Target(made, tmp_path))
