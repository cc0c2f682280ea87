"""A draft with other tokens: both ways are exact, and each brings tokens where it should."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import DraftPlan, Proposal, SamplingParams
from localspec.core.errors import ModelError
from localspec.drafters import cross_tokenizer as module_under_test
from localspec.drafters.cross_tokenizer import (
    RE_ENCODED,
    TRANSLATED,
    CrossTokenizerDrafter,
)
from localspec.drafters.parts import Parts
from localspec.drafters.vocabularies import Foreign, Vocabulary
from localspec.engine.engine import Engine
from tests.drafters.stages import PROMPT, WARPS, assert_chosen, check_same, stage
from tests.kit.foreign_tiny import WordVocabulary, foreign_to, word
from tests.kit.tiny import (
    Context,
    Plans,
    TableModel,
    play,
    scripted,
    tiny_llama,
    turn_of,
    with_cache,
)
from tests.kit.tokenizers_at_hand import (
    COARSE,
    FINE,
    REAL_PAIRS,
    TEXTS,
    byte_fallback,
    decoded,
    real,
    trained,
)

NAME = "cross_tokenizer"
SURE = 50.0  # a logit that leaves nothing to the others


def knowing(vocabulary: Vocabulary, text: str, peak: float = SURE) -> TableModel:
    """A draft that has read `text` and goes on with it, whatever tokens it is given in."""
    table, size = vocabulary.token_bytes, len(vocabulary.token_bytes)
    raw = text.encode()

    def logits(context: Context) -> torch.Tensor:
        said = b"".join(table[token] or b"" for token in context)
        row = torch.zeros(size)
        if raw.startswith(said) and len(said) < len(raw):
            row[_next(raw[len(said) :])] = peak
        return row

    def _next(rest: bytes) -> int:
        try:
            return vocabulary.encode(rest.decode())[0]
        except UnicodeDecodeError:  # inside a character
            return max((i for i, b in enumerate(table) if b and rest.startswith(b)), key=_size)

    def _size(token: int) -> int:
        return len(table[token] or b"")

    return TableModel(logits, size, capacity=2048)


def reader(
    own: Vocabulary, targets: Vocabulary, text: str, prompt_length: int
) -> tuple[Engine, CrossTokenizerDrafter]:
    """A target that writes `text` after its first tokens, and a draft that knows it."""
    ids, size = targets.encode(text), len(targets.token_bytes)
    target = scripted(ids[prompt_length:], prompt_length, size)
    drafter = CrossTokenizerDrafter(Foreign(knowing(own, text), own, targets), size)
    return Engine(target, {NAME: drafter}), drafter


def check_read(own: Vocabulary, targets: Vocabulary, text: str) -> float:
    """Plays `text` greedily; returns accepted tokens per drafted one."""
    ids, start = targets.encode(text), 3
    engine, _ = reader(own, targets, text, start)
    policy = Plans((NAME, 4), (NAME, 1), (NAME, 7))
    sequence = play(engine, tuple(ids[:start]), policy, len(ids) - start)
    assert sequence.tokens == ids
    drafted = sum(step.num_draft_tokens for step in policy.steps)
    return sum(step.num_accepted_tokens for step in policy.steps) / drafted


# -- greedy: a draft that knows the text -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "targets"),
    [
        (trained(FINE), trained(COARSE)),
        (trained(COARSE), trained(FINE)),
        (byte_fallback(), trained(COARSE)),
        (trained(COARSE), byte_fallback()),
    ],
)
def test_a_draft_that_knows_the_text_is_accepted(own: Vocabulary, targets: Vocabulary) -> None:
    """Not all of it: a draft of finer tokens ends now and then in the middle of a word."""
    rates = [check_read(own, targets, text) for text in TEXTS]
    assert sum(rates) / len(rates) > (0.98 if own is trained(COARSE) else 0.75)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "targets"), REAL_PAIRS)
def test_a_draft_of_a_real_family_that_knows_the_text_is_accepted(
    own: str, targets: str, shared_data: Path
) -> None:
    folder = shared_data / "tokenizers"
    rates = [check_read(real(folder / own), real(folder / targets), text) for text in TEXTS[::6]]
    assert sum(rates) / len(rates) > 0.9, rates


def test_a_confident_draft_of_fewer_steps_than_tokens_is_counted() -> None:
    """The draft says in one step what the target needs several tokens for."""
    own, targets = trained(COARSE), trained(280)
    _, drafter = reader(own, targets, TEXTS[0], 0)
    sequence = _sequence(targets.encode(TEXTS[0][:10]))
    proposal = drafter.propose(sequence, DraftPlan(NAME, 8))
    assert len(proposal.tokens) == 8 and proposal.num_draft_steps < 8
    assert proposal.confidences == pytest.approx([1.0] * 8)


def _sequence(
    tokens: list[int], sampling: SamplingParams = decoding.SamplingParams(), vocab_size: int = 1
) -> decoding.Sequence:
    return turn_of(tuple(tokens), sampling, 100, vocab_size)


def test_the_end_of_a_turn_is_drafted_where_both_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own, targets = trained(FINE), trained(COARSE)
    text, end = TEXTS[0], "<|im_end|>"
    knows = knowing(own, text)

    def logits(context: Context) -> torch.Tensor:
        row = knows._logits(context)
        if not bool(row.any()):  # the text is at its end
            row[own.specials[end]] = SURE
        return row

    foreign = Foreign(TableModel(logits, FINE, capacity=512), own, targets)
    drafter = CrossTokenizerDrafter(foreign, COARSE)
    for temperature, peak in ((0.0, 0.5), (1.0, 0.0)):
        monkeypatch.setattr(module_under_test, "FIRST_PEAK", peak)
        tokens = targets.encode(text)
        sequence = _sequence(tokens[:-1], SamplingParams(temperature))
        proposal = drafter.propose(sequence, DraftPlan(NAME, 9))
        assert proposal.tokens[-1] == targets.specials[end]
        if temperature == 0.0:
            assert proposal.tokens[:-1] == tuple(tokens[-1:])


def test_a_token_that_only_the_draft_knows_ends_the_draft() -> None:
    own = WordVocabulary({word(0): 0, word(1): 1}, {"<mine>": 2})
    targets = WordVocabulary({word(0): 0, word(1): 1})
    row = torch.tensor([0.0, 1.0, SURE])
    model = TableModel(lambda context: row if len(context) > 2 else row.roll(1), 3)
    drafter = CrossTokenizerDrafter(Foreign(model, own, targets), 2)
    assert drafter.propose(_sequence([1]), DraftPlan(NAME, 5)).tokens == (0, 0)


# -- nothing to propose ---------------------------------------------------------------------------


def test_empty_text_gives_nothing() -> None:
    """A conversation of nothing but markup that the draft lacks."""
    own, targets = byte_fallback(), trained(COARSE)
    drafter = CrossTokenizerDrafter(Foreign(knowing(own, "a"), own, targets), COARSE)
    sequence = _sequence([targets.specials["<|im_start|>"]])
    assert drafter.propose(sequence, DraftPlan(NAME, 4)) == Proposal()
    assert drafter.signal(sequence) is None


def test_a_full_context_gives_nothing_and_a_nearly_full_one_a_shorter_draft() -> None:
    own, targets = trained(FINE), trained(COARSE)
    knows = knowing(own, TEXTS[0])
    ids = targets.encode(TEXTS[0])[:12]
    held = len(own.encode(decoded(targets, ids)))
    for room, most in ((0, 0), (1, 1), (3, 3)):
        small = TableModel(knows._logits, FINE, capacity=held + room)
        drafter = CrossTokenizerDrafter(Foreign(small, own, targets), COARSE)
        sequence = _sequence(ids)
        proposal = drafter.propose(sequence, DraftPlan(NAME, 6))
        assert len(proposal.tokens) <= most
        assert (drafter.signal(sequence) is None) == (room == 0)
        assert small.cache.length <= held + room


def test_a_damaged_draft_costs_time_only() -> None:
    for temperature in (0.0, 1.0):
        module = tiny_llama()
        foreign = foreign_to(module)
        foreign.model.weights.embedding.fill_(float("nan"))  # type: ignore[attr-defined]
        target = with_cache(module)
        drafter = CrossTokenizerDrafter(foreign, target.vocab_size)
        policy = Plans((NAME, 4))
        sampling = SamplingParams(temperature, seed=1)
        sequence = play(Engine(target, {NAME: drafter}), (5, 9, 12), policy, 12, sampling)
        assert len(sequence.tokens) == 15
        assert all(step.num_draft_tokens == 0 for step in policy.steps)
        assert drafter._peak == drafter._peak, "what is learnt must stay a number"


def test_without_a_foreign_draft_the_reason_is_given() -> None:
    target = with_cache(tiny_llama())
    with pytest.raises(ModelError, match="no draft with another vocabulary was chosen"):
        CrossTokenizerDrafter.build(Parts(target))


# -- which way ---------------------------------------------------------------------------------


def test_greedy_rounds_are_re_encoded_and_sampled_ones_translated_where_tokens_agree() -> None:
    drafter = CrossTokenizerDrafter(foreign_to(tiny_llama()), 64)
    prompt = [7, 8, 9, 7, 8, 9]
    assert drafter.signal(_sequence(prompt)) == RE_ENCODED
    sampled = _sequence(prompt, SamplingParams(1.0))
    drafter.propose(sampled, DraftPlan(NAME, 1))
    assert drafter.signal(sampled) == TRANSLATED
    drafter._peak = 0.99  # a draft so sure that its favourite is nearly always right
    assert drafter.signal(sampled) == RE_ENCODED


@pytest.mark.slow
def test_a_seed_gives_the_same_reply_in_a_later_turn() -> None:
    """What a turn has taught about the draft must not choose the way of the next."""
    module = tiny_llama()
    target = with_cache(module)
    engine = Engine(target, {NAME: CrossTokenizerDrafter(foreign_to(module), 64)})
    texts = []
    for seed in (1, 2, 1):
        sampling = SamplingParams(1.0, seed=seed)
        texts.append(play(engine, (5, 9, 12, 5, 9), Plans((NAME, 4)), 30, sampling).tokens)
    assert texts[0] == texts[2] != texts[1]


def test_tokens_that_seldom_agree_are_re_encoded() -> None:
    own, targets = trained(280), trained(COARSE)
    drafter = CrossTokenizerDrafter(Foreign(knowing(own, TEXTS[0]), own, targets), COARSE)
    sequence = _sequence(targets.encode(TEXTS[0]), SamplingParams(1.0))
    drafter.propose(sequence, DraftPlan(NAME, 1))
    assert drafter.signal(sequence) == RE_ENCODED


def test_a_turn_that_was_not_read_is_signalled_as_the_one_before() -> None:
    """Reading a prompt takes time, and is for those who draft."""
    drafter = CrossTokenizerDrafter(foreign_to(tiny_llama()), 64)
    sampled, other = (_sequence(ids, SamplingParams(1.0)) for ids in ([7, 8, 9], [8, 9, 7]))
    drafter.propose(sampled, DraftPlan(NAME, 1))
    assert drafter.signal(sampled) == drafter.signal(other) == TRANSLATED
    assert drafter.signal(_sequence([8, 9, 7])) == RE_ENCODED  # greedy never translates
    assert not drafter._text.is_reading(other.tokens)


def test_half_a_character_is_finished_by_re_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    own, targets = trained(FINE), trained(COARSE)
    text = "The quick brown 🦖 fox"
    drafter = CrossTokenizerDrafter(Foreign(knowing(own, text), own, targets), COARSE)
    monkeypatch.setattr(module_under_test, "FIRST_PEAK", 0.0)
    tokens = targets.encode(text)
    place = next(i for i in range(len(tokens)) if decoded(targets, tokens[:i]).endswith("\ufffd"))
    for temperature in (0.0, 1.0):
        sequence = _sequence(tokens[:place], SamplingParams(temperature))
        drafter.propose(sequence, DraftPlan(NAME, 1))
        assert drafter.signal(sequence) == RE_ENCODED
        proposal = drafter.propose(sequence, DraftPlan(NAME, 2))
        assert proposal.tokens == tuple(tokens[place : place + 2])


# -- exactness ---------------------------------------------------------------------------------


def by_way(monkeypatch: pytest.MonkeyPatch, is_translated: bool) -> tuple[Engine, Any]:
    """The contract's stage, going one way, and its drafter."""
    monkeypatch.setattr(CrossTokenizerDrafter, "_translates", lambda self, sampling: is_translated)
    found = stage((NAME,))
    return found.engine, found.drafters[NAME]


@pytest.mark.slow
@pytest.mark.parametrize("is_translated", [True, False])
@pytest.mark.parametrize("warp", ["greedy", "plain", "all"])
def test_either_way_the_reply_is_that_of_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, is_translated: bool, warp: str
) -> None:
    engine, _ = by_way(monkeypatch, is_translated)
    plans = Plans((NAME, 4))
    check_same(engine, plans, warp, seed=2)
    assert any(step.num_draft_tokens for step in plans.steps)


@pytest.mark.parametrize("warp", ["plain", "all"])
def test_a_translated_token_is_chosen_among_the_shared_ones_with_the_turns_noise(
    monkeypatch: pytest.MonkeyPatch, warp: str
) -> None:
    engine, drafter = by_way(monkeypatch, True)
    sequence = engine.start(PROMPT, replace(WARPS[warp], seed=5), 20, frozenset())
    proposal = drafter.propose(sequence, DraftPlan(NAME, 1))
    drafter.model.cache.rollback(0)
    logits = drafter._shared.translated(drafter.model.forward(drafter._text.ids)[-1])
    assert_chosen(proposal, sequence, lambda text: logits)
    assert float(logits.min()) == float("-inf"), "the draft lacks some of the target's tokens"


def test_a_row_that_is_mostly_not_shared_ends_the_draft_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = WordVocabulary({word(0): 0, word(1): 1, word(0) * 2: 2})
    targets = WordVocabulary({word(0): 0, word(1): 1})
    shared, alone = torch.tensor([2.0, 2.0, -4.0]), torch.tensor([0.0, 0.0, 4.0])
    model = TableModel(lambda context: alone if len(context) == 6 else shared, 3)
    drafter = CrossTokenizerDrafter(Foreign(model, own, targets), 2)
    monkeypatch.setattr(drafter, "_translates", lambda sampling: True)
    sampling = SamplingParams(1.0)
    sequence = _sequence([0, 1, 0, 1], sampling, 2)
    proposal = drafter.propose(sequence, DraftPlan(NAME, 5))
    assert len(proposal.tokens) == 2 and proposal.num_draft_steps == 3
    # Where the first row is such a row, the round is re-encoded instead.
    proposal = drafter.propose(_sequence([0, 1, 0, 1, 0, 1], sampling, 2), DraftPlan(NAME, 2))
    assert proposal.tokens == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_random_models_of_two_real_families(temperature: float, shared_data: Path) -> None:
    """Noise for text: half characters, invalid bytes, markup. Greedy text is the target's own."""
    folder = shared_data / "tokenizers"
    for own_name, targets_name in (("gpt2", "llama2"), ("llama2", "smollm")):
        own, targets = real(folder / own_name), real(folder / targets_name)
        target = with_cache(tiny_llama(2, vocab_size=len(targets.token_bytes)))
        model = with_cache(tiny_llama(3, vocab_size=len(own.token_bytes)))
        engine = Engine(
            target, {NAME: CrossTokenizerDrafter(Foreign(model, own, targets), target.vocab_size)}
        )
        sampling = SamplingParams(temperature, seed=4)
        prompt, texts = tuple(targets.encode("Once upon")), []
        for plan in ((NAME, 5), ("off", 0)):
            texts.append(play(engine, prompt, Plans(plan), 16, sampling).tokens)
        assert len(texts[0]) == len(prompt) + 16
        assert texts[0] == texts[1]


# -- cost --------------------------------------------------------------------------------------


def test_the_drafts_cache_is_kept_from_round_to_round() -> None:
    """After the prompt no round runs more tokens than it drafted and the text that came."""
    own, targets = trained(FINE), trained(COARSE)
    text = " ".join(TEXTS[:2])
    engine, drafter = reader(own, targets, text, 30)
    model = drafter.model
    ran, forward = list[int](), model.forward

    def counted(tokens: list[int], *rest: object, **named: object) -> torch.Tensor:
        ran.append(len(tokens))
        return forward(tokens, *rest, **named)  # type: ignore[arg-type]

    model.forward = counted  # type: ignore[method-assign]
    ids = targets.encode(text)
    sequence = engine.start(tuple(ids[:30]), decoding.SamplingParams(), len(ids) - 30, frozenset())
    engine.prefill(sequence, threading.Event())
    drafter.propose(sequence, DraftPlan(NAME, 1))
    assert sum(ran) >= len(own.encode(decoded(targets, ids[:30])))
    ran.clear()
    for _ in engine.decode(sequence, Plans((NAME, 3)), threading.Event()):
        assert max(ran) <= 12, "text was run again"
    assert sequence.tokens == ids


def test_the_stop_rule_ends_re_encoded_drafts_too() -> None:
    own, targets = trained(COARSE), trained(FINE)
    _, drafter = reader(own, targets, TEXTS[0], 0)
    asked: list[int] = []

    def twice(index: int, confidence: float) -> bool:
        asked.append(index)
        return index < 1

    tokens = targets.encode(TEXTS[0])
    plan = DraftPlan(NAME, 6, keep_drafting=twice)
    proposal = drafter.propose(_sequence(tokens[:4]), plan)
    assert asked == [0, 1] and proposal.tokens == tuple(tokens[4:6])


def test_no_more_steps_are_run_than_tokens_can_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that never ends a word."""
    own, targets = trained(280), trained(COARSE)
    drafter = CrossTokenizerDrafter(Foreign(knowing(own, "x" * 99), own, targets), COARSE)
    monkeypatch.setattr(module_under_test, "STEPS_A_TOKEN", 2)
    proposal = drafter.propose(_sequence(targets.encode("x")), DraftPlan(NAME, 3))
    assert proposal.num_draft_steps == 6 and 0 < len(proposal.tokens) <= 3
