"""A saved target, for what loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import tiny_llama


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    return save_model(tmp_path_factory.mktemp("saved") / "target", module)
