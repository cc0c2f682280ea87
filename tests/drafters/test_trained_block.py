"""A block drafter that was trained drafts what its target says; with wrong inputs it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.options import LoadOptions
from localspec.forward.features import Features
from localspec.forward.heads.block import BlockHead
from localspec.forward.heads.block_parts import BlockParts
from localspec.loading import drafters as guesses
from localspec.loading import fitting
from localspec.loading.local_backend import open_local_backend
from tests.kit.through_app import RunningApp, check_head, states_one_off, through_app
from tests.kit.trained_assistant import DIALOGUES, prompt_of
from tests.kit.trained_block import write_pair
from tests.kit.trained_heads import acceptance

pytestmark = [pytest.mark.slow]  # trains both models
# How much more often the right inputs must be accepted, as a share of the drafted tokens.
MARGIN = 0.15


@pytest.fixture(scope="module")
def trained_block(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    write_pair(folder / "target", folder / "block")
    return folder / "target", folder / "block"


class RowsOff(BlockHead):
    """Takes the row of a token for that of the token after it."""

    def __init__(self, parts: BlockParts, *others: Any) -> None:
        super().__init__(replace(parts, layout=replace(parts.layout, samples_root=True)), *others)


class LateContext(BlockHead):
    """Makes each row of the context of the state of the token before."""

    def _context(
        self, tokens: Sequence[int], features: Features, first: int, end: int
    ) -> torch.Tensor:
        if first == 0:
            return super()._context(tokens, features, first, end).roll(1, 0)
        return super()._context(tokens, features, first - 1, end - 1)


@pytest.mark.parametrize("wrong", [RowsOff, LateContext])
def test_trained_drafter_is_accepted_more_often_than_with_wrong_inputs(
    trained_block: tuple[Path, Path], wrong: type[BlockHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(trained_block[0])
    right = acceptance("block", trained_block, prompt)
    monkeypatch.setattr("localspec.drafters.block.BlockHead", wrong)
    assert right >= acceptance("block", trained_block, prompt) + MARGIN


def test_trained_block_that_is_named_as_the_draft_drafts_in_the_app(
    trained_block: tuple[Path, Path], tmp_path: Path
) -> None:
    target, folder = trained_block
    question, answer = next(iter(DIALOGUES.items()))

    def use(running: RunningApp) -> None:
        (reply,), _ = check_head(running, "block", [question], [states_one_off], MARGIN)
        assert reply.startswith(answer[:20])

    flags = ["--model", str(target), "--draft", str(folder), "--context", "256"]
    through_app(tmp_path, [*flags, "--dtype", "fp32"], use)


@pytest.mark.usefixtures("own_home")
def test_drafter_without_room_is_left_out_and_the_context_stays(
    trained_block: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fitting.heads_without_room

    def with_a_kilobyte(*asked: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(fitting, "free_bytes_now", lambda *_: 1024)
            return real(*asked)

    monkeypatch.setattr(guesses, "heads_without_room", with_a_kilobyte)
    target, folder = trained_block
    options = LoadOptions(
        model=str(target), draft=str(folder), context=256, dtype="fp32", home=tmp_path
    )
    backend = open_local_backend(options, None, lambda phrase: None)
    status = next(each for each in backend.describe().drafters if each.name == "block")
    assert (status.is_available, status.code) == (False, "no_memory")
    assert "needs" in status.reason and "shorter --context" in status.reason
    assert any(status.reason in notice for notice in backend.describe().notices)
    assert backend.describe().context_length == 256
