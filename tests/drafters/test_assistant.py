"""The assistant of a Gemma 4 changes no reply, and nothing has to be done before it drafts."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from localspec.core.decoding import OFF, DraftPlan, SamplingParams
from localspec.core.errors import ModelError
from localspec.drafters.assistant import AssistantDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.features import LAST
from localspec.forward.heads.assistant import Assistant, read_assistant
from tests.drafters.stages import WARPS
from tests.kit.assistants import save_assistant, shared_keys
from tests.kit.families import small
from tests.kit.tiny import Plans, play, turn_of, with_cache

TARGETS = ("gemma4", "gemma4, values from keys", "gemma4, keys of earlier layers")
LENGTH = 24


def prompt(size: int = 9, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 48), k=size))


@cache
def module(name: str) -> Any:
    with shared_keys():
        return small(name)


@pytest.fixture(scope="module", params=TARGETS)
def assisted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder, target = tmp_path_factory.mktemp("assistant"), with_cache(module(request.param), 128)
    save_assistant(folder, module(request.param), is_ordered=request.param == TARGETS[2])
    drafter = AssistantDrafter.build(Parts(target, heads={"assistant": folder}))
    return Engine(target, {"assistant": drafter})


def reply(assisted: Engine, *plans: tuple[str, int], warp: str = "greedy") -> list[int]:
    assisted.target.cache.rollback(0)
    return list(
        play(assisted, prompt(), Plans(*plans), LENGTH, replace(WARPS[warp], seed=7)).tokens
    )


@pytest.mark.parametrize("warp", ["greedy", "cool", "plain", "all"])
def test_reply_is_that_of_plain_decoding(assisted: Engine, warp: str) -> None:
    plain = reply(assisted, (OFF, 0), warp=warp)
    for plans in ((("assistant", 1),), (("assistant", 7),), (("assistant", 3), (OFF, 0))):
        assert reply(assisted, *plans, warp=warp) == plain


def test_next_turn_and_an_edited_one_are_as_afresh(assisted: Engine) -> None:
    first = reply(assisted, ("assistant", 4))
    for text in ((*first, *prompt(5, 2)), (*first[:12], *prompt(6, 3))):
        drafted = play(assisted, text, Plans(("assistant", 4)), LENGTH, SamplingParams()).tokens
        assisted.target.cache.rollback(0)
        plain = play(assisted, text, Plans((OFF, 0)), LENGTH, SamplingParams()).tokens
        assert list(drafted) == list(plain)


def test_draft_read_at_once_is_the_draft_read_token_by_token(tmp_path: Path) -> None:
    target, name = with_cache(module("gemma4"), 128), "gemma4"
    save_assistant(tmp_path, module(name))
    sequence = turn_of(prompt(), SamplingParams())
    target.follow((LAST,))
    target.forward(prompt()[:-1])
    head = Assistant(read_assistant(tmp_path, target), target)
    drafts = [
        AssistantDrafter(target, head, reads_once).propose(sequence, DraftPlan("assistant", 6))
        for reads_once in (False, True)
    ]
    assert len(drafts[0].tokens) == 6 and drafts[0].tokens == drafts[1].tokens


def test_target_without_an_assistant_is_told_what_to_fetch() -> None:
    with pytest.raises(ModelError, match="no assistant, as Gemma 4 has them, for this"):
        AssistantDrafter.build(Parts(with_cache(module("gemma4"), 48)))
