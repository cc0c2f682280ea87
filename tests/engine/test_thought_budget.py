"""A thought ends exactly at its budget, drafted or not; one that ends before is left alone."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from localspec.controller.acceptance import THINKING, Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.controller.policy import policy_of
from localspec.core import decoding
from localspec.core.decoding import FORCED, OFF, DraftPlan, Proposal, SamplingParams, chain
from localspec.core.thought import ThoughtLimit
from localspec.engine.engine import Engine
from tests.kit.tiny import Plans, TableModel

OPEN, CLOSE, BREAK, VOCAB = 5, 6, 7, 40
CLOSING = (BREAK, CLOSE, BREAK)
LIMIT = ThoughtLimit((OPEN,), CLOSE, CLOSING)
PROMPT = (1, 2, 3)
WARM = SamplingParams(0.8, seed=4)


def model(thought: int | None) -> TableModel:
    """Thinks for so many tokens, for ever where it is None, then says something."""

    def logits(context: tuple[int, ...]) -> torch.Tensor:
        place = len(context) - len(PROMPT)
        row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(sum(context) + place))
        row[: CLOSE + 2] = -50.0  # no mark where none belongs
        if place == 0:
            row[OPEN] = 50.0
        if thought is not None and place == thought + 1:
            row[CLOSE] = 50.0
        return 3.0 * row

    return TableModel(logits, VOCAB)


class Half:
    """Knows the reply, but errs at every fifth place."""

    name = "half"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def __init__(self, reply: list[int]) -> None:
        self._reply = reply

    def signal(self, sequence: decoding.Sequence) -> str:
        return "s"

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place = len(sequence.tokens) - len(PROMPT)
        right = self._reply[place : place + plan.num_draft_tokens]
        return chain(tuple(t if (place + i) % 5 else 1 for i, t in enumerate(right)))

    def observe(self, sequence: decoding.Sequence, outcome: decoding.Outcome) -> None:
        pass


def reply_of(
    thought: int | None, limit: ThoughtLimit, sampling: SamplingParams, known: list[int] | None
) -> tuple[list[int], list[str]]:
    """Tokens and where each came from. known: what the drafter knows, None: nothing drafts."""
    engine = Engine(model(thought), {"half": Half(known or [])})
    sequence = engine.start(PROMPT, sampling, 8, frozenset(), thought=limit)
    engine.prefill(sequence, threading.Event())
    policy, sources = Plans((OFF, 0) if known is None else ("half", 6)), list[str]()
    for found in engine.decode(sequence, policy, threading.Event()):
        sources += found.provenance
        assert engine.target.cache.tokens == sequence.tokens[:-1]
        assert found.step.num_output_tokens == len(found.tokens)
    assert sequence.finish_reason == "length"
    return sequence.tokens[len(PROMPT) :], sources


@pytest.mark.parametrize("sampling", [SamplingParams(), WARM])
@pytest.mark.parametrize("budget", [0, 1, 5, 11])
def test_a_thought_ends_at_its_budget_drafted_or_not(budget: int, sampling: SamplingParams) -> None:
    limit = replace(LIMIT, budget=budget)
    plain, sources = reply_of(None, limit, sampling, None)
    assert plain[0] == OPEN and tuple(plain[1 + budget :][:3]) == CLOSING
    assert len(plain) == 1 + budget + len(CLOSING) + 8, "max_tokens are those of the answer"
    assert sources.count(FORCED) == len(CLOSING) and sources[1 + budget] == FORCED
    drafted, by = reply_of(None, limit, sampling, plain)
    assert drafted == plain and by.count(FORCED) == len(CLOSING)
    assert budget < 5 or by.count("half") > 3


@pytest.mark.parametrize("sampling", [SamplingParams(), WARM])
def test_a_thought_that_ends_before_its_budget_is_left_alone(sampling: SamplingParams) -> None:
    limit = replace(LIMIT, budget=9)
    plain, sources = reply_of(6, limit, sampling, None)
    free, _ = reply_of(6, LIMIT, replace(sampling), None)
    shared, _ = reply_of(6, replace(limit, shares_max_tokens=True), sampling, None)
    assert plain[:8] == free[:8] and plain.index(CLOSE) == 7 and FORCED not in sources
    assert len(plain) == 8 + 8 and len(free) == 8, "without a budget both share max_tokens"
    assert shared == plain[: len(shared)] and len(shared) == 8, "also where the limit says so"
    assert reply_of(6, limit, sampling, plain)[0] == plain


def test_what_was_thought_before_a_reply_goes_on_counts() -> None:
    limit = replace(LIMIT, budget=6, num_begun=4)
    reply, _ = reply_of(None, limit, SamplingParams(), None)
    assert tuple(reply[2:5]) == CLOSING and len(reply) == 2 + 3 + 8


def test_acceptance_in_thoughts_is_learnt_apart() -> None:
    costs = Costs()
    for width in (1, 8):
        costs.set_verify(width, 10, 1.0)
    limit = replace(LIMIT, budget=9)
    plain, _ = reply_of(None, limit, SamplingParams(), None)
    half = Half(plain)
    controller = Controller({"half": half}, costs, Acceptance())
    engine = Engine(model(None), {"half": half})
    sequence = engine.start(PROMPT, SamplingParams(), 8, frozenset(), thought=limit)
    engine.prefill(sequence, threading.Event())
    policy = policy_of(controller, sequence.sampling, "half", 3, kind="code")
    rounds = list(engine.decode(sequence, policy, threading.Event()))
    kinds = {row["kind"]: row for row in controller.snapshot()["acceptance"]["records"]}
    assert {THINKING, "code"} <= set(kinds)
    seen = kinds[THINKING]["num_rounds"] + kinds["code"]["num_rounds"]
    assert seen == pytest.approx(sum(bool(one.step.num_draft_tokens) for one in rounds), rel=0.1)
