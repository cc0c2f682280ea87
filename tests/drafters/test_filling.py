"""A lookup goes on where the chain of another drafter ends."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from localspec.core import decoding
from localspec.core.decoding import (
    TARGET,
    DraftPlan,
    Growth,
    Proposal,
    Round,
    SamplingParams,
    chain,
)
from localspec.core.filling import Filling, Guesses, guesses_of
from localspec.drafters.lookup import Lookup
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.registry import drafter_class
from localspec.engine.engine import Engine
from tests.drafters.stages import NAMES, Guesser, check_same, plain_reply, stage
from tests.kit.tiny import Plans, scripted

PASSAGE = (*range(10, 22),)
PROMPT = (1, 2, *PASSAGE, 3)
FRESH = (*range(22, 34),)
VOCAB = 40
# A filler may append up to 15 tokens in all, and its tokens are believed to be right.
FREELY = Filling("ngram", 15, lambda _: 0.9, Growth(lambda _: 1.0, (0.05,) * 15, 0.0))


class Pair(Guesser):
    """A block drafter of two tokens. It names the next tokens of `script`, from place `wrong_at` of
    a block on wrong ones."""

    name, block_length = "pair", 2

    def __init__(self, script: tuple[int, ...], wrong_at: int) -> None:
        self._script, self._wrong_at = script, wrong_at

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place = len(sequence.reply)
        block = self._script[place : place + min(2, plan.num_draft_tokens)]
        tokens = (*block[: self._wrong_at], *(0 for _ in block[self._wrong_at :]))
        return replace(chain(tokens, (0.9,) * len(tokens)), num_steps=1)


def rounds_of(
    script: tuple[int, ...] = PASSAGE,
    filling: Filling | None = FREELY,
    max_tokens: int = len(PASSAGE),
    end_ids: frozenset[int] = frozenset(),
    wrong_at: int = 2,
) -> list[Round]:
    target = scripted(script, len(PROMPT), VOCAB)
    engine = Engine(target, {"pair": Pair(script, wrong_at), "ngram": NgramDrafter()})
    sequence = engine.start(PROMPT, SamplingParams(), max_tokens, end_ids)
    engine.prefill(sequence, threading.Event())
    plans = Plans(("pair", 2), filling=filling)
    rounds = list(engine.decode(sequence, plans, threading.Event()))
    assert tuple(sequence.reply) == script[: len(sequence.reply)], "a draft changed the reply"
    return rounds


CHAINS = sorted(name for name in {*NAMES} - {"ngram"} if not drafter_class(name).shapes_itself)


@pytest.mark.parametrize("name", CHAINS)
def test_filled_chain_of_any_drafter_changes_no_reply(name: str) -> None:
    """The lookup knows the reply but for its last tokens, of which it knows others."""
    engine = stage((name,)).engine
    for warp in ("greedy", "cool"):
        text = plain_reply(warp, 0)
        others = ((token + 1) % 64 for token in text[-4:])
        lookup = Lookup([(*text[:-4], *others)])
        drafters = {**engine.drafters, "ngram": NgramDrafter(lookup)}
        policy = Plans((name, 2), (name, 4), filling=FREELY)
        engine.target.cache.rollback(0)
        check_same(Engine(engine.target, drafters), policy, warp)
        filled = [guesses_of(step)["ngram"] for step in policy.steps if step.num_filled_tokens]
        right = sum(guesses.num_accepted_tokens for guesses in filled)
        assert 0 < right < sum(guesses.num_draft_tokens for guesses in filled)


def test_repeated_passage_is_accepted_beyond_the_block_in_one_round() -> None:
    (first,) = rounds_of()
    assert first.tokens == PASSAGE
    assert first.provenance == ("pair",) * 2 + ("ngram",) * 9 + (TARGET,)
    assert guesses_of(first.step) == {"pair": Guesses(2, 2, 2), "ngram": Guesses(9, 9, 9)}
    assert first.proposal.num_draft_steps == 1, "a copy is no step of the drafter"
    assert len(rounds_of(filling=None)) == 4


def test_tokens_behind_a_wrong_guess_are_not_checked() -> None:
    first = rounds_of(wrong_at=1)[0]
    assert first.tokens == PASSAGE[:2]
    assert first.step.num_filled_tokens == 0, "no passage goes on like the wrong guess"


def test_free_text_is_drafted_no_wider() -> None:
    assert {each.step.num_draft_tokens for each in rounds_of(FRESH)} == {2}


@pytest.mark.parametrize("prices", [(0.05,) * 6, (0.05,) * 5 + (0.95,) * 10])
def test_a_draft_ends_where_a_token_does_not_pay(prices: tuple[float, ...]) -> None:
    filling = replace(FREELY, growth=replace(FREELY.growth, node_prices=prices))
    assert rounds_of(filling=filling)[0].step.num_draft_tokens == 5 + (len(prices) == 6)


def test_unlikely_chain_is_not_continued() -> None:
    """A copied token is worth the chance that the chain before it is right."""
    unlikely = replace(FREELY, own_chance=lambda confidence: 0.2 * confidence)
    assert rounds_of(filling=unlikely)[0].step.num_draft_tokens == 2


def test_no_token_is_appended_beyond_the_reply_or_behind_its_end() -> None:
    assert rounds_of(max_tokens=6)[0].step.num_draft_tokens == 5
    assert rounds_of(end_ids=frozenset({PASSAGE[5]}))[0].step.num_draft_tokens == 6
    assert rounds_of(end_ids=frozenset({PASSAGE[1]}))[0].step.num_draft_tokens == 2
