"""Heads draft the same by graphs as step by step, in one replay each, whatever was accepted before.

The graphs are those of the stand-in of tests.kit.tracing, which is as strict as a capture.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from localspec.controller.hindsight import foretold
from localspec.core.decoding import DraftPlan, Growth, Proposal, SamplingParams
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CudaGraphPool
from tests.kit.assistants import shared_keys
from tests.kit.families import small
from tests.kit.random_heads import head_for
from tests.kit.tiny import VOCAB_SIZE, Plans, play, tiny_llama, turn_of, with_plain_cache
from tests.kit.tracing import NO_GPU, StalePool, TracingPool, on_gpu

HEADS = tuple(name for name, info in REGISTRY.items() if info.needs == "head")
CHAINS = ("mtp", "assistant", "block")
PROMPT = tuple(1 + (7 * place * place) % 61 for place in range(24))
CAPACITY, LENGTH = 96, 4
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(0.8, seed=3),
    "cut": SamplingParams(0.8, top_k=9, top_p=0.95, min_p=0.02, repetition_penalty=1.6, seed=5),
}


@cache
def llama() -> Any:
    return tiny_llama()


@cache
def gemma() -> Any:
    with shared_keys():
        return small("gemma4", vocab_size=VOCAB_SIZE)


def built(name: str, pool: Any = None) -> tuple[Any, Decoder]:
    module = gemma if name == "assistant" else llama
    target = with_plain_cache(module(), CAPACITY)
    folder = head_for(name, module)
    return drafter_class(name).build(Parts(target, heads={name: folder}, pool=pool)), target


def captured(name: str, pool: Any) -> tuple[Any, Decoder]:
    """With drafts of one and of four tokens captured, of which any length is a sum."""
    drafter, target = built(name, pool)
    if name in ("mtp", "assistant"):
        drafter._head.draft_sizes = (1, 4)
    (graphs,) = drafter.captures
    graphs.want(SAMPLINGS["cut"])
    for _ in graphs.capture():
        pass
    return drafter, target


@cache
def replaying(name: str) -> tuple[Any, Decoder, TracingPool]:
    """One for all tests of a head: each begins with another text."""
    pool = TracingPool()
    drafter, target = captured(name, pool)
    (graphs,) = drafter.captures
    assert graphs.notice is None and not graphs.has_missing and pool.num_captures
    return drafter, target, pool


def rounds(
    drafter: Any, target: Decoder, sampling: SamplingParams, plan: DraftPlan
) -> list[Proposal]:
    """Drafts after a prompt and after rounds that accept nothing, a part and all of a chain, and
    after an edit."""
    text, proposals = list(PROMPT), list[Proposal]()
    texts = [text]
    for num_accepted in (0, 2, 4, 1):
        accepted = [(5 * len(text) + at) % VOCAB_SIZE for at in range(num_accepted + 1)]
        texts.append(text := [*text, *accepted])
    texts.append([*PROMPT[:9], 33, *PROMPT[10:]])
    for text in texts:
        if missing := text[target.cache.reuse(text[:-1]) : -1]:
            target.forward(missing, num_logits=1)
        proposals.append(drafter.propose(turn_of(tuple(text), sampling, 400), plan))
        target.cache.rollback(len(text) - 1)
    return proposals


def free(length: int) -> DraftPlan:
    """A tree whose places and steps cost nothing."""
    return DraftPlan("", length, growth=Growth(lambda chance: chance, (0.0,) * 64, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", HEADS)
def test_a_replayed_draft_is_the_draft_step_by_step(name: str, sampling: SamplingParams) -> None:
    """One replay makes all of it. A tree may have another shape where its steps are read at once,
    with the same chances."""
    plan = DraftPlan(name, LENGTH) if name in CHAINS else free(24)
    drafter, target, pool = replaying(name)
    pool.num_replays = 0
    found, wanted = rounds(drafter, target, sampling, plan), rounds(*built(name), sampling, plan)
    assert pool.num_replays == len(found)
    for one, other in zip(found, wanted, strict=True):
        chances, by_step = (
            dict(zip(each.texts, each.confidences or (), strict=True)) for each in (one, other)
        )
        both = chances.keys() & by_step.keys()
        assert len(both) >= (len(by_step) if name != "eagle" else 8)
        assert [chances[text] for text in both] == pytest.approx(
            [by_step[text] for text in both], abs=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_any_length_and_a_rule_end_a_replayed_draft_where_they_end_others(name: str) -> None:
    """Under a rule the host reads two tokens at a time, and of a block all at once."""
    sampling, asked = SAMPLINGS["sampled"], list[int]()
    drafter, target, _ = replaying(name)

    def keep_drafting(index: int, confidence: float) -> bool:
        asked.append(index)
        return index != 4

    for length, rule in ((1, None), (7, None), (7, keep_drafting)):
        plan = DraftPlan(name, length, keep_drafting=rule)
        found = rounds(drafter, target, sampling, plan)
        told, asked[:] = list(asked), []
        assert [each.tokens for each in found] == [
            each.tokens for each in rounds(*built(name), sampling, plan)
        ]
        assert told == asked and len(found[0].tokens) <= min(length, 5 if rule else length)


@pytest.mark.parametrize("name", ["mtp", "eagle", "block"])
def test_a_long_prompt_is_read_in_pieces_before_the_replay(name: str) -> None:
    """So that no other reply waits for all of it."""
    drafter, target, pool = replaying(name)
    text = tuple(1 + place % 40 for place in range(60))
    target.cache.rollback(0)
    target.forward(text[:-1], num_logits=1)
    steps = drafter.steps(turn_of(text, SAMPLINGS["greedy"], 400), DraftPlan(name, LENGTH))
    pool.num_replays, reading = 0, next(steps)
    assert reading.is_reading and pool.num_replays == 0 and reading.num_rows > 40
    for size in (16, 16):
        piece, reading = reading.cut(size)
        assert piece.num_rows == size
        piece.forward()
    with pytest.raises(StopIteration) as end:
        steps.send(reading.forward())
    wanted, model = built(name)
    model.forward(text[:-1], num_logits=1)
    plan = DraftPlan(name, LENGTH)
    found = wanted.propose(turn_of(text, SAMPLINGS["greedy"], 400), plan)
    assert end.value.value.tokens[:2] == found.tokens[:2] and pool.num_replays == 1


@pytest.mark.parametrize("name", HEADS)
def test_a_replay_that_does_nothing_is_not_used(name: str) -> None:
    drafter, target = captured(name, StalePool())
    assert "other tokens" in (drafter.captures[0].notice or "")
    plan = DraftPlan(name, LENGTH)
    found = rounds(drafter, target, SAMPLINGS["greedy"], plan)
    wanted = rounds(*built(name), SAMPLINGS["greedy"], plan)
    assert found[-1].tokens[:1] == wanted[-1].tokens[:1] != ()


@pytest.mark.parametrize("name", ["mtp", "eagle", "block"])
def test_what_was_no_number_spoils_one_draft(name: str) -> None:
    """Slots left behind by something that overflowed, which a mask does not hide."""
    drafter, target, _ = replaying(name)
    plan, sampling = DraftPlan(name, LENGTH), SAMPLINGS["greedy"]
    wanted = rounds(drafter, target, sampling, plan)
    for _, values in drafter._head.cache.slots:
        values[:, :, 60:] = float("nan")
    first, *rest = rounds(drafter, target, sampling, plan)
    assert first.tokens == ()
    assert [each.tokens for each in rest] == [each.tokens for each in wanted[1:]]


def test_graphs_of_another_kind_of_sampling_are_made_once_it_was_asked_for() -> None:
    drafter, target = built("medusa", pool := TracingPool())
    (graphs,) = drafter.captures
    assert len([*graphs.capture()]) == 1
    for num_replays in (0, 6):
        pool.num_replays = 0
        rounds(drafter, target, SAMPLINGS["cut"], free(8))
        assert pool.num_replays == num_replays
        assert graphs.has_missing is (num_replays == 0)
        assert len([*graphs.capture()]) == (num_replays == 0)


# -- with a GPU -------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mtp", "eagle", "medusa", "block"])
def test_real_graphs_draft_what_the_work_as_it_is_drafts(name: str) -> None:
    found = list[list[tuple[int, ...]]]()
    for is_captured in (True, False):
        target = on_gpu(torch.float32, CAPACITY)
        pool = CudaGraphPool(target.device, 2**30) if is_captured else None
        parts = Parts(target, heads={name: head_for(name, llama)}, pool=pool)
        drafter = drafter_class(name).build(parts)
        for graphs in drafter.captures:
            graphs.want(SAMPLINGS["cut"])
            assert bool([*graphs.capture()]) is is_captured and graphs.notice is None
        found += [
            [each.tokens for each in rounds(drafter, target, sampling, DraftPlan(name, LENGTH))]
            for sampling in (SAMPLINGS["greedy"], SAMPLINGS["cut"])
        ]
    assert found[:2] == found[2:]


@pytest.mark.slow
def test_a_review_does_not_change_the_drafts_after_it() -> None:
    """A tree that is read whole is sized by the trees before it."""
    after = []
    for is_reviewed in (False, True):
        drafter, target = captured("eagle", TracingPool())
        target.cache.rollback(0)
        engine, plan = Engine(target, {"eagle": drafter}), ("eagle", 4)
        sequence = play(engine, (5, 9, 12, 5, 9), Plans(("off", 0)), 30)
        if is_reviewed:
            with pytest.raises(StopIteration) as end:
                next(drafter.review(sequence))
            rounds = foretold(Plans(plan), end.value.value, sequence, engine.within_reach)
            assert sum(each.num_accepted_tokens for each in rounds) > 0
        policy = Plans(plan)
        play(engine, (7, 8, 9, 7, 8), policy, 30)
        after.append([(each.tokens, each.num_draft_steps) for each in policy.proposals])
    assert after[0] == after[1]
