"""Assistants of Gemma 4: steps equal to those of transformers, and folders that do not fit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.formats.head_folder import head_kind
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.heads.assistant import Assistant, read_assistant
from localspec.forward.load import load_model
from tests.kit.assistants import reference_steps, save_assistant, shared_keys
from tests.kit.families import assert_close, small
from tests.kit.tiny import tiny_llama, with_cache

TARGETS = (
    "gemma4",
    "gemma4, values from keys",
    "gemma4, experts beside",
    "gemma4, keys of earlier layers",
)
WINDOW = 6
GUESSES = (5, 11)


def text(size: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(1, 48), k=size)


@cache
def module(name: str) -> Any:
    with shared_keys():
        target = small(name)
    target.set_attn_implementation("eager")
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, bool], Any]]:
    """Of each target, a folder of its assistant with a whole or an ordered head, and its module."""
    saved = {}
    for name in TARGETS:
        for is_ordered in (False, True):
            folder = tmp_path_factory.mktemp("assistant")
            saved[name, is_ordered] = folder, save_assistant(folder, module(name), is_ordered)
    yield saved


def ready(folder: Path, name: str, tokens: list[int]) -> tuple[Assistant, Decoder]:
    """The assistant over a target that has read all but the last token."""
    target = with_cache(module(name), 96)
    target.follow((LAST,))
    target.forward(tokens[:-1])
    return Assistant(read_assistant(folder, target), target), target


def steps(assistant: Assistant, target: Decoder, tokens: list[int]) -> Iterator[torch.Tensor]:
    features = target.written_features
    assert features is not None
    rows = assistant.start(tokens, features).forward()
    yield assistant.logits(rows).forward()[0]
    for token in GUESSES:
        rows = assistant.extend(token, rows).forward()
        yield assistant.logits(rows).forward()[0]


@pytest.mark.parametrize("size", [2, WINDOW, WINDOW + 1, WINDOW + 2, WINDOW + 3, 40])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_chained_steps_equal_those_of_transformers(
    folders: dict[tuple[str, bool], Any], name: str, is_ordered: bool, size: int
) -> None:
    (folder, reference), tokens = folders[name, is_ordered], text(size)
    assistant, target = ready(folder, name, tokens)
    expected = reference_steps(module(name), reference, tokens, GUESSES)
    for logits, (wanted, _) in zip(steps(assistant, target, tokens), expected, strict=True):
        known = logits > float("-inf")
        assert_close(torch.where(known, logits, wanted), wanted)
        assert int(known.sum()) == (16 if is_ordered else 48)
        if is_ordered:  # transformers gives all other tokens one number below these
            assert float(wanted[~known].max()) < float(wanted[known].min())


@pytest.mark.parametrize("name", TARGETS)
def test_rejected_rows_of_the_target_change_no_step(
    folders: dict[tuple[str, bool], Any], name: str
) -> None:
    """The target checks a draft, all of which is rejected; then the assistant drafts again."""
    (folder, _), tokens = folders[name, False], text(20)
    assistant, target = ready(folder, name, tokens)
    expected = list(steps(assistant, target, tokens))
    for num_rows in range(1, 17):
        target.forward(text(num_rows, 2))
        target.cache.rollback(len(tokens) - 1)
        for logits, wanted in zip(steps(assistant, target, tokens), expected, strict=True):
            assert torch.equal(logits, wanted)


def test_folder_of_transformers_is_known_as_an_assistant(
    folders: dict[tuple[str, bool], Any],
) -> None:
    assert head_kind(folders["gemma4", False][0]) == "assistant"


def refusal(folder: Path, target: Any) -> str:
    with pytest.raises(ModelError) as refused:
        read_assistant(folder, target)
    return str(refused.value)


def changed(folder: Path, out: Path, **config: Any) -> Path:
    """A copy of the folder with other settings; those of text_config come as `text`."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    values = json.loads((out / "config.json").read_text())
    values["text_config"] |= config.pop("text", {})
    (out / "config.json").write_text(json.dumps({**values, **config}))
    return out


def test_assistants_of_other_targets_are_refused(
    folders: dict[tuple[str, bool], Any], tmp_path: Path
) -> None:
    folder, ordered = folders["gemma4", False][0], folders["gemma4", True][0]
    target = with_cache(module("gemma4"), 48)
    assert "wide, and this one is 64 wide" in refusal(folder, with_cache(tiny_llama(), 48))
    assert "48 tokens, and this target 64" in refusal(
        changed(folder, tmp_path / "llama", backbone_hidden_size=64), with_cache(tiny_llama(), 48)
    )
    assert "have heads of 8" in refusal(
        changed(folder, tmp_path / "heads", text={"head_dim": 8}), target
    )
    assert "keys and values of their own" in refusal(
        changed(folder, tmp_path / "own", text={"num_kv_shared_layers": 2}), target
    )
    assert "in no 7 clusters" in refusal(
        changed(ordered, tmp_path / "clusters", num_centroids=7), target
    )


def test_an_assistant_is_no_model_to_chat_with(folders: dict[tuple[str, bool], Any]) -> None:
    with pytest.raises(ModelError, match="drafts for a Gemma 4"):
        load_model(folders["gemma4", False][0], torch.float32, torch.device("cpu"), 48)
