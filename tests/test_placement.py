"""A target that does not fit is refused with what would, or loaded all the same where the person
says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from localspec import placement
from localspec.errors import MemoryShortage
from localspec.load import open_local_backend
from localspec.machine.hardware import probe
from localspec.options import LoadOptions
from localspec.placement import Place, check_target, needed_bytes
from tests.machine.folders import VOCAB_SIZE, save_model
from tests.tiny import tiny_llama

CONTEXT = 4096


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("room") / "target", tiny_llama(vocab_size=VOCAB_SIZE))


@pytest.fixture
def place() -> Place:
    return Place(probe(), torch.device("cpu"), torch.float32, None, CONTEXT)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(placement, "free_bytes_now", lambda *_, **__: free)


def changed(place: Place, **fields: Any) -> Place:
    from dataclasses import replace

    return replace(place, **fields)


def test_what_fits_is_no_matter(
    monkeypatch: pytest.MonkeyPatch, target: Path, place: Place
) -> None:
    with_free(monkeypatch, needed_bytes(target, place))
    assert check_target(target, place, anyway=False) is None


def test_a_refusal_names_the_longest_context_that_would_fit(
    monkeypatch: pytest.MonkeyPatch, target: Path, place: Place
) -> None:
    with_free(monkeypatch, needed_bytes(target, changed(place, context_length=1024)) + 1)
    with pytest.raises(MemoryShortage, match=r"is free on .*\. A context of 1024 tokens .*fit"):
        check_target(target, place, anyway=False)


def test_a_refusal_names_the_fewer_bits_that_would_fit(
    monkeypatch: pytest.MonkeyPatch, target: Path, place: Place
) -> None:
    short = changed(place, context_length=512)
    with_free(monkeypatch, needed_bytes(target, changed(short, bits=4)))
    with pytest.raises(MemoryShortage) as refused:
        check_target(target, short, anyway=False)
    assert "4-bit weights would fit" in str(refused.value)
    assert "8-bit" not in str(refused.value) and "context of 2" not in str(refused.value)


def test_where_nothing_would_fit_a_smaller_model_is_the_remedy(
    monkeypatch: pytest.MonkeyPatch, target: Path, place: Place
) -> None:
    with_free(monkeypatch, 1000)
    with pytest.raises(MemoryShortage, match="choose a smaller model"):
        check_target(target, place, anyway=False)


def test_anyway_turns_the_refusal_into_a_notice_with_the_risk(
    monkeypatch: pytest.MonkeyPatch, target: Path
) -> None:
    with_free(monkeypatch, 1000)
    options = LoadOptions(model=str(target), context=128, dtype="float32", anyway=True)
    backend = open_local_backend(options, None, lambda phrase: None)
    notice = next(each for each in backend.describe().notices if "as you chose" in each)
    assert "is free" in notice and "the system may end" in notice
