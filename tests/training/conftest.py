"""A tiny random target in a folder of its own, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from localspec.training.target import Target, load_target
from tests.training.runs import CPU, Said, make_folder
from tools.demo_pair import dialogues

SEED = 5


@pytest.fixture(scope="session")
def target_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny", tokenizer, SEED)


@pytest.fixture(scope="session")
def loaded_target(target_folder: Path) -> Target:
    return load_target(target_folder, torch.float32, CPU)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of twelve questions."""
    rng, path = Random(SEED), tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    asked = [dialogues.generate(rng).messages() for _ in range(40)]
    texts = [next(m["content"] for m in one if m["role"] == "user") for one in asked]
    short = sorted(set(texts), key=len)[:12]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in short), "utf-8")
    return path


@pytest.fixture
def said() -> Said:
    return Said()
