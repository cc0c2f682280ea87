"""A trained Qwen3.5 drafts with the module in its own folder, without a flag.

The model has learnt eight short talks by heart, and its module to draft for it
(tests.kit.trained_qwen).
"""

from __future__ import annotations

import shutil
import threading
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
from tests.kit.through_app import RunningApp, check_head, states_one_off, through_app

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


def test_the_module_drafts_in_the_app_and_every_wrong_variant_is_accepted_less(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No flag names it."""
    flags = ["--model", str(trained_folder), "--context", "256", "--dtype", "float32"]
    shares = dict[str, float]()

    def use(running: RunningApp) -> None:
        turn = Sequence((1,) * 200, SamplingParams(), 8, frozenset(), torch.Generator())
        missed = running.backend.loaded.controller.catch_up.num_missed("mtp", turn, 199)
        assert missed == 200, "it is charged for a prompt that it reads"
        wrong = [states_before_the_norm, states_one_off]
        texts, shares["right"] = check_head(running, "mtp", ASKED, wrong, MARGIN)
        assert "quick brown fox" in texts[0]

    through_app(tmp_path / "right", flags, use)
    known = mtp_files.LAYOUTS
    swapped = {name: replace(each, is_hidden_first=True) for name, each in known.items()}
    monkeypatch.setattr(mtp_files, "LAYOUTS", swapped)

    def use_swapped(running: RunningApp) -> None:
        shares["swapped"] = running.replies(ASKED, "mtp")[1]

    through_app(tmp_path / "swapped", flags, use_swapped)
    assert shares["swapped"] <= shares["right"] - MARGIN


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
