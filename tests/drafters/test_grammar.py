"""Under a grammar the reply is the target's own under the same mask, token for token, whatever
drafts; over seeds it is distributed so. The grammar here is made up: the engine knows no text."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, DraftPlan, Growth, SamplingParams
from localspec.core.leniency import Factor, Leniency, Threshold, Typical
from localspec.drafters.registry import REGISTRY
from localspec.engine import engine as engine_module
from localspec.engine.engine import Engine
from localspec.engine.sampling import distributions
from tests.drafters.stages import (
    LENGTH,
    NAMES,
    PROMPT,
    SMALL_PROMPT,
    SMALL_VOCAB,
    WARPS,
    small_logits,
    small_stage,
    stage,
)
from tests.kit.chi_squared import p_value
from tests.kit.grammars import MadeUp
from tests.kit.tiny import END_ID, VOCAB_SIZE, Context, Plans, decoded


def of_sums(reply: Sequence[int]) -> set[int]:
    """What may follow depends on all tokens before. Three of five tokens are forced; the end may
    come after every seventh."""
    if len(reply) % 5 in (0, 3, 4):
        return {(sum(reply) * 7) % END_ID}
    ends = {END_ID} if len(reply) % 7 == 6 else set()
    return {token for token in range(END_ID) if (token + sum(reply)) % 4 < 2} | ends


def reply_of(
    engine: Engine, plans: Plans, sampling: SamplingParams, prompt: Context = PROMPT
) -> Context:
    engine.target.cache.rollback(0)
    ends, grammar = frozenset({END_ID}), MadeUp(of_sums, VOCAB_SIZE, is_wrong=True)
    sequence = engine.start(prompt, sampling, LENGTH, ends, grammar=grammar)
    found = decoded(engine, sequence, plans)
    assert engine.target.cache.tokens == sequence.tokens[:-1]
    assert grammar.allows(found)
    return tuple(found)


@pytest.mark.slow
def test_with_a_grammar_a_seed_gives_the_reply_of_plain_decoding() -> None:
    engine = stage().engine
    accepted = dict.fromkeys(NAMES, 0)
    for seed, warp in enumerate(("greedy", "cool", "all")):
        sampling = replace(WARPS[warp], seed=seed)
        plain = reply_of(engine, Plans((OFF, 0)), sampling)
        for name in NAMES:
            plans = Plans((name, 5))
            assert reply_of(engine, plans, sampling) == plain, (name, warp)
            accepted[name] += sum(step.num_accepted_tokens for step in plans.steps)
    guessers = [name for name in NAMES if REGISTRY[name].family in ("model", "self")]
    assert all(accepted[name] > 0 for name in guessers), accepted


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Threshold(0.0), Typical(), Factor(50.0)])
def test_no_leniency_accepts_what_the_grammar_forbids(rule: Leniency) -> None:
    """`reply_of` looks at every token."""
    engine = stage(("draft_model", "ngram", "medusa")).engine
    lenient = 0
    for seed in range(4):
        plans = Plans(("draft_model", 4), ("ngram", 4), ("medusa", 6))
        reply_of(engine, plans, SamplingParams(1.0, seed=seed, leniency=rule))
        lenient += sum(step.num_lenient_tokens for step in plans.steps)
    assert lenient > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "draft_model", "draft_tree", "self_quant", "early_exit"])
def test_what_is_forced_is_drafted_without_a_step_and_accepted(name: str) -> None:
    def counting(reply: Sequence[int]) -> set[int]:
        return {len(reply) % END_ID} if len(reply) < 12 else {1, 2}

    engine, plans = stage((name,)).engine, Plans((name, 7))
    grammar = MadeUp(counting, VOCAB_SIZE)
    sequence = engine.start(PROMPT, SamplingParams(1.0, seed=0), 12, frozenset(), grammar=grammar)
    engine.prefill(sequence, threading.Event())
    rounds = list(engine.decode(sequence, plans, threading.Event()))
    assert [len(one.tokens) for one in rounds] == [8, 4]
    no_steps = 1 if name == "ngram" else 0  # it has no model: a lookup is its step
    assert all(one.proposal.num_draft_steps == no_steps for one in rounds)


@pytest.mark.parametrize("name", ["draft_model", "draft_tree"])
def test_a_draft_goes_on_behind_what_is_forced(name: str) -> None:
    """Also inside a draft: four tokens take the two steps of those that are not forced."""
    engine = stage((name,)).engine
    found = list[decoding.Proposal]()
    for start in ((), (7,)):
        grammar = MadeUp(lambda reply: {9} if len(reply) % 2 else {7, 8}, VOCAB_SIZE)
        sequence = engine.start(PROMPT, SamplingParams(), 20, frozenset(), grammar=grammar)
        sequence.tokens += start
        engine.target.cache.rollback(0)
        engine.prefill(sequence, threading.Event())
        growth = Growth(lambda confidence: confidence, (0.0,) * 4, 0.0)
        plan = DraftPlan(name, 4, growth=growth)
        found.append(engine.drafters[name].propose(sequence, plan))
    for proposal, forced in zip(found, ({2, 4}, {1, 3}), strict=True):
        paths = [text for text in proposal.texts if len(text) in forced]
        assert paths and all(text[-1] == 9 for text in paths)
        assert proposal.num_draft_steps == 2


# -- the distribution over seeds ------------------------------------------------------------------


def of_neighbours(reply: Sequence[int]) -> set[int]:
    """A token may be followed by itself and the next three."""
    last = reply[-1] if reply else 0
    return {(last + step) % SMALL_VOCAB for step in range(4)}


@pytest.mark.slow
def test_over_seeds_a_reply_is_distributed_as_the_targets_own_under_the_mask() -> None:
    sampling, engine = SamplingParams(1.5), small_stage("draft_model")
    grammar = MadeUp(of_neighbours, SMALL_VOCAB)

    def row(text: Context) -> torch.Tensor:
        context = (*SMALL_PROMPT, *text)
        logits = small_logits()[0](context).clone()
        logits[[token for token in range(SMALL_VOCAB) if token not in of_neighbours(text)]] = float(
            "-inf"
        )
        return distributions(logits[None], sampling, [context])[0].double()

    table = torch.zeros(SMALL_VOCAB, SMALL_VOCAB, dtype=torch.float64)
    for first in of_neighbours(()):
        table[first] = row(())[first] * row((first,))
    counts = torch.zeros(SMALL_VOCAB, SMALL_VOCAB)
    for seed in range(800):
        seeded = replace(sampling, seed=seed)
        sequence = engine.start(SMALL_PROMPT, seeded, 3, frozenset(), grammar=grammar)
        a, b, _ = decoded(engine, sequence, Plans(("draft_model", 2)))
        counts[a, b] += 1
    assert p_value(counts, table) > 1e-5


# -- planted faults -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["every row has the root's mask", "the root alone is masked"])
def test_fault_a_mask_of_another_node_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masked = engine_module.masked

    def wrong(
        logits: torch.Tensor, sequence: decoding.Sequence, texts: Sequence[Context]
    ) -> torch.Tensor:
        if fault.startswith("every"):
            return masked(logits, sequence, [()] * len(texts))
        return torch.cat((masked(logits[:1], sequence, [()]), logits[1:]))

    monkeypatch.setattr(engine_module, "masked", wrong)
    engine = stage(("draft_tree",)).engine
    with pytest.raises(AssertionError):
        for seed in range(6):
            sampling = replace(WARPS["all"], seed=seed)
            plain = reply_of(engine, Plans((OFF, 0)), sampling)
            assert reply_of(engine, Plans(("draft_tree", 6)), sampling) == plain
