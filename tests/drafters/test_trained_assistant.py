"""An assistant that was trained drafts what its target says; with the wrong state it does not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.backend import Message, Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.options import LoadOptions
from localspec.drafters.assistant import AssistantDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.features import LAST, Features
from localspec.forward.heads.assistant import Assistant, AssistantRow
from localspec.forward.load import load_model
from localspec.forward.passes import Pass
from localspec.loading.local_backend import open_local_backend
from tests.kit.tiny import Plans, play
from tests.kit.trained_assistant import DIALOGUES, prompt_of, write_pair

pytestmark = [pytest.mark.slow]  # trains both models
# How much more often the right inputs must be accepted, as a share of the drafted tokens.
MARGIN = 0.15
DRAFT_LENGTH = 4


@pytest.fixture(scope="module")
def trained_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trained")
    write_pair(folder / "target", folder / "assistant")
    return folder / "target", folder / "assistant"


def acceptance(pair: tuple[Path, Path], prompt: Sequence[int]) -> float:
    target = load_model(pair[0], torch.float32, torch.device("cpu"), 256).model
    drafter = AssistantDrafter.build(Parts(target, heads={"assistant": pair[1]}))
    policy = Plans(("assistant", DRAFT_LENGTH))
    play(Engine(target, {"assistant": drafter}), prompt, policy, 48, SamplingParams())
    drafted = sum(step.num_draft_tokens for step in policy.steps)
    return sum(step.num_accepted_tokens for step in policy.steps) / drafted


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
    right = acceptance(trained_pair, prompt)
    monkeypatch.setattr("localspec.drafters.assistant.Assistant", wrong)
    found = acceptance(trained_pair, prompt)
    assert right >= found + MARGIN


@pytest.mark.usefixtures("own_home")
def test_trained_assistant_that_is_named_as_the_draft_drafts_in_a_chat(
    trained_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, folder = trained_pair
    options = LoadOptions(
        model=str(target), draft=str(folder), context=256, dtype="fp32", home=tmp_path
    )
    backend = open_local_backend(options, None, lambda phrase: None)
    assert not [each for each in backend.describe().notices if "asked for" in each]
    question, answer = next(iter(DIALOGUES.items()))
    request = Request((Message("user", question),), max_tokens=48, drafter="assistant")
    replies = {}
    for drafter in ("assistant", OFF):
        chunks = list(backend.generate(replace(request, drafter=drafter), threading.Event()))
        replies[drafter] = "".join(chunk.text for chunk in chunks)
        if drafter == "assistant":
            stats = chunks[-1].stats
            assert stats.num_accepted_tokens / stats.num_draft_tokens >= 0.5
    assert replies["assistant"] == replies[OFF] and replies[OFF].startswith(answer[:20])
