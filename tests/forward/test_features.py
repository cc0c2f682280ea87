"""Hidden states beside the cache: every path writes the same rows, and they follow the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.forward.features import LAST, Features
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.restoring import undisturbed
from tests.kit.tiny import on_transformers, tiny_llama, with_plain_cache
from tests.kit.tracing import UncapturedPool

CAPACITY = 64
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = (-1, 0, 0, 1)  # of four tokens after TEXT
LAYERS = (0, LAST)


def reference(tokens: list[int]) -> Any:
    """What transformers says of a text: [n, d] by layer."""
    module = tiny_llama()
    with torch.inference_mode():
        states = module(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return {0: states[1][0], LAST: states[-1][0]}


def native() -> Any:
    return with_plain_cache(tiny_llama(), CAPACITY)


def captured() -> Any:
    model = CapturedDecoder(native(), UncapturedPool())
    model.follow(LAYERS)
    for _ in model.capture():
        pass
    assert model.captured, "the test is of captured forwards"
    return model


@pytest.mark.parametrize(
    "make", [native, captured, lambda: on_transformers(tiny_llama(), CAPACITY)]
)
def test_rows_are_those_of_the_reference(make: Any) -> None:
    model = make()
    features = model.follow(LAYERS)
    model.forward(TEXT[:5])
    model.forward(TEXT[5:])
    for layer, rows in reference(TEXT).items():
        assert torch.allclose(features.rows(layer, 0, len(TEXT)), rows, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [native, captured, lambda: on_transformers(tiny_llama(), CAPACITY)]
)
def test_the_path_kept_of_a_tree_has_the_rows_of_its_own_text(make: Any) -> None:
    model = make()
    features = model.follow(LAYERS)
    model.forward(TEXT)
    model.forward([7, 8, 10, 11], TREE)
    model.cache.keep(len(TEXT), (0, 2))  # 7 and its second child
    for layer, rows in reference([*TEXT, 7, 10]).items():
        assert torch.allclose(features.rows(layer, 0, len(TEXT) + 2), rows, atol=1e-5)


def test_after_a_rollback_new_tokens_bring_their_own_rows() -> None:
    model = native()
    features = model.follow(LAYERS)
    model.forward([*TEXT, 7, 8])
    model.cache.reuse([*TEXT, 12])
    model.forward([12, 13])
    for layer, rows in reference([*TEXT, 12, 13]).items():
        assert torch.allclose(features.rows(layer, 0, len(TEXT) + 2), rows, atol=1e-5)


def test_a_capture_leaves_the_rows_of_a_conversation_alone() -> None:
    model = native()
    features = model.follow(LAYERS)
    model.forward(TEXT)
    held = features.rows(LAST, 0, len(TEXT)).clone()
    with undisturbed(model.cache, len(TEXT)):
        features.slots(LAST)[: len(TEXT)].fill_(9.0)
    assert torch.equal(features.rows(LAST, 0, len(TEXT)), held)


def test_head_and_embedding_are_the_models_own() -> None:
    model = native()
    features = model.follow((LAST,))
    logits = model.forward(TEXT)
    assert torch.allclose(model.head(features.rows(LAST, 0, len(TEXT))), logits, atol=1e-5)
    table = tiny_llama().get_input_embeddings().weight
    assert torch.equal(model.embed([5, 2]), table[[5, 2]])


def test_following_twice_keeps_what_is_held() -> None:
    features = Features(10, 4, torch.float32, torch.device("cpu"))
    features.follow((LAST,))
    features.write(3, {LAST: torch.ones(3, 4)})
    features.follow((LAST, 2))
    assert features.rows(LAST, 0, 3).sum() == 12.0


def test_transformers_cannot_give_the_last_layers_residual() -> None:
    model = on_transformers(tiny_llama(), CAPACITY)
    with pytest.raises(ModelError, match="normalised"):
        model.follow((model.cache.shape.num_layers - 1,))


def test_nothing_is_held_until_somebody_asks() -> None:
    model = native()
    model.forward(TEXT)
    assert model.cache.features is None
