"""Lookup drafting: which continuation is proposed, how a tree is sized, and what it costs."""

from __future__ import annotations

import gc
import random
from collections import Counter
from time import thread_time
from typing import Any

import pytest

from localspec.core.decoding import DraftPlan, Growth, Proposal, SamplingParams, Sequence
from localspec.drafters.chained import ChainedDrafter
from localspec.drafters.lookup import HANDICAP, MIN_MATCH, Lookup, Matches
from localspec.drafters.ngram import NgramDrafter, match_class
from localspec.drafters.parts import Parts
from tests.kit.tiny import agreeing_draft, tiny_llama, with_cache

RNG: Any = None


def sequence_of(*tokens: int) -> Sequence:
    return Sequence(tokens, SamplingParams(), 1000, frozenset(), RNG)


def proposed(drafter: NgramDrafter, sequence: Sequence, count: int = 4) -> tuple[int, ...]:
    return drafter.propose(sequence, DraftPlan("ngram", count)).tokens


def grown(tokens: tuple[int, ...], size: int = 15, price: float = 0.05) -> Proposal:
    """The tree where every node costs `price` and chances are as the drafter says."""
    growth = Growth(lambda chance: chance, (price,) * size, 0.0)
    plan = DraftPlan("ngram", size, growth=growth)
    return NgramDrafter().propose(sequence_of(*tokens), plan)


def naive(tokens: list[int], count: int) -> tuple[tuple[int, ...], str | None]:
    """Token by token what followed the longest match most often, among equals the latest, by
    looking everywhere in the text."""
    text, signal = list(tokens), None
    for drafted in range(count):
        for length in range(len(text), MIN_MATCH - 1, -1):
            end = text[len(text) - length :]
            places = range(length, len(tokens))
            followers = [tokens[p] for p in places if tokens[p - length : p] == end]
            if followers:
                break
        else:
            break
        if not drafted:
            signal = match_class(length)
        counts = Counter(followers)
        latest = {token: place for place, token in enumerate(followers)}
        text.append(max(counts, key=lambda token: (counts[token], latest[token])))
    return tuple(text[len(tokens) :]), signal


def worths(proposal: Proposal) -> list[float]:
    found: list[float] = []
    for parent, chance in zip(proposal.parents, proposal.confidences or (), strict=True):
        found.append(chance * (1.0 if parent < 0 else found[parent]))
    return found


# -- one chain --------------------------------------------------------------------------------


def test_the_longest_match_wins() -> None:
    text = sequence_of(7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2)
    assert proposed(NgramDrafter(), text, 1) == (50,)


def test_of_what_followed_equally_long_matches_the_most_frequent_wins_then_the_latest() -> None:
    equals = sequence_of(7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2)
    assert proposed(NgramDrafter(), equals, 1) == (60,)
    twice = sequence_of(6, 1, 2, 50, 7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2)
    assert proposed(NgramDrafter(), twice, 1) == (50,)


def test_random_texts_agree_with_looking_everywhere() -> None:
    rng = random.Random(7)
    for _ in range(150):
        text = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        tokens, signal = naive(text, 5)
        drafter, sequence = NgramDrafter(), sequence_of(*text)
        assert proposed(drafter, sequence, 5) == tokens
        assert drafter.signal(sequence) == signal


@pytest.mark.parametrize("tokens", [(1,), (1, 2), (1, 2, 3, 4)])
def test_without_a_match_there_is_nothing_to_say(tokens: tuple[int, ...]) -> None:
    drafter, sequence = NgramDrafter(), sequence_of(*tokens)
    assert drafter.signal(sequence) is None
    assert proposed(drafter, sequence) == ()
    assert grown(tokens) == Proposal(num_steps=1)


def test_a_copy_that_reaches_the_end_repeats_itself() -> None:
    assert proposed(NgramDrafter(), sequence_of(1, 2, 3, 1, 2, 3), 7) == (1, 2, 3, 1, 2, 3, 1)
    assert proposed(NgramDrafter(), sequence_of(5, 5, 5), 3) == (5, 5, 5)


@pytest.mark.parametrize(
    ("length", "name"), [(2, "2"), (3, "3-4"), (4, "3-4"), (8, "5-8"), (16, "9-16"), (24, "17+")]
)
def test_match_classes(length: int, name: str) -> None:
    assert match_class(length) == name


def test_a_draft_counts_as_one_step_whatever_its_size() -> None:
    text = sequence_of(1, 2, 3, 9, 1, 2)
    chain = NgramDrafter().propose(text, DraftPlan("ngram", 4))
    assert (len(chain.tokens), chain.num_draft_steps) == (4, 1)
    assert grown(tuple(text.tokens)).num_draft_steps == 1


def test_confidence_grows_with_the_match_and_with_agreement() -> None:
    def first(*tokens: int) -> float:
        found = NgramDrafter().propose(sequence_of(*tokens), DraftPlan("ngram", 1)).confidences
        assert found is not None and 0.0 < found[0] < 1.0
        return found[0]

    once = first(1, 2, 50, 9, 1, 2)
    long = first(*range(1, 20), 50, 99, *range(1, 20))
    twice = first(1, 2, 50, 9, 1, 2, 50, 8, 1, 2)
    divided = first(1, 2, 50, 9, 1, 2, 60, 8, 1, 2)
    assert divided < once < twice < long


# -- the past ---------------------------------------------------------------------------------


def test_past_conversations_are_told_apart_by_the_signal() -> None:
    past = tuple(range(100, 112))
    drafter = NgramDrafter(Lookup([past]))
    assert drafter.signal(sequence_of(1, *past[:5])) == f"past {match_class(5 - HANDICAP)}"
    assert drafter.signal(sequence_of(1, *past[:9])) == f"past {match_class(9 - HANDICAP)}"
    assert proposed(drafter, sequence_of(1, *past[:9]), 9) == past[9:]
    assert drafter.signal(sequence_of(*past[:9], 1, *past[:9])) == match_class(9)


def test_ngram_and_chained_share_one_index() -> None:
    module = tiny_llama()
    parts = Parts(with_cache(module), with_cache(agreeing_draft(module)), past=((1, 2, 3),))
    ngram, chained = NgramDrafter.build(parts), ChainedDrafter.build(parts)
    assert chained._lookup._lookup is ngram._lookup is parts.lookup


def test_past_tokens_that_the_target_does_not_know_are_left_out() -> None:
    target = with_cache(tiny_llama())
    fitting = (1, 2, target.vocab_size - 1)
    parts = Parts(target, past=((1, 2, target.vocab_size), fitting, (-1, 4)))
    assert len(parts.lookup._past) == len(fitting)


# -- trees ------------------------------------------------------------------------------------

FORKED = (1, 2, 50, 51, 9, 1, 2, 60, 61, 8, 1, 2, 50, 51, 7, 1, 2)


def test_several_continuations_become_branches_by_frequency() -> None:
    tree = grown(FORKED)
    at_root = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p < 0]
    assert at_root == [50, 60]
    assert tree.tokens[tree.parents.index(tree.tokens.index(50))] == 51


def test_nodes_are_added_best_first_and_never_below_their_price() -> None:
    tree = grown(FORKED, price=0.1)
    found = worths(tree)
    assert found == sorted(found, reverse=True) and found[-1] > 0.1
    assert len(grown(FORKED, price=0.02).tokens) > len(tree.tokens)
    assert grown(FORKED, price=0.99) == Proposal(num_steps=1)


def test_a_dearer_later_node_ends_the_tree_there() -> None:
    growth = Growth(lambda chance: chance, (0.01, 0.01, 0.9, 0.01), 0.0)
    plan = DraftPlan("ngram", 15, growth=growth)
    assert len(NgramDrafter().propose(sequence_of(*FORKED), plan).tokens) == 2


def test_a_long_copy_pays_for_a_jump_that_its_first_token_could_not() -> None:
    """Checking two tokens costs 0.9 of a token more than one, the others next to nothing."""

    def proposed(tokens: tuple[int, ...]) -> int:
        growth = Growth(lambda chance: chance, (0.01,) * 15, 0.0, 0.9)
        plan = DraftPlan("ngram", 15, growth=growth)
        return len(NgramDrafter().propose(sequence_of(*tokens), plan).tokens)

    copied = tuple(range(3, 23))
    assert proposed((*copied, 1, *copied[:6])) >= 10
    assert proposed((7, 8, 1, 2, 9, 7, 8)) == 0, "two tokens once before: too little is likely"


def test_what_was_learnt_of_confidences_decides() -> None:
    growth = Growth(lambda chance: 0.0, (0.01,) * 4, 0.0)
    plan = DraftPlan("ngram", 4, growth=growth)
    assert NgramDrafter().propose(sequence_of(*FORKED), plan) == Proposal(num_steps=1)


def test_a_long_copy_pays_though_its_first_token_is_unlikely() -> None:
    growth = Growth(lambda chance: 0.4 if chance < 0.37 else 0.99, (0.01,) * 15, 0.0, 0.9)
    plan = DraftPlan("ngram", 15, growth=growth)
    copied = sequence_of(*range(3, 23), 1, 3, 4)
    assert len(NgramDrafter().propose(copied, plan).tokens) >= 10


def test_siblings_stand_in_the_order_of_what_was_learnt_then_the_latest_first() -> None:
    divided = (6, 1, 2, 50, 7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2, 70, 5, 1, 2)

    def first_children(growth: Growth) -> list[int]:
        plan = DraftPlan("ngram", 15, growth=growth)
        tree = NgramDrafter().propose(sequence_of(*divided), plan)
        return [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p < 0]

    prices = (0.01,) * 15
    assert first_children(Growth(lambda confidence: confidence, prices, 0.0)) == [50, 70, 60]
    assert first_children(Growth(lambda confidence: 0.5 - confidence, prices, 0.0)) == [70, 60, 50]


def test_shorter_contexts_are_asked_only_where_they_may_name_the_next_node() -> None:
    class Counting(Lookup):
        num_shorter = 0

        def shorter(self, place: Matches) -> Matches:
            self.num_shorter += 1
            return super().shorter(place)

    def num_asked(*tokens: int) -> int:
        lookup = Counting()
        plan = DraftPlan("ngram", 15, growth=Growth(lambda chance: chance, (0.05,) * 15, 0.0))
        assert NgramDrafter(lookup).propose(sequence_of(*tokens), plan).tokens
        return lookup.num_shorter

    assert num_asked(9, *range(20, 60), 1, *range(20, 40)) == 0, "0.09 is left at each node"
    assert num_asked(3, 1, 2, 50, 9, 1, 2, 60, 8, 3, 1, 2) > 0


@pytest.mark.slow
def test_a_tree_leaves_nothing_to_the_garbage_collector() -> None:
    """Cycles would be swept in the midst of a reply."""
    tokens = FORKED
    grown(tokens)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert len(grown(tokens).tokens) > 2
        gc.collect()
        # Threads of other tests may leave something too.
        modules = [getattr(each, "__module__", type(each).__module__) for each in gc.garbage]
        assert [name for name in modules if "localspec" in str(name)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_shorter_context_adds_what_the_longest_did_not_name() -> None:
    text = (3, 1, 2, 50, 9, 1, 2, 60, 8, 3, 1, 2)
    tree = grown(text)
    at_root = [t for t, p in zip(tree.tokens, tree.parents, strict=True) if p < 0]
    assert at_root == [50, 60], "50 followed three tokens, 60 only the last two of them"


@pytest.mark.parametrize("size", [1, 2, 7, 15])
def test_a_tree_keeps_to_its_size_and_names_no_sibling_twice(size: int) -> None:
    rng = random.Random(5)
    for _ in range(100):
        text = tuple(rng.randrange(3) for _ in range(rng.randrange(3, 60)))
        tree = grown(text, size, 0.01)
        assert len(tree.tokens) <= size
        nodes = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(nodes)) == len(nodes)
        for node in set(tree.parents):
            below = [
                c for c, p in zip(tree.confidences or (), tree.parents, strict=True) if p == node
            ]
            assert sum(below) <= 1.0, "siblings exclude each other"


def test_a_tree_goes_round_where_the_text_repeats_itself() -> None:
    tree = grown((5,) * 20, size=8)
    assert tree.tokens == (5,) * 8 and tree.is_chain


# -- cost -------------------------------------------------------------------------------------


def test_one_token_repeated_for_ever_costs_no_more_than_its_bound() -> None:
    """20000 equal tokens: 200 rounds in far less than a search of the whole text would take."""
    drafter, sequence = NgramDrafter(), sequence_of(*[4] * 20_000)
    drafter.signal(sequence)
    started = thread_time()
    growth = Growth(lambda chance: chance, (0.01,) * 15, 0.0)
    for _ in range(200):
        assert proposed(drafter, sequence, 2) == (4, 4)
        drafter.propose(sequence, DraftPlan("ngram", 15, growth=growth))
        sequence.append([4])
    assert thread_time() - started < 4.0  # a fraction of a second of processor time
