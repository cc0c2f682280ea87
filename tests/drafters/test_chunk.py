"""Drafting in chunks gives what drafting token by token gives, and ends where its rule ends it.

The chunks run over the stand-in for graphs of tests.kit.tracing, which is as strict as a
capture; with a GPU the comparison runs over real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import islice, product
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from localspec.core import decoding
from localspec.core.decoding import DraftPlan, Proposal, SamplingParams, Sequence, Step
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.drafting import Drafting, autoregress
from localspec.drafters.fixed import Cuts, cuts_of
from localspec.drafters.parts import Parts
from localspec.engine.batch import drafted_alone
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import CapturedDecoder, CudaGraphPool
from localspec.forward.heads.fixed import DRAFT_SIZES
from localspec.loading.capture import capturable
from tests.kit.hybrids import TEXT
from tests.kit.hybrids import module as hybrid
from tests.kit.tiny import (
    VOCAB_SIZE,
    Plans,
    agreeing_draft,
    play,
    tiny_llama,
    turn_of,
    with_plain_cache,
)
from tests.kit.tracing import NO_GPU, FailingPool, StalePool, TracingPool, on_gpu

PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9)
CAPACITY = 64  # one stretch
LARGE = 300  # two stretches: 256, 300
SAMPLINGS = {
    "greedy": SamplingParams(),
    "plain": SamplingParams(1.0, seed=5),
    "cold": SamplingParams(0.004, seed=5),
    "all": SamplingParams(0.8, top_k=9, top_p=0.95, min_p=0.02, seed=5),
    "penalty": SamplingParams(0.8, top_p=0.95, repetition_penalty=1.6, seed=5),
    "greedy with a penalty": SamplingParams(repetition_penalty=1.6),
}
FULL = ["greedy", "plain", "all", "penalty", "greedy with a penalty"]


def chunked(
    sampling: SamplingParams = SamplingParams(),
    pool: Any = None,
    model: Decoder | None = None,
    vocab_size: int = VOCAB_SIZE,
) -> ChunkedDraft:
    """Everything captured for this kind of sampling."""
    made = ChunkedDraft(
        model or with_plain_cache(tiny_llama(), CAPACITY), vocab_size, pool or TracingPool()
    )
    made.want(sampling)
    for _ in made.capture():
        pass
    return made


@lru_cache
def _captured(cuts: Cuts, capacity: int) -> ChunkedDraft:
    return chunked(cuts.example(), model=with_plain_cache(tiny_llama(), capacity))


def shared(name: str, capacity: int = CAPACITY) -> ChunkedDraft:
    """One for all tests that only propose, as for all settings of one kind."""
    return _captured(cuts_of(SAMPLINGS[name]), capacity)


@lru_cache
def eager(capacity: int) -> Decoder:
    return with_plain_cache(tiny_llama(), capacity)


def sequence_of(sampling: SamplingParams, tokens: tuple[int, ...] = PROMPT) -> Sequence:
    return turn_of(tokens, sampling, 400)


def caught_up(model: Decoder, sequence: Sequence, num_pending: int) -> None:
    """The cache holds all but the last `num_pending` tokens."""
    model.cache.rollback(0)
    if held := sequence.tokens[: len(sequence.tokens) - num_pending]:
        model.forward(held, num_logits=1)


def proposed(
    chunks: ChunkedDraft, sequence: Sequence, plan: DraftPlan, share: float = 1.0
) -> Proposal | None:
    """None where the chunks do not serve the draft."""
    draft = Drafting(sequence, plan, VOCAB_SIZE, share)
    if not chunks.serves(draft):
        return None
    chunks.draft_on(draft)
    return draft.proposal()


def token_by_token(
    model: Decoder, sequence: Sequence, plan: DraftPlan, share: float = 1.0
) -> Proposal:
    return drafted_alone(autoregress(model, Drafting(sequence, plan, VOCAB_SIZE, share)))


def assert_same(found: Proposal | None, wanted: Proposal) -> None:
    assert found is not None, "no graph served"
    assert found.tokens == wanted.tokens and found.parents == wanted.parents
    assert found.confidences == pytest.approx(wanted.confidences, abs=1e-5)


def check_equal(
    draft: ChunkedDraft,
    sampling: SamplingParams,
    plan: DraftPlan,
    num_pending: int = 1,
    tokens: tuple[int, ...] = PROMPT,
    share: float = 1.0,
) -> None:
    reference = eager(draft.model.cache.shape.capacity)
    sequences = [sequence_of(sampling, tokens) for _ in "ab"]
    caught_up(draft.model, sequences[0], num_pending)
    caught_up(reference, sequences[1], num_pending)
    found = proposed(draft, sequences[0], plan, share)
    wanted = token_by_token(reference, sequences[1], plan, share)
    assert_same(found, wanted)
    assert draft.model.cache.tokens == reference.cache.tokens


# -- proposals --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_chunked_draft_is_the_draft_token_by_token(name: str) -> None:
    sampling = SAMPLINGS[name]
    for length, num_pending in ((1, 1), (3, 2), (8, 9), (15, 1), (15, 2)):
        check_equal(shared(name), sampling, DraftPlan("d", length), num_pending)


@pytest.mark.slow
def test_a_model_with_states_drafts_in_chunks() -> None:
    """Round after round in one text, of which a part is taken back each time; also where as many
    tokens are pending as there is room for beside a draft and its padding."""
    draft, vocab_size = chunked(model=with_plain_cache(hybrid(), 96), vocab_size=48), 48
    reference = with_plain_cache(hybrid(), 96)
    greedy, sampled = SamplingParams(), SamplingParams(1.0, seed=5)
    long = Drafting(sequence_of(greedy, TEXT[:9]), DraftPlan("d", 16), vocab_size)
    assert draft.model.is_capturable and not draft.serves(long)
    for end, length, sampling in (
        (9, 15, greedy), (14, 7, sampled), (40, 1, greedy), (41, 8, sampled), (3, 15, sampled),
        *((end, 3, greedy) for end in range(30, 46)),
    ):  # fmt: skip
        sequences = [turn_of(TEXT[:end], sampling, 400, vocab_size) for _ in "ab"]
        for model in (draft.model, reference):
            model.cache.reuse(TEXT[: end - 1])
        wanted = drafted_alone(
            autoregress(reference, Drafting(sequences[1], DraftPlan("d", length), vocab_size))
        )
        drafting = Drafting(sequences[0], DraftPlan("d", length), vocab_size)
        draft.draft_on(drafting)
        proposal = drafting.proposal()
        assert proposal.tokens == wanted.tokens
        # Sums are grouped as the rows were.
        assert proposal.confidences == pytest.approx(wanted.confidences, abs=1e-4)
        assert draft.model.cache.tokens == reference.cache.tokens


@pytest.mark.slow
def test_settings_may_change_without_another_capture() -> None:
    pool = TracingPool()
    draft = chunked(SAMPLINGS["all"], pool)
    num_captures = pool.num_captures
    for temperature, top_k, top_p in ((0.3, 3, 0.99), (1.5, 60, 0.4), (1.0, 1, 0.7)):
        sampling = SamplingParams(temperature, top_k, top_p, min_p=0.01)
        check_equal(draft, sampling, DraftPlan("d", 5))
    assert pool.num_captures == num_captures


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "plain"])
def test_at_the_edge_of_a_stretch_and_of_the_context(name: str) -> None:
    draft = shared(name, LARGE)
    places = [*product((256, LARGE), (1, 8), (0, 1)), (256, 1, -1), (256, 8, -1)]
    for place, (edge, length, short) in enumerate(places):
        tokens = tuple(1 + (5 * i * i) % 60 for i in range(edge - length - short))
        check_equal(draft, SAMPLINGS[name], DraftPlan("d", length), 1 + place % 2, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "draft_size"), [("greedy", 70), ("all", 60)])
def test_vocabularies_of_different_size(name: str, draft_size: int) -> None:
    module = tiny_llama(vocab_size=draft_size)
    draft = chunked(SAMPLINGS[name], model=with_plain_cache(module, CAPACITY))
    reference = with_plain_cache(module, CAPACITY)
    sequences = [sequence_of(SAMPLINGS[name]) for _ in "ab"]
    for model, sequence in zip((draft.model, reference), sequences, strict=True):
        caught_up(model, sequence, 1)
    plan = DraftPlan("d", 7)
    found = proposed(draft, sequences[0], plan)
    assert_same(found, token_by_token(reference, sequences[1], plan))
    assert found is not None and max(found.tokens) < min(64, draft_size)


# -- the stop rule ----------------------------------------------------------------------------


def stopping(at: int, asked: list[int]) -> Callable[[int, float], bool]:
    def keep_drafting(index: int, confidence: float) -> bool:
        asked.append(index)
        assert 0.0 < confidence <= 1.0 + 1e-6
        return index != at

    return keep_drafting


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "plain", "all"])
def test_a_draft_ends_with_the_first_token_that_fails(name: str) -> None:
    draft = shared(name)
    for at in (0, 1, 3, 5, 7):
        asked: list[int] = []
        plan = DraftPlan("d", 7, keep_drafting=stopping(at, asked))
        check_equal(draft, SAMPLINGS[name], plan)
        # Both sides asked, and neither about anything after the token that failed.
        assert asked == 2 * list(range(min(at + 1, 6)))


@pytest.mark.slow
def test_a_rule_that_reads_confidences_stops_where_it_would_token_by_token() -> None:
    draft = shared("plain")
    ends = set()
    for seed in range(12):
        limit = 0.2 + 0.05 * seed
        plan = DraftPlan("d", 9, keep_drafting=lambda index, c, limit=limit: c > limit)
        check_equal(draft, SAMPLINGS["plain"], plan, tokens=(*PROMPT, seed + 1))
        ends.add(draft.model.cache.length)
    assert len(ends) > 2, "the rule ended drafts at different lengths"


# -- where no graph serves --------------------------------------------------------------------


def test_the_end_of_the_context_is_left_to_the_caller() -> None:
    draft = shared("greedy")
    caught_up(draft.model, sequence_of(SamplingParams()), 1)
    held = list(draft.model.cache.tokens)
    too_long = DraftPlan("d", CAPACITY)
    assert proposed(draft, sequence_of(SamplingParams()), too_long) is None
    assert draft.model.cache.tokens == held


@pytest.mark.slow
def test_a_kind_of_sampling_that_was_asked_for_is_captured_next_time() -> None:
    draft = chunked()
    assert draft.buffer_bytes == max(DRAFT_SIZES) * VOCAB_SIZE * 4
    assert not draft.has_missing
    check_equal(draft, SAMPLINGS["all"], DraftPlan("d", 4))
    assert draft.has_missing
    assert len(list(draft.capture())) == len(DRAFT_SIZES) and not draft.has_missing
    check_equal(draft, SAMPLINGS["all"], DraftPlan("d", 4))


def test_one_graph_serves_greedy_and_sampled_turns_in_any_order() -> None:
    draft = shared("greedy")
    for name in ("greedy", "plain", "greedy", "cold", "plain"):
        check_equal(draft, SAMPLINGS[name], DraftPlan("d", 5))


def test_one_graph_serves_every_share_of_the_noise() -> None:
    for share in (1.0, 0.6, 0.1):
        check_equal(shared("plain"), SAMPLINGS["plain"], DraftPlan("d", 5), share=share)


def test_kinds_of_sampling_differ_by_the_cuts_in_use_only() -> None:
    assert cuts_of(SamplingParams(0.7)) == cuts_of(SamplingParams(top_k=4)) == Cuts()
    assert cuts_of(SamplingParams(0.7, top_k=5)) == cuts_of(SamplingParams(0.2, top_k=90))
    for flags in product((False, True), repeat=4):
        assert cuts_of(Cuts(*flags).example()) == Cuts(*flags)


def test_drafts_before_and_during_capture() -> None:
    pool = TracingPool()
    draft = ChunkedDraft(with_plain_cache(tiny_llama(), CAPACITY), VOCAB_SIZE, pool)
    check_equal(draft, SamplingParams(), DraftPlan("d", 7))
    assert pool.num_replays == 0
    for _ in islice(draft.capture(), 3):  # of one and of two tokens; not of four
        pass
    pool.num_replays = 0
    check_equal(draft, SamplingParams(), DraftPlan("d", 7))
    assert pool.num_replays == 2


@pytest.mark.slow
def test_the_first_reply_of_a_new_chat_finds_its_graphs() -> None:
    """Captured after loading, before anything was asked: with the settings that a chat begins
    with, whatever its temperature."""
    pool = TracingPool()
    draft = ChunkedDraft(with_plain_cache(tiny_llama(), CAPACITY), VOCAB_SIZE, pool)
    assert list(draft.capture())
    for temperature in (0.0, 0.7, 1.0):
        pool.num_replays = 0
        check_equal(draft, SamplingParams(temperature, seed=3), DraftPlan("d", 7))
        assert pool.num_replays == 3  # of four, of two and of one token


def test_capturing_leaves_the_drafts_cache_as_it_is() -> None:
    reference, model = (with_plain_cache(tiny_llama(), CAPACITY) for _ in "ab")
    for each in (reference, model):
        each.forward(PROMPT)
    chunked(model=model)
    assert model.cache.tokens == list(PROMPT)
    assert torch.equal(model.forward([3, 4]), reference.forward([3, 4]))


@pytest.mark.parametrize("pool", [StalePool(), FailingPool()], ids=["stale", "failing"])
def test_a_capture_that_fails_leaves_the_chunks_uncaptured(pool: Any) -> None:
    draft = chunked(pool=pool)
    assert draft.notice is not None and not draft.has_missing
    draft.want(SAMPLINGS["all"])
    assert not draft.has_missing, "it is not tried after every reply"
    check_equal(draft, SamplingParams(), DraftPlan("d", 5))


@pytest.mark.slow
def test_a_mixture_has_no_graphs() -> None:
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = MixtralConfig(**sizes, **heads, num_local_experts=4)
    mixture, pool = with_plain_cache(MixtralForCausalLM(config).eval()), TracingPool()
    assert capturable(mixture, pool) is mixture
    parts = Parts(with_plain_cache(tiny_llama()), mixture, pool=pool)
    assert parts.draft_chunks is None, "its rows choose their experts on the host"
    assert parts.chunks(parts.target) is not None


def test_a_damaged_draft_ends_without_a_token_and_without_harm() -> None:
    draft = chunked(SAMPLINGS["all"])
    caught_up(draft.model, sequence_of(SamplingParams()), 1)
    draft.model.weights.final_norm.weight.fill_(math.nan)
    inside = draft.model.weights.final_norm._inside
    assert inside is not None
    inside.fill_(math.nan)
    for name in ("greedy", "plain", "all"):
        sequence = sequence_of(SAMPLINGS[name])
        found = proposed(draft, sequence, DraftPlan("d", 5))
        assert found is not None and found.tokens == ()
        assert draft.model.cache.tokens == sequence.tokens[:-1]


@pytest.mark.slow
def test_a_draft_recovers_from_what_was_no_number() -> None:
    """Slots left behind by something that overflowed spoil one draft, not all that follow."""
    draft = chunked()
    for name in ("greedy", "plain"):
        sequence = sequence_of(SAMPLINGS[name])
        caught_up(draft.model, sequence, 1)
        for _, values in draft.model.cache.slots:
            values[:, :, 40:] = math.nan
        found = proposed(draft, sequence, DraftPlan("d", 5))
        assert found is not None and found.tokens == ()
        check_equal(draft, SAMPLINGS[name], DraftPlan("d", 5))


# -- in the engine ----------------------------------------------------------------------------


class Counted(ChunkedDraft):
    """num_served: how often a graph served."""

    num_served = 0

    def draft_on(self, draft: Drafting) -> None:
        super().draft_on(draft)
        self.num_served += 1


def text_of(sampling: SamplingParams, is_chunked: bool) -> tuple[list[int], list[Step], int]:
    """A turn of 40 tokens across the first edge, target and draft over graphs or neither."""
    target_module = tiny_llama()
    target = with_plain_cache(target_module, LARGE)
    model = with_plain_cache(agreeing_draft(target_module), LARGE)
    draft = None
    if is_chunked:
        pool = TracingPool()
        target, model = CapturedDecoder(target, pool), CapturedDecoder(model, pool)
        draft = Counted(model, VOCAB_SIZE, pool)
        draft.want(sampling)
        for work in (target, draft):
            for _ in work.capture():
                pass
    prompt = tuple(1 + (7 * i * i) % 61 for i in range(240))
    policy = Plans(("draft_model", 4), ("draft_model", 1), ("draft_model", 7), ("off", 0))
    engine = Engine(target, {"draft_model": DraftModelDrafter(model, VOCAB_SIZE, draft)})
    tokens = play(engine, prompt, policy, 40, sampling).tokens
    return tokens, policy.steps, 0 if draft is None else draft.num_served


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "all"])
def test_turns_are_the_same_with_and_without_graphs(name: str) -> None:
    sampling = decoding.replace(SAMPLINGS[name], seed=23)
    plain, steps, _ = text_of(sampling, is_chunked=False)
    found, chunked_steps, num_served = text_of(sampling, is_chunked=True)
    assert found == plain
    assert num_served >= len([s for s in chunked_steps if s.num_draft_tokens])
    counts = [[(s.num_draft_tokens, s.num_accepted_tokens) for s in each]
              for each in (steps, chunked_steps)]  # fmt: skip
    assert counts[0] == counts[1]
    assert sum(accepted for _, accepted in counts[0]) > 10


def test_drafts_thrown_away_leave_no_trace() -> None:
    draft, reference_model = shared("greedy"), eager(CAPACITY)
    reference_model.cache.rollback(0)
    reference = token_by_token(reference_model, sequence_of(SamplingParams()), DraftPlan("d", 6))
    for _ in range(3):
        caught_up(draft.model, sequence_of(SamplingParams()), 1)
        proposed(draft, sequence_of(SamplingParams()), DraftPlan("d", 8))
    draft.model.cache.rollback(len(PROMPT) - 1)
    assert_same(proposed(draft, sequence_of(SamplingParams()), DraftPlan("d", 6)), reference)


# -- with a GPU -------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("name", FULL)
def test_real_chunks_are_the_draft_token_by_token(name: str) -> None:
    sampling = SAMPLINGS[name]
    model, reference = (on_gpu(torch.float32, CAPACITY) for _ in "ab")
    pool = CudaGraphPool(model.device, 2**30)
    draft = chunked(sampling, pool, model)
    assert draft.notice is None and pool.pool_bytes >= 0
    for length, num_pending in product((1, 2, 5, 8, 15), (1, 2, 9)):
        sequences = [sequence_of(sampling) for _ in "ab"]
        caught_up(model, sequences[0], num_pending)
        caught_up(reference, sequences[1], num_pending)
        plan = DraftPlan("d", length)
        found = proposed(draft, sequences[0], plan)
        wanted = token_by_token(reference, sequences[1], plan)
        assert found is not None and found.tokens == wanted.tokens
        assert found.confidences == pytest.approx(wanted.confidences, abs=1e-3)
