"""Tiny models in folders, for the tests that load them."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.core.options import LoadOptions
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import agreeing_draft, tiny_llama


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadOptions, LoadOptions]:
    """Two targets with a draft each."""
    return tuple(_pair(tmp_path_factory.mktemp("pair"), seed) for seed in (0, 5))  # type: ignore[return-value]


@pytest.fixture(scope="session")
def pair_options(pairs: tuple[LoadOptions, LoadOptions]) -> LoadOptions:
    return pairs[0]


def _pair(folder: Path, seed: int) -> LoadOptions:
    module = tiny_llama(seed, vocab_size=VOCAB_SIZE)
    target = save_model(folder / "target", module)
    draft = save_model(folder / "draft", agreeing_draft(module))
    return LoadOptions(model=str(target), draft=str(draft), context=256, dtype="float32")
