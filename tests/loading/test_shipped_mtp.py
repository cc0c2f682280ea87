"""A trained Qwen3.5 drafts with the module in its own folder, without a flag.

The model has learnt eight short talks by heart, and its module to draft for it
(tests.kit.trained_qwen).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.backend import Message, Request
from localspec.core.decoding import SamplingParams, Sequence
from localspec.core.options import LoadOptions
from localspec.forward.features import Features
from localspec.forward.heads import mtp_files
from localspec.loading import drafters as guesses
from localspec.loading import fitting
from localspec.loading.local_backend import open_local_backend
from tests.kit.model_folders import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]
TRAINED = Path(__file__).parent / "trained_qwen"
ASKED = ("fox", "star")
# How far the acceptance of every planted-wrong variant lies below that of the module as it is.
MARGIN = 0.25


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "qwen"
    shutil.copytree(TRAINED, folder)
    save_tokenizer(folder)
    return folder


def opened(folder: Path, **more: Any) -> Any:
    options = LoadOptions(model=str(folder), context=256, dtype="float32", **more)
    return open_local_backend(options, None, lambda phrase: None)


def replies(backend: Any, drafter: str, sampling: SamplingParams) -> tuple[list[str], float]:
    """What it writes, and the share of its draft tokens that are accepted."""
    texts, drafted, accepted = list[str](), 0, 0
    for asked in ASKED:
        message = (Message("user", asked),)
        request = Request(message, sampling, 48, drafter=drafter, num_draft_tokens=3)
        chunks = list(backend.generate(request, threading.Event()))
        assert chunks[-1].error is None
        texts.append("".join(chunk.text for chunk in chunks))
        steps = [chunk.step for chunk in chunks if chunk.step is not None]
        drafted += sum(step.num_draft_tokens for step in steps)
        accepted += sum(step.num_accepted_tokens for step in steps)
    return texts, accepted / max(1, drafted)


def states_before_the_norm(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """A module normalises what it reads, so that only the weights of the final norm differ."""
    weight, rows = backend.loaded.engine.target.weights.final_norm.weight, Features.rows
    patch.setattr(Features, "rows", lambda *asked: rows(*asked) / weight)


def states_one_off(patch: pytest.MonkeyPatch, backend: Any) -> None:
    rows = Features.rows

    def earlier(self: Features, layer: int, start: int, end: int) -> torch.Tensor:
        return rows(self, layer, max(0, start - 1), end - 1 if start else end)

    patch.setattr(Features, "rows", earlier)


def as_it_is(patch: pytest.MonkeyPatch, backend: Any) -> None:
    """Nothing is planted."""


WRONG: tuple[Callable[[pytest.MonkeyPatch, Any], None], ...] = (
    states_before_the_norm,
    states_one_off,
)


def test_the_module_drafts_and_every_wrong_variant_is_accepted_less(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(trained_folder)
    status = next(each for each in backend.describe().drafters if each.name == "mtp")
    assert status.is_available and status.memory_bytes
    turn = Sequence((1,) * 200, SamplingParams(), 8, frozenset(), torch.Generator())
    missed = backend.loaded.controller.catch_up.num_missed("mtp", turn, 199)
    assert missed == 200, "it is charged for a prompt that it reads"
    greedy = SamplingParams()
    texts, right = replies(backend, "mtp", greedy)
    assert "quick brown fox" in texts[0] and texts == replies(backend, "off", greedy)[0]
    assert right > 0.6
    for plant in WRONG:
        with monkeypatch.context() as patch:
            plant(patch, backend)
            same, wrong = replies(backend, "mtp", greedy)
        assert same == texts and wrong <= right - MARGIN, (plant.__name__, wrong, right)
    known = mtp_files.LAYOUTS
    swapped = {name: replace(each, is_hidden_first=True) for name, each in known.items()}
    monkeypatch.setattr(mtp_files, "LAYOUTS", swapped)
    same, wrong = replies(opened(trained_folder), "mtp", greedy)
    assert same == texts and wrong <= right - MARGIN


def test_sampled_replies_are_the_same_with_the_module(trained_folder: Path) -> None:
    backend, sampling = opened(trained_folder), SamplingParams(0.8, seed=5)
    drafted, share = replies(backend, "mtp", sampling)
    assert drafted == replies(backend, "off", sampling)[0] and share > 0.3


def test_where_there_is_no_room_the_module_is_left_out_and_says_so(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fitting.heads_without_room

    def with_a_kilobyte(*asked: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(fitting, "free_bytes_now", lambda *_: 1024)
            return real(*asked)

    monkeypatch.setattr(guesses, "heads_without_room", with_a_kilobyte)
    backend = opened(trained_folder)
    status = next(each for each in backend.describe().drafters if each.name == "mtp")
    assert (status.is_available, status.code) == (False, "no_memory")
    assert "needs" in status.reason and "shorter --context" in status.reason
    assert "so it is left out: the context of 256 tokens stays" in status.reason
    assert status.reason in backend.describe().notices, "nobody asked for it, and it is said"
    assert "quick brown fox" in replies(backend, "off", SamplingParams())[0][0]
