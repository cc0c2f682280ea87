"""At every temperature the same seed gives the same reply, token for token, whatever drafts.

Replies of every drafter, under random plans too, are compared with plain decoding's. Over six
tokens every text that the target may choose is forced by its noise, so that no branch of a round is
left to chance. Over many seeds the reply is distributed as the target's own, by chi-squared. Faults
are planted and must be seen.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, SamplingParams
from localspec.drafters.registry import REGISTRY
from localspec.engine import engine as engine_module
from localspec.engine.engine import Engine
from localspec.engine.sampling import distributions, scores
from localspec.forward.cache import KVCache, KVShape
from tests.drafters.stages import (
    NAMES,
    PROMPT,
    SMALL_PROMPT,
    SMALL_VOCAB,
    WARPS,
    RandomPlans,
    check_same,
    plain_reply,
    small_logits,
    small_module,
    small_stage,
    small_target,
    stage,
)
from tests.kit.chi_squared import p_value
from tests.kit.tiny import CPU, Context, Plans, TableModel, decoded, play, turn_of, with_cache

NUM_TURNS = 1000
SIGNIFICANCE = 1e-5
QUICK_WARPS = ("plain", "all")
OTHER_WARPS = tuple(warp for warp in WARPS if warp not in QUICK_WARPS)
warps = pytest.mark.parametrize(
    "warp", [*QUICK_WARPS, *(pytest.param(w, marks=pytest.mark.slow) for w in OTHER_WARPS)]
)


# -- the same seed, the same reply ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_reply_of_plain_decoding(name: str) -> None:
    engine, accepted = stage((name,)).engine, 0
    for seed, (length, warp) in enumerate(((9, "all"), (4, "plain"), (1, "all"), (9, "plain"))):
        engine.target.cache.rollback(0)
        plans = Plans((name, length))
        check_same(engine, plans, warp, seed)
        accepted += sum(step.num_accepted_tokens for step in plans.steps)
    is_lookup = REGISTRY[name].family == "lookup"  # little repeats in what such a model writes
    assert accepted > 0 or is_lookup, "nothing was ever accepted"


@pytest.mark.slow
@warps
def test_a_random_drafter_with_random_rules_every_round_changes_nothing(warp: str) -> None:
    engine = stage().engine
    for seed in range(2):
        plans = RandomPlans((*NAMES, OFF), seed)
        check_same(engine, plans, warp, seed)
        assert sum(step.num_accepted_tokens for step in plans.steps) > 0


@pytest.mark.slow
def test_other_seeds_give_other_replies() -> None:
    assert len({plain_reply("plain", seed) for seed in range(8)}) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_reply_that_is_continued_later_is_the_one_written_in_one_go(name: str) -> None:
    engine, whole = stage((name,)).engine, plain_reply("plain", 3)
    sampling = replace(WARPS["plain"], seed=3)
    for cut in (1, 7, 12):
        text = whole[: len(PROMPT) + cut]
        rest = play(engine, text, Plans((name, 4)), len(whole) - len(text), sampling)
        assert tuple(rest.tokens) == whole


@pytest.mark.slow
def test_a_drafts_acceptance_gains_from_the_noise_it_shares() -> None:
    """The draft model is accepted as often at temperature 1 as when greedy, within a fifth; with
    noise of its own it would be by chance only."""

    def accepted(warp: str, num_seeds: int) -> float:
        engine, plans = stage(("draft_model",)).engine, Plans(("draft_model", 1))
        for seed in range(num_seeds):
            play(engine, PROMPT, plans, 24, replace(WARPS[warp], seed=seed))
        drafted = sum(step.num_draft_tokens for step in plans.steps)
        return sum(step.num_accepted_tokens for step in plans.steps) / drafted

    assert accepted("plain", 20) > 0.8 * accepted("greedy", 1)


# -- every outcome --------------------------------------------------------------------------------


class Forcing:
    """Noise that makes these tokens the choice from `start` on, where the cuts leave them."""

    def __init__(self, start: int, tokens: Context) -> None:
        self._start = start
        self._tokens = tokens

    def on(self, device: torch.device) -> Forcing:
        return self

    def rows(self, position: int, count: int) -> torch.Tensor:
        made = torch.zeros(count, SMALL_VOCAB)
        for row in range(count):
            place = position + row - self._start
            made[row, self._tokens[place] if place < len(self._tokens) else 0] = 60.0
        return made


def forced(
    engine: Engine, plan: tuple[str, int], sampling: SamplingParams, text: Context
) -> Context:
    """The reply where the noise forces `text`."""
    sequence = turn_of(SMALL_PROMPT, sampling, len(text), SMALL_VOCAB)
    sequence.noise = Forcing(len(SMALL_PROMPT), text)
    return tuple(decoded(engine, sequence, Plans(plan)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_target_chooses_is_the_reply(name: str) -> None:
    """All 27 texts of three tokens with top-k 3. Outside its own three a draft is wrong."""
    engine, sampling = small_stage(name), SamplingParams(1.0, top_k=3)
    logits = small_logits()[0]
    for ranks in product(range(3), repeat=3):
        text = list[int]()
        for rank in ranks:
            best = logits((*SMALL_PROMPT, *text)).topk(3).indices.tolist()
            text.append(best[rank])
        for length in (1, 3):
            assert forced(engine, (name, length), sampling, tuple(text)) == tuple(text)


# -- the distribution over seeds ------------------------------------------------------------------


def row_after(text: Context, sampling: SamplingParams) -> torch.Tensor:
    context = (*SMALL_PROMPT, *text)
    return distributions(small_logits()[0](context)[None], sampling, [context])[0].double()


def table_of(sampling: SamplingParams) -> torch.Tensor:
    """Chance of each of the first three tokens together, [V, V, V]."""
    table = torch.zeros(SMALL_VOCAB, SMALL_VOCAB, SMALL_VOCAB, dtype=torch.float64)
    first = row_after((), sampling)
    for a, b in product(range(SMALL_VOCAB), repeat=2):
        table[a, b] = first[a] * row_after((a,), sampling)[b] * row_after((a, b), sampling)
    return table


def counted(
    engine: Engine, name: str, sampling: SamplingParams, num_turns: int = NUM_TURNS
) -> torch.Tensor:
    """How often each of the first three tokens came together, over seeds 0 to N - 1."""
    counts = torch.zeros(SMALL_VOCAB, SMALL_VOCAB, SMALL_VOCAB)
    for seed in range(num_turns):
        reply = play(engine, SMALL_PROMPT, Plans((name, 2)), 3, replace(sampling, seed=seed))
        a, b, c = reply.tokens[len(SMALL_PROMPT) :]
        counts[a, b, c] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("warp", QUICK_WARPS)
def test_over_seeds_a_reply_is_distributed_as_the_targets_own(warp: str) -> None:
    counts = counted(small_stage("draft_model"), "draft_model", WARPS[warp])
    assert p_value(counts, table_of(WARPS[warp])) > SIGNIFICANCE


# -- planted faults: each check above must be able to fail ----------------------------------------


def with_other_noise(
    logits: torch.Tensor, sequence: decoding.Sequence, texts: list[Context]
) -> torch.Tensor:
    """The target's rows of a draft, judged with the noise of the next place."""
    drafted = [(0, *text) for text in texts] if len(texts) > 1 else texts
    return scores(logits, sequence, drafted)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fault_the_noise_of_another_place_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "scores", with_other_noise)
    with pytest.raises(AssertionError):
        check_same(stage((name,)).engine, Plans((name, 4)), "plain", 0)


@pytest.mark.slow
def test_fault_one_noise_for_all_places_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, start = small_stage("draft_model"), Engine.start

    def stuck(self: Engine, *arguments: object) -> decoding.Sequence:
        sequence = start(self, *arguments)  # type: ignore[arg-type]
        rows = sequence.noise.rows(0, 1)

        class Stuck:
            def on(self, device: torch.device) -> Stuck:
                return self

            def rows(self, position: int, count: int) -> torch.Tensor:
                return rows.expand(count, -1)

        sequence.noise = Stuck()
        return sequence

    monkeypatch.setattr(Engine, "start", stuck)
    counts = counted(engine, "draft_model", WARPS["plain"], num_turns=200)
    assert p_value(counts, table_of(WARPS["plain"])) < SIGNIFICANCE


def test_fault_penalty_without_the_drafted_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        logits: torch.Tensor, sequence: decoding.Sequence, texts: list[Context]
    ) -> torch.Tensor:
        return scores(logits, sequence, [sequence.tokens[:1] * len(text) for text in texts])

    monkeypatch.setattr(engine_module, "scores", forgetful)
    with pytest.raises(AssertionError):
        for seed in range(6):
            check_same(stage(("draft_model",)).engine, Plans(("draft_model", 4)), "penalty", seed)


def test_remembered_target_equals_the_real_one() -> None:
    """The remembered target gives the very rows of the real one."""
    model, table = with_cache(small_module(), capacity=32), small_target()
    table.cache = KVCache(KVShape(1, 1, 1, 32), torch.float32, CPU)
    assert isinstance(table, TableModel)
    assert torch.allclose(model.forward(SMALL_PROMPT), table.forward(SMALL_PROMPT), atol=1e-5)
    parents = [-1, 0, 0]
    assert torch.allclose(
        model.forward([3, 4, 5], parents), table.forward([3, 4, 5], parents), atol=1e-5
    )
