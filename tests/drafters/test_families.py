"""What every drafter keeps for models with states, windows, shared keys and experts, too.

The reply is that of plain decoding, and what the caches hold afterwards has the bits of a text that
was read afresh, whatever was drafted, rejected, cancelled, edited or written beside it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from dataclasses import replace

import pytest
import torch

from localspec.core.decoding import OFF, Round, SamplingParams
from localspec.engine.batch import Batch, Forwarded
from localspec.engine.engine import Engine
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.model import LanguageModel
from localspec.forward.passes import Rows
from localspec.loading.drafters import build_drafters
from tests.drafters.family_stages import (
    CASES,
    DRAFTED,
    FAMILIES,
    FP16,
    FP32,
    PROMPT,
    Known,
    KnownTree,
    named,
    parts_of,
    plain_reply,
    prompt_of,
    proposed,
    row_after,
    stage,
    target_of,
)
from tests.drafters.stages import RandomPlans
from tests.kit.tiny import CPU, GREEDY, Context, Plans, play
from tests.kit.tracing import TracingPool

LENGTH = 8
COOL = SamplingParams(0.7, seed=3)
PENALISED = SamplingParams(
    1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)
pytestmark = pytest.mark.slow
each_case = pytest.mark.parametrize(("family", "dtype"), CASES, ids=named)
TAKE_TREES = [case for case in CASES if "draft_tree" in FAMILIES[case[0]]]
# A processor has no kernels for fp16: states, keys and values are fp32 there.
HALVES = [("qwen3_5", FP16), ("gpt_oss", FP16)]
each_drafter = pytest.mark.parametrize(("family", "dtype", "name"), DRAFTED, ids=named)


def check_rows(family: str, dtype: torch.dtype, engine: Engine) -> None:
    """What the target says next has the bits of a text read afresh."""
    target = engine.target
    text = (*target.cache.tokens, 7)
    assert torch.equal(target.forward([7])[0], row_after(family, dtype, text))
    target.cache.rollback(len(text) - 1)


def cancelled(engine: Engine, prompt: Context, plans: Plans, sampling: SamplingParams) -> Context:
    """The text of a turn that ends after two rounds."""
    sequence = engine.start(prompt, sampling, LENGTH, frozenset())
    engine.prefill(sequence, threading.Event())
    rounds = engine.decode(sequence, plans, threading.Event())
    next(rounds)
    next(rounds, None)
    rounds.close()
    return tuple(sequence.tokens)


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_the_drafters_of_a_family(family: str) -> None:
    """A refusal has a sentence that says what would do."""
    found = stage(family, FP32)
    assert found.engine.drafters.keys() == FAMILIES[family]
    refused = [each.reason for each in found.statuses if not each.is_available]
    assert all("would do" in reason or "Choose" in reason for reason in refused)


@each_drafter
def test_a_conversation_reads_as_without_drafting(
    family: str, dtype: torch.dtype, name: str
) -> None:
    """A turn, a second one, the first one again from its middle, an edit of the prompt, and back to
    the second; a turn is cancelled in between and goes on."""
    engine, plans = stage(family, dtype).engine, Plans((name, 4), (name, 2))
    whole = prompt_of(family)
    first = plain_reply(family, dtype, whole, LENGTH, GREEDY)
    second = (*first, 4, 8, 1)
    turns = (
        (whole, GREEDY),
        (second, COOL),
        ((*first[:-3], 9), PENALISED),
        ((*whole[:-15], 2, *whole[-14:]), COOL),
        (second, PENALISED),
    )
    for number, (prompt, sampling) in enumerate(turns):
        wanted = plain_reply(family, dtype, prompt, LENGTH, sampling)
        if number % 2:
            text = cancelled(engine, prompt, plans, sampling)
            assert text == wanted[: len(text)]
            left = len(wanted) - len(text)
            found = play(engine, text, plans, left, sampling).tokens if left else [*text]
        else:
            found = play(engine, prompt, plans, LENGTH, sampling).tokens
        assert tuple(found) == wanted
        check_rows(family, dtype, engine)
    assert sum(step.num_draft_tokens for step in plans.steps) > 2


@pytest.mark.parametrize(("family", "dtype"), [*CASES, *HALVES], ids=named)
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "sampled"])
def test_a_rejection_at_any_position_leaves_nothing(
    family: str, dtype: torch.dtype, sampling: SamplingParams
) -> None:
    prompt = prompt_of(family)
    wanted = plain_reply(family, dtype, prompt, 30, sampling)
    known, plans = Known(wanted, 6), Plans(("known", 6))
    engine = Engine(target_of(family, dtype), {"known": known})
    assert tuple(play(engine, prompt, plans, 30, sampling).tokens) == wanted
    assert {step.num_accepted_tokens for step in plans.steps} >= {*range(7)}
    check_rows(family, dtype, engine)


@pytest.mark.parametrize(("family", "dtype"), HALVES, ids=named)
def test_a_processor_holds_in_fp32_what_a_model_in_fp16_computes(
    family: str, dtype: torch.dtype
) -> None:
    cache = target_of(family, dtype).cache
    held = [tensor for pair in cache.slots for tensor in pair]
    if cache.states is not None:
        held += [value for value in vars(cache.states).values() if torch.is_tensor(value)]
    assert {tensor.dtype for tensor in held} == {FP32}


@pytest.mark.parametrize(("family", "dtype"), TAKE_TREES, ids=named)
def test_a_branch_that_is_accepted_reads_as_the_chain_that_it_is(
    family: str, dtype: torch.dtype
) -> None:
    prompt = prompt_of(family)
    wanted = plain_reply(family, dtype, prompt, 30, PENALISED)
    known, plans = KnownTree(wanted, 4), Plans(("known", 8))
    engine = Engine(target_of(family, dtype), {"known": known})
    assert tuple(play(engine, prompt, plans, 30, PENALISED).tokens) == wanted
    assert {step.num_accepted_tokens for step in plans.steps} >= {*range(5)}
    check_rows(family, dtype, engine)


@each_case
def test_the_end_of_a_text_inside_a_draft_ends_the_turn_there(
    family: str, dtype: torch.dtype
) -> None:
    prompt = prompt_of(family)
    wanted = plain_reply(family, dtype, prompt, 30, PENALISED)
    engine = Engine(target_of(family, dtype), {"known": Known(wanted, 9, num_right=9)})
    for place in (len(prompt) + 4, len(prompt) + 14):
        end = frozenset({wanted[place]})
        first = next(at for at in range(len(prompt), place + 1) if wanted[at] in end)
        found = play(engine, prompt, Plans(("known", 9)), 30, PENALISED, end)
        assert tuple(found.tokens) == wanted[: first + 1] and found.finish_reason == "eos"
        check_rows(family, dtype, engine)


@each_case
def test_any_drafters_in_turn_change_nothing(family: str, dtype: torch.dtype) -> None:
    prompt = prompt_of(family)
    engine = stage(family, dtype).engine
    plans = RandomPlans((*sorted(engine.drafters), OFF), 2)
    for sampling in (COOL, PENALISED):
        wanted = plain_reply(family, dtype, prompt, 20, sampling)
        assert tuple(play(engine, prompt, plans, 20, sampling).tokens) == wanted
        check_rows(family, dtype, engine)
    assert sum(step.num_accepted_tokens for step in plans.steps) > 0


def test_captured_steps_and_drafts_of_a_model_with_states_change_nothing() -> None:
    """Any drafters in turn, with states in closed forms, as on a GPU."""
    pool, parts = TracingPool(), parts_of("qwen3_5", FP32)

    def captured(model: LanguageModel | None) -> CapturedDecoder:
        assert isinstance(model, Decoder)
        cache = KVCache(kv_shape_of(model.weights, model.cache.shape.capacity), FP32, CPU)
        return CapturedDecoder(Decoder(model.weights, cache), pool)

    target, draft = captured(parts.target), captured(parts.draft)
    drafters, _ = build_drafters(replace(parts, target=target, draft=draft, pool=pool), print)
    engine = Engine(target, drafters)
    for capturing in engine.captures:
        for _ in capturing.capture():
            pass
        assert capturing.notice is None
    plans = RandomPlans((*sorted(drafters), OFF), 2)
    for sampling in (GREEDY, COOL):
        wanted = plain_reply("qwen3_5", FP32, PROMPT, 20, sampling)
        assert tuple(play(engine, PROMPT, plans, 20, sampling).tokens) == wanted
    assert sum(step.num_accepted_tokens for step in plans.steps) > 0 and pool.num_replays > 20


@each_case
def test_sequences_that_are_decoded_together_read_as_each_alone(
    family: str, dtype: torch.dtype
) -> None:
    """Three of them, each with any drafters."""
    stages, prompts = (
        [stage(family, dtype) for _ in range(3)],
        (prompt_of(family), PROMPT[::-1], PROMPT[:3]),
    )
    assert len({id(each.target.weights) for each in stages}) == 1
    batch, never = Batch[Round](), threading.Event()

    def steps(number: int) -> Generator[Rows | Round | None, Forwarded, None]:
        engine = stages[number].engine
        plans = RandomPlans((*sorted(engine.drafters), OFF), number)
        sequence = engine.start(prompts[number], COOL, 16, frozenset())
        yield from engine.read(sequence, never, lambda: 32)
        with engine.decoding(sequence):
            while sequence.finish_reason is None:
                yield (yield from engine.round(sequence, plans))

    readers = [batch.run(steps(number)) for number in range(3)]
    texts = [list(prompt) for prompt in prompts]
    order = random.Random(1)
    left = {*range(3)}
    while left:
        number = order.choice(sorted(left))
        found = next(readers[number], None)
        if found is None:
            left.remove(number)
        else:
            texts[number] += found.tokens
    for number, prompt in enumerate(prompts):
        wanted = plain_reply(family, dtype, prompt, 16, COOL)
        assert tuple(texts[number]) == wanted
        check_rows(family, dtype, stages[number].engine)


@pytest.mark.parametrize("name", ["draft_model", "early_exit", "eagle", "medusa", "mtp"])
@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_after_other_texts_a_drafter_guesses_as_afresh(family: str, name: str) -> None:
    """Its own cache, and the hidden states that it reads, follow the text."""
    prompt = prompt_of(family)
    lived, fresh = stage(family, FP32).engine, stage(family, FP32).engine
    text = plain_reply(family, FP32, prompt, LENGTH, GREEDY)
    plans = Plans((name, 5), (name, 3))
    play(lived, prompt, plans, LENGTH + 4)
    play(lived, (*prompt[:-17], 5, *prompt[-16:]), plans, 6, COOL)
    known, wanted = (proposed(engine, name, text, 4) for engine in (lived, fresh))
    assert known.tokens == wanted.tokens
    assert known.confidences == pytest.approx(wanted.confidences, abs=1e-4)
