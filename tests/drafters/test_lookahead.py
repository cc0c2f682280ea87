"""Lookahead decoding: the shape of the window, how it moves, and what it is good for."""

from __future__ import annotations

import threading

import pytest
import torch

from localspec.core import decoding
from localspec.core.decoding import OFF, DraftPlan, Growth, Proposal, SamplingParams
from localspec.drafters import lookahead as lookahead_module
from localspec.drafters.lookahead import LEVELS, MAX_FOLLOWERS, WIDTH, LookaheadDrafter, Pool
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.engine import Engine
from tests.kit.tiny import Context, Plans, TableModel, play, turn_of

VOCAB = 60
STEP = 7  # after token t the target says t + STEP: a text of 60 tokens in which nothing repeats
PROMPT = (3, 10)
FULL = 15


def said_after(token: int) -> int:
    return (token + STEP) % VOCAB


def marching(temperature: float = 0.0) -> TableModel:
    """A target whose next token depends on the last one only."""

    def logits(context: Context) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[said_after(context[-1])] = 50.0
        return row

    return TableModel(logits, VOCAB)


def engine_with(drafter: LookaheadDrafter) -> Engine:
    return Engine(marching(), {"lookahead": drafter, "ngram": NgramDrafter()})


def begun(engine: Engine, prompt: Context = PROMPT, max_tokens: int = 40) -> decoding.Sequence:
    sequence = engine.start(prompt, SamplingParams(), max_tokens, frozenset())
    engine.prefill(sequence, threading.Event())
    return sequence


def sequence_of(*tokens: int) -> decoding.Sequence:
    return turn_of(tokens, max_tokens=1000)


def proposed(
    drafter: LookaheadDrafter,
    sequence: decoding.Sequence,
    size: int = FULL,
    growth: Growth | None = None,
) -> Proposal:
    return drafter.propose(sequence, DraftPlan("lookahead", size, growth=growth))


def window_of(drafter: LookaheadDrafter) -> tuple[Context, ...]:
    assert drafter._sent is not None
    return drafter._sent.columns


def run(engine: Engine, sequence: decoding.Sequence, *plans: tuple[str, int]) -> None:
    """A round for each plan."""
    for plan in plans:
        rounds = engine.decode(sequence, Plans(plan), threading.Event())
        next(rounds)
        rounds.close()


# -- the shape --------------------------------------------------------------------------------


def test_level_zero_is_a_chain_and_each_column_hangs_from_its_own_node() -> None:
    drafter = LookaheadDrafter()
    proposal = proposed(drafter, sequence_of(*range(20, 58)))
    columns = window_of(drafter)
    assert len(columns) == WIDTH and {len(column) for column in columns} == {LEVELS}
    nodes = dict(enumerate(zip(proposal.parents, proposal.tokens, strict=True)))
    stem = -1
    for column in columns:
        stem = next(n for n, (p, t) in nodes.items() if p == stem and t == column[0])
        parent = stem
        for token in column[1:]:
            parent = next(n for n, (p, t) in nodes.items() if p == parent and t == token)
        assert drafter._sent is not None
        assert parent == drafter._sent.leaves[columns.index(column)]


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, FULL + 1))
def test_a_tree_keeps_to_its_size_and_names_no_sibling_twice(size: int) -> None:
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    sequence = begun(engine, (1, 2, 1, 2, 1, 3, 1, 2), 200)
    for _ in range(30):
        proposal = proposed(drafter, sequence, size)
        assert len(proposal.tokens) <= size
        nodes = list(zip(proposal.parents, proposal.tokens, strict=True))
        assert len(set(nodes)) == len(nodes)
        run(engine, sequence, ("lookahead", size))


def test_small_plans_keep_the_branches_and_give_up_the_window() -> None:
    text = sequence_of(1, 2, 3, 4, 1, 2)
    for size, width in ((1, 0), (2, 0), (3, 1), (7, 2), (12, 4), (15, WIDTH)):
        drafter = LookaheadDrafter()
        assert proposed(drafter, text, size).tokens[0] == 3
        assert len(window_of(drafter)) == width


def test_branches_go_by_the_latest_and_longest_context() -> None:
    drafter = LookaheadDrafter()
    proposal = proposed(drafter, sequence_of(1, 2, 30, 31, 5, 2, 40, 41, 1, 2))
    at_root = [t for t, p in zip(proposal.tokens, proposal.parents, strict=True) if p < 0]
    assert at_root[:2] == [30, 40], "30 followed 1 and 2, 40 only the 2"
    assert proposal.tokens[proposal.parents.index(proposal.tokens.index(30))] == 31


def test_prices_size_the_branches() -> None:
    text = sequence_of(1, 2, 30, 31, 5, 2, 40, 41, 1, 2)
    cheap = Growth(lambda chance: chance, (0.001,) * FULL, 0.0)
    dear = Growth(lambda chance: chance, (0.999,) * FULL, 0.0)
    assert 30 in proposed(LookaheadDrafter(), text, 2, cheap).tokens
    assert proposed(LookaheadDrafter(), text, 2, dear) == Proposal(confidences=(), num_steps=1)


def test_confidences_fall_with_what_they_rest_on() -> None:
    proposal = proposed(LookaheadDrafter(), sequence_of(1, 2, 30, 31, 5, 2, 40, 41, 1, 2))
    assert proposal.confidences is not None
    nodes = zip(proposal.parents, proposal.tokens, proposal.confidences, strict=True)
    said = {token: chance for parent, token, chance in nodes if parent < 0}
    assert 0.0 < said[40] < said[30] < 1.0
    assert proposal.num_draft_steps == 1


# -- how it moves -----------------------------------------------------------------------------


def test_the_window_moves_on_by_what_the_target_says() -> None:
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    sequence = begun(engine)
    run(engine, sequence, ("lookahead", FULL))
    moved = drafter._window
    assert len(moved) == WIDTH
    assert all(later == said_after(earlier) for earlier, later in moved)
    place = len(sequence.tokens) - drafter._window_at
    proposed(drafter, sequence)
    assert window_of(drafter)[: WIDTH - place] == moved[place:]


def test_a_column_keeps_the_place_in_the_text_it_guesses() -> None:
    """All but the first column are right: one token later they still are, each for its place."""
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    sequence = begun(engine)
    root = sequence.tokens[-1]
    ahead = [(root + STEP * i) % VOCAB for i in range(WIDTH + 3)]
    right = tuple((ahead[i + 1], ahead[i + 2]) for i in range(WIDTH))
    proposed(drafter, sequence)
    drafter._window, drafter._window_at = ((58, 58), *right[1:]), len(sequence.tokens)
    run(engine, sequence, ("lookahead", FULL))
    assert sequence.tokens[-1] == ahead[1]
    proposed(drafter, sequence)
    assert window_of(drafter)[1:] == tuple((ahead[i + 2], ahead[i + 3]) for i in range(1, WIDTH))


def test_it_finds_what_never_stood_in_the_text() -> None:
    """A target that says each token once: lookup has nothing, looking ahead has."""
    prompt, steps = (1, 20, 44, 9, 33, 52, 15, 3), {}
    for name in ("ngram", "lookahead"):
        policy = Plans((name, FULL))
        sequence = play(engine_with(LookaheadDrafter()), prompt, policy, 50)
        assert sequence.tokens[len(prompt) :] == [(3 + STEP * i) % VOCAB for i in range(1, 51)]
        steps[name] = len(policy.steps)
    assert steps["ngram"] == 50
    assert steps["lookahead"] <= 34


def test_rounds_of_others_shift_the_window() -> None:
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    sequence = begun(engine)
    run(engine, sequence, ("lookahead", FULL))
    window, at = drafter._window, drafter._window_at
    run(engine, sequence, (OFF, 0), (OFF, 0))
    assert drafter._window == window and drafter._window_at == at
    proposed(drafter, sequence)
    passed = len(sequence.tokens) - at
    assert 2 <= passed < WIDTH
    assert window_of(drafter)[: WIDTH - passed] == window[passed:]
    run(engine, sequence, *[(OFF, 0)] * 10)
    proposed(drafter, sequence)
    assert len(window_of(drafter)) == WIDTH, "nothing is left of it, so it is filled anew"
    assert not set(window_of(drafter)) & set(window)


def test_a_round_of_another_drafter_teaches_it_nothing() -> None:
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    sequence = begun(engine, (1, 2, 3, 1, 2))
    proposed(drafter, sequence)  # asked, but another one drafts
    run(engine, sequence, ("ngram", 2))
    assert drafter._window == ()


def test_another_text_clears_window_and_pool() -> None:
    drafter = LookaheadDrafter()
    engine = engine_with(drafter)
    first = begun(engine, (1, 2, 3, 1, 2))
    run(engine, first, *[("lookahead", FULL)] * 3)
    other = begun(engine, (40, 41, 42))
    assert proposed(drafter, other) == proposed(LookaheadDrafter(), other)


def test_the_same_text_is_answered_alike_whatever_came_before() -> None:
    engine = engine_with(LookaheadDrafter())
    replies = []
    for _ in range(2):
        policy = Plans(("lookahead", FULL))
        play(engine, PROMPT, policy, 30)
        replies.append([step.num_accepted_tokens for step in policy.steps])
        play(engine, (9, 8, 7, 9), Plans(("lookahead", FULL)), 10)
    assert replies[0] == replies[1]


# -- the pool of n-grams


def test_a_text_is_read_into_contexts_of_one_and_two_tokens() -> None:
    pool = Pool()
    pool.read([1, 2, 3, 1, 2, 4])
    assert list(pool.followers((2,))) == [4, 3], "most recent first"
    assert list(pool.followers((1, 2))) == [4, 3]
    assert list(pool.followers((3, 1))) == [2]
    assert list(pool.followers((4,))) == []


def test_what_is_seen_again_comes_first_and_stands_once() -> None:
    pool = Pool()
    for token in (5, 6, 7, 5):
        pool.add((1,), token)
    assert list(pool.followers((1,))) == [5, 7, 6]


def test_the_oldest_followers_and_contexts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    for token in range(MAX_FOLLOWERS + 3):
        pool.add((1,), token)
    assert len(pool.followers((1,))) == MAX_FOLLOWERS
    assert pool.followers((1,))[0] == MAX_FOLLOWERS + 2
    monkeypatch.setattr(lookahead_module, "MAX_CONTEXTS", 3)
    for context in (1, 2, 3, 1, 4):
        pool.add((context,), 9)
    assert [bool(pool.followers((context,))) for context in (1, 2, 3, 4)] == [
        True,
        False,
        True,
        True,
    ]


def test_a_growing_text_is_read_once_and_another_from_where_it_differs() -> None:
    pool, text = Pool(), [1, 2]
    pool.read(text)
    pool.add((1,), 8)
    text.append(3)
    pool.read(text)
    assert list(pool.followers((1,))) == [8, 2], "1, 2 was not read again"
    pool.read([1, 2, 4])
    assert list(pool.followers((2,))) == [4, 3] and list(pool.followers((1,))) == [8, 2]


def test_of_a_long_text_the_newest_tokens_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead_module, "MAX_READ", 3)
    pool = Pool()
    pool.read([1, 2, 3, 4, 5, 6])
    assert list(pool.followers((3,))) == [4] and list(pool.followers((2,))) == []


def test_a_greedy_round_is_learnt_from_the_choices_that_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No second search through the target's rows, and the same replies and drafts."""
    play(engine_with(LookaheadDrafter()), PROMPT, wanted := Plans(("lookahead", FULL)), 80)

    def searched(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError("the rows were searched already")

    monkeypatch.setattr(torch.Tensor, "argmax", searched)
    play(engine_with(LookaheadDrafter()), PROMPT, found := Plans(("lookahead", FULL)), 80)
    assert [each.tokens for each in found.proposals] == [each.tokens for each in wanted.proposals]
    assert sum(step.num_accepted_tokens for step in found.steps) > 0


def test_a_plain_round_lists_no_drafted_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list[Proposal]()
    texts = Proposal.texts.fget
    monkeypatch.setattr(
        Proposal, "texts", property(lambda proposal: listed.append(proposal) or texts(proposal))
    )
    play(engine_with(LookaheadDrafter()), PROMPT, Plans((OFF, 0)), 6)
    assert not listed
    play(engine_with(LookaheadDrafter()), PROMPT, Plans(("lookahead", FULL)), 6)
    assert listed
