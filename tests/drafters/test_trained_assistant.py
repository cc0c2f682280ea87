"""An assistant that was trained drafts what its target says; with the wrong state it does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from localspec.forward.features import LAST, Features
from localspec.forward.heads.assistant import Assistant, AssistantRow
from localspec.forward.passes import Pass
from tests.kit.through_app import RunningApp, check_head, states_one_off, through_app
from tests.kit.trained_assistant import DIALOGUES, prompt_of, write_pair
from tests.kit.trained_heads import acceptance

pytestmark = [pytest.mark.slow]  # trains both models
# How much more often the right inputs must be accepted, as a share of the drafted tokens.
MARGIN = 0.15


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    write_pair(folder / "target", folder / "assistant")
    return folder / "target", folder / "assistant"


class OffByOne(Assistant):
    """Reads the state of the token before the last one."""

    def start(self, tokens: Sequence[int], features: Features) -> Pass:
        length = self.position
        return AssistantRow(self, tokens[-1:], features.rows(LAST, length - 2, length - 1))


class NoKeys(Assistant):
    """Sees the first token alone."""

    def attention(self) -> Any:
        cache, tokens = self._target.cache, self._target.cache.tokens
        held, cache.tokens = tokens, tokens[:1]
        try:
            return super().attention()
        finally:
            cache.tokens = held


@pytest.mark.parametrize("wrong", [OffByOne, NoKeys])
def test_trained_assistant_is_accepted_more_often_than_with_wrong_inputs(
    trained_pair: tuple[Path, Path], wrong: type[Assistant], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(trained_pair[0])
    right = acceptance("assistant", trained_pair, prompt)
    monkeypatch.setattr("localspec.drafters.assistant.Assistant", wrong)
    found = acceptance("assistant", trained_pair, prompt)
    assert right >= found + MARGIN


def test_trained_assistant_that_is_named_as_the_draft_drafts_in_the_app(
    trained_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, folder = trained_pair
    question, answer = next(iter(DIALOGUES.items()))

    def use(running: RunningApp) -> None:
        (reply,), _ = check_head(running, "assistant", [question], [states_one_off], MARGIN)
        assert reply.startswith(answer[:20])

    flags = ["--model", str(target), "--draft", str(folder), "--context", "256"]
    through_app(tmp_path, [*flags, "--dtype", "fp32"], use)
