"""A hub on this machine with a pair of models, and a client that knows no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.hub_stub import HubStub, client_of, serve_hub
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import tiny_llama

TARGET, DRAFT = "someone/target", "someone/draft"


@pytest.fixture(scope="module")
def source_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    module = tiny_llama(num_layers=1, vocab_size=VOCAB_SIZE)
    return {each: save_model(root / each, module) for each in (TARGET, DRAFT)}


@pytest.fixture
def source_hub(source_models: dict[str, Path]) -> Iterator[HubStub]:
    with serve_hub(source_models) as stub:
        yield stub


@pytest.fixture
def client_cache(source_hub: HubStub, tmp_path: Path) -> Iterator[Path]:
    """The cache folder of a client that knows this hub only."""
    cache = tmp_path / "cache"
    with client_of(source_hub.endpoint, cache):
        yield cache
