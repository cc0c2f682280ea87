"""Medusa's trees: which nodes, in which order, from which state."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import pytest
import torch

from localspec.core.decoding import DraftPlan, Growth, SamplingParams, Sequence
from localspec.core.errors import ModelError
from localspec.drafters.drafting import HEAD_SHARE
from localspec.drafters.medusa import Level, MedusaDrafter, grown, guesses
from localspec.drafters.parts import Parts
from localspec.drafters.tree_growth import usual_growth
from localspec.engine.engine import Engine
from localspec.engine.sampling import choices, scores
from localspec.forward.decoder import Decoder, run_together
from localspec.forward.features import LAST
from localspec.forward.heads.medusa import MedusaHeads
from localspec.forward.passes import Rows
from localspec.forward.tree import depths
from tests.kit.random_medusa import write_random
from tests.kit.tiny import HIDDEN_SIZE, tiny_llama, turn_of, with_cache, with_plain_cache

PROMPT = (5, 9, 12, 30, 7)
SEED = 11


def sequence_of(*tokens: int, temperature: float = 0.0) -> Sequence:
    return turn_of(tokens, SamplingParams(temperature))


def level(*chances: float, first: int = 0) -> Level:
    return list(range(first, first + len(chances))), list(chances)


def priced(*prices: float) -> Growth:
    return Growth(lambda confidence: confidence, prices, 0.0)


def test_a_tree_must_pay_for_the_jump_as_well() -> None:
    levels = [level(0.6, 0.2), level(0.5)]
    for fixed_price, count in ((0.9, 3), (1.1, 0)):
        growth = Growth(lambda confidence: confidence, (0.05,) * 3, 0.0, fixed_price)
        assert len(grown(levels, 3, growth).tokens) == count


def worths_of_all(levels: list[Level]) -> list[float]:
    """Every node of the whole Cartesian tree, best first."""
    found = []
    for depth in range(1, len(levels) + 1):
        for path in product(*(chances for _, chances in levels[:depth])):
            worth = 1.0
            for chance in path:
                worth *= chance
            found.append(worth)
    return sorted(found, reverse=True)


def worths_of(proposal_parents: tuple[int, ...], chances: tuple[float, ...]) -> list[float]:
    found: list[float] = []
    for parent, chance in zip(proposal_parents, chances, strict=True):
        found.append(chance if parent < 0 else found[parent] * chance)
    return found


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 15, 40])
def test_the_tree_holds_the_most_valuable_nodes_in_order(max_nodes: int) -> None:
    torch.manual_seed(SEED)
    rows = torch.rand(3, 5).sort(descending=True).values.tolist()
    levels = [level(*row) for row in rows]
    proposal = grown(levels, max_nodes, usual_growth(0.0, 0.0, max_nodes))
    assert proposal.confidences is not None
    found = worths_of(proposal.parents, proposal.confidences)
    assert found == pytest.approx(worths_of_all(levels)[:max_nodes])


def test_a_node_holds_a_token_of_its_own_depth() -> None:
    levels = [level(0.9, 0.8, first=10), level(0.7, 0.6, first=20), level(0.5, first=30)]
    proposal = grown(levels, 20, usual_growth(0.0, 0.0, 20))
    assert len(proposal.tokens) == 2 + 4 + 4
    for token, depth in zip(proposal.tokens, depths(proposal.parents), strict=True):
        assert token // 10 == depth + 1


def test_it_ends_at_the_first_node_that_does_not_pay() -> None:
    levels = [level(0.75, 0.125), level(0.5, 0.25)]  # 0.75, 0.375, 0.1875, 0.125, 0.0625, ...
    assert len(grown(levels, 9, priced(0.5, 0.25, 0.1875, 0.0)).tokens) == 2
    assert len(grown(levels, 9, priced(0.5, 0.25, 0.125, 0.0625, 0.2)).tokens) == 4
    assert len(grown(levels, 9, priced(0.5)).tokens) == 1, "a place without a price is not there"
    assert grown(levels, 9, priced(0.95, 0.0)).tokens == ()


def test_siblings_stand_in_the_order_of_their_calibrated_chance() -> None:
    """What was learnt may turn the heads' own order round."""
    growth = Growth(lambda confidence: 1.0 - confidence, (0.0,) * 9, 0.0)
    logits = torch.tensor([[4.0, 3.0, 1.0]])
    proposal = grown(guesses(logits, sequence_of(*PROMPT), 9), 9, growth)
    assert proposal.tokens == (2, 1, 0)
    wanted = torch.softmax(logits[0], -1)[[2, 1, 0]].tolist()
    assert proposal.confidences == pytest.approx(wanted)


def test_heads_that_say_nan_propose_nothing() -> None:
    damaged = guesses(torch.full((2, 4), float("nan")), sequence_of(*PROMPT), 5)
    assert grown(damaged, 5, usual_growth(0.0, 0.0, 5)).tokens == ()


def drafter_of(target: Decoder, num_heads: int = 2) -> MedusaDrafter:
    """Heads with weights of zero: each says what the target says next."""
    shape = (num_heads, 1, HIDDEN_SIZE)
    return MedusaDrafter(MedusaHeads(torch.zeros(*shape, HIDDEN_SIZE), torch.zeros(shape)), target)


def test_it_reads_the_state_that_predicted_the_root() -> None:
    """Heads of zero name what the target says after the last cached token: the root again."""
    target = with_cache(tiny_llama())
    drafter = drafter_of(target)
    for end in (2, 4, 5):
        sequence = sequence_of(*PROMPT[:end])
        target.cache.rollback(0)
        said = target.forward(PROMPT[: end - 1], num_logits=1)[0].softmax(-1)
        proposal = drafter.propose(sequence, DraftPlan("medusa", 1))
        assert proposal.tokens == (int(said.argmax()),)
        assert proposal.confidences == pytest.approx([float(said.max())], abs=1e-5)
        assert proposal.num_draft_steps == 1


@pytest.mark.slow
def test_after_a_tree_was_judged_the_state_is_that_of_the_kept_path(tmp_path: Path) -> None:
    """Compaction moves the states with the keys: each row equals that of a fresh forward."""
    target = with_plain_cache(tiny_llama())
    write_random(tmp_path, target)
    drafter = MedusaDrafter.build(Parts(target, heads={"medusa": tmp_path}))
    engine = Engine(target, {"medusa": drafter})
    sequence = engine.start((5, 9, 12, 5, 9, 30, 7, 5, 9), SamplingParams(), 30, frozenset())
    engine.prefill(sequence, threading.Event())

    class Trees:
        moved = 0

        def plan(self, sequence: Sequence) -> DraftPlan:
            return DraftPlan("medusa", 12)

        def observe(self, sequence: Sequence, outcome: object) -> None:
            verdict = outcome.verdict  # type: ignore[attr-defined]
            self.moved += verdict.path != tuple(range(len(verdict.path)))

    policy = Trees()
    for _ in engine.decode(sequence, policy, threading.Event()):
        pass
    assert policy.moved > 0, "no path was ever moved"
    held = target.cache.length
    kept = target.follow([LAST]).rows(LAST, 0, held).clone()
    fresh = with_cache(tiny_llama())
    (made,) = run_together([Rows(fresh, sequence.tokens[:held])], [LAST])
    assert torch.allclose(kept, made.hidden[LAST], atol=1e-4)


def test_each_head_guesses_with_the_noise_of_its_place() -> None:
    """As the target chooses there with that share, were its logits the head's."""
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(SEED))
    sequence = sequence_of(*PROMPT, temperature=2.0)
    levels = guesses(logits, sequence, 9)
    for place, (tokens, _) in enumerate(levels):
        after = turn_of((*PROMPT, *[1] * place), sequence.sampling)
        assert [tokens[0]] == choices(scores(logits[place : place + 1], after, [()], HEAD_SHARE))


def test_without_a_state_before_the_root_it_has_nothing_to_say() -> None:
    target = with_cache(tiny_llama())
    drafter = drafter_of(target)
    assert drafter.signal(sequence_of(5)) is None
    assert drafter.propose(sequence_of(5), DraftPlan("medusa", 4)).tokens == ()
    assert drafter.signal(sequence_of(5, 9)) == "heads"


def test_without_heads_it_says_how_to_get_some() -> None:
    with pytest.raises(ModelError, match="localspec train medusa"):
        MedusaDrafter.build(Parts(with_cache(tiny_llama())))
