"""The EAGLE drafter: it keeps up with the text by the target's own states and grows what pays."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.core.decoding import DraftPlan, Growth, Proposal, SamplingParams
from localspec.core.errors import ModelError
from localspec.drafters.eagle import EagleDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.formats.head_folder import CONFIG
from localspec.forward.heads.autoregressive import HeadRows
from localspec.forward.heads.chain_static import ChainHead
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.heads.files import WEIGHTS
from localspec.forward.tree import depths
from tests.kit.random_eagle import write_random
from tests.kit.tiny import GREEDY, Plans, on_transformers, play, tiny_llama, with_cache

PROMPT = (5, 9, 12, 5, 9, 30, 7, 5, 9)


def engine_with_head(
    folder: Path, make: Any = with_cache, reads_once: bool = False
) -> tuple[Engine, EagleDrafter]:
    target = make(tiny_llama())
    write_random(folder, target)
    drafter = EagleDrafter(
        target,
        ChainHead(read_eagle(folder, target), target.cache.shape.capacity),
        reads_once,
    )
    return Engine(target, {"eagle": drafter}), drafter


def proposed(
    engine: Engine,
    drafter: EagleDrafter,
    tokens: tuple[int, ...],
    plan: DraftPlan | None = None,
    sampling: SamplingParams = GREEDY,
) -> Proposal:
    """What is proposed after `tokens`, from whatever was held before."""
    sequence = engine.start(tokens, sampling, 40, frozenset())
    engine.prefill(sequence, threading.Event())
    return drafter.propose(sequence, plan or DraftPlan("eagle", 8))


def assert_same(left: Proposal, right: Proposal) -> None:
    assert (left.tokens, left.parents) == (right.tokens, right.parents)
    assert left.confidences is not None and right.confidences is not None
    assert left.confidences == pytest.approx(right.confidences, abs=1e-5)


def growth(price: float, step_price: float) -> Growth:
    return Growth(lambda confidence: confidence, (price,) * 64, step_price)


# -- keeping up -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("plans", [[("eagle", 6)], [("eagle", 6), ("off", 0)], [("off", 0)]])
def test_whoever_drafted_before_the_next_draft_is_that_of_a_fresh_head(
    tmp_path: Path, plans: list[tuple[str, int]]
) -> None:
    """Accepted, rejected and skipped rounds leave nothing behind that another text would not."""
    engine, drafter = engine_with_head(tmp_path)
    text = play(engine, PROMPT, Plans(*plans), 24, SamplingParams(1.0, seed=2)).tokens
    fresh = engine_with_head(tmp_path)
    assert_same(proposed(engine, drafter, tuple(text)), proposed(*fresh, tuple(text)))


@pytest.mark.slow
def test_an_edit_and_another_conversation_leave_nothing_behind(tmp_path: Path) -> None:
    engine, drafter = engine_with_head(tmp_path)
    play(engine, PROMPT, Plans(("eagle", 6)), 12)
    for tokens in ((*PROMPT[:4], 31, *PROMPT[5:]), (40, *PROMPT[1:]), (3, 4), PROMPT):
        wanted = proposed(*engine_with_head(tmp_path), tokens)
        assert_same(proposed(engine, drafter, tokens), wanted)
        assert_same(proposed(engine, drafter, tokens), wanted)  # and asked twice, the same


def test_the_transformers_path_gives_the_same_draft(tmp_path: Path) -> None:
    native = proposed(*engine_with_head(tmp_path), PROMPT)
    assert_same(proposed(*engine_with_head(tmp_path, on_transformers), PROMPT), native)


def test_a_text_of_one_token_has_no_pair_and_no_draft(tmp_path: Path) -> None:
    engine, drafter = engine_with_head(tmp_path)
    assert proposed(engine, drafter, (5,)).tokens == ()
    assert drafter.signal(engine.start((5,), GREEDY, 40, frozenset())) is None


# -- what is proposed -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("reads_once", [False, True])
def test_a_confidence_is_the_heads_chance_after_the_tokens_own_ancestors(
    tmp_path: Path, reads_once: bool
) -> None:
    """Each path of the tree, drafted again as a chain of its own, gives the same confidences."""
    engine, drafter = engine_with_head(tmp_path, with_cache, reads_once)
    plan = DraftPlan("eagle", 40, growth=growth(0.0, 0.0))
    proposal = proposed(engine, drafter, PROMPT, plan)
    assert max(depths(proposal.parents)) >= 3 and not proposal.is_chain
    assert proposal.confidences is not None
    features, count = engine.target.follow(drafter._head.layers), len(PROMPT) - 1
    for node in range(len(proposal.tokens)):
        path = [node]
        while proposal.parents[path[0]] >= 0:
            path.insert(0, proposal.parents[path[0]])
        drafter._head.forget(count - 1)
        hidden = drafter._head.read(list(PROMPT), features).forward()
        for depth, step in enumerate(path[:-1]):
            token = proposal.tokens[step]
            hidden = drafter._head.branch([token], hidden, [count + depth], None).forward()
        row = drafter._head.logits(hidden).forward().softmax(-1)[0]
        assert float(row[proposal.tokens[node]]) == pytest.approx(
            proposal.confidences[node], abs=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(1.0, seed=3), SamplingParams(0.7, repetition_penalty=1.5, seed=3)],
    ids=str,
)
def test_a_tree_read_at_once_has_the_chances_of_one_read_step_by_step(
    tmp_path: Path, sampling: SamplingParams
) -> None:
    """They may differ in shape."""
    early, late = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()
    for reads_once, found in ((False, early), (True, late)):
        set_up = engine_with_head(tmp_path, with_cache, reads_once)
        plan = DraftPlan("eagle", 40, growth=growth(0.0, 0.0))
        proposal = proposed(*set_up, PROMPT, plan, sampling)
        found |= dict(zip(proposal.texts, proposal.confidences or (), strict=True))
    both = early.keys() & late.keys()
    assert max(map(len, both)) >= 2 and len(both) > 10
    assert [late[text] for text in both] == pytest.approx([early[text] for text in both], abs=1e-5)


def test_a_penalty_on_what_was_written_moves_the_guess(tmp_path: Path) -> None:
    set_up = engine_with_head(tmp_path)
    first = proposed(*set_up, PROMPT, DraftPlan("eagle", 1)).tokens[0]
    text = (first, *PROMPT)
    before = proposed(*set_up, text, DraftPlan("eagle", 1))
    after = proposed(*set_up, text, DraftPlan("eagle", 1), SamplingParams(repetition_penalty=10.0))
    if before.tokens[0] in text:
        assert after.tokens != before.tokens
    assert after.tokens[0] not in text


def test_prices_decide_the_size_and_steps(tmp_path: Path) -> None:
    engine, drafter = engine_with_head(tmp_path)

    def sized(price: float, step_price: float) -> Proposal:
        plan = DraftPlan("eagle", 16, growth=growth(price, step_price))
        return proposed(engine, drafter, PROMPT, plan)

    free, dear_steps, dear_nodes = sized(0.0, 0.0), sized(0.0, 1.0), sized(0.2, 0.0)
    assert len(free.tokens) == 16 and free.num_draft_steps > 1
    assert dear_steps.num_draft_steps == 1
    assert set(dear_steps.parents) == {-1}
    assert len(dear_nodes.tokens) < 16
    assert sized(1.0, 0.0).tokens == ()


def test_steps_are_the_forwards_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, drafter = engine_with_head(tmp_path)
    forwards, run = list[int](), HeadRows.forward
    monkeypatch.setattr(HeadRows, "forward", lambda rows: forwards.append(1) or run(rows))
    proposal = proposed(engine, drafter, PROMPT, DraftPlan("eagle", 16, growth=growth(0.0, 0.0)))
    assert proposal.num_draft_steps == len(forwards) > 1


def test_the_draft_follows_the_seed(tmp_path: Path) -> None:
    set_up = engine_with_head(tmp_path)
    one, again, other = (
        proposed(*set_up, PROMPT, None, SamplingParams(2.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert_same(one, again)
    assert one.tokens != other.tokens


@pytest.mark.parametrize("reads_once", [False, True])
def test_a_head_that_returns_nan_proposes_nothing(tmp_path: Path, reads_once: bool) -> None:
    engine, drafter = engine_with_head(tmp_path, with_cache, reads_once)
    wanted = play(engine, PROMPT, Plans(("off", 0)), 10).tokens
    parts = drafter._head._parts
    damaged: Any = lambda rows: parts.output(rows) * float("nan")  # noqa: E731
    drafter._head._parts = replace(parts, output=damaged)
    policy = Plans(("eagle", 4))
    assert play(engine, PROMPT, policy, 10).tokens == wanted
    assert not any(step.num_draft_tokens for step in policy.steps)


# -- trained, and refused ---------------------------------------------------------------------


def test_without_a_head_the_drafter_says_so() -> None:
    with pytest.raises(ModelError, match="no EAGLE head for this target"):
        EagleDrafter.build(Parts(with_cache(tiny_llama())))


def test_a_head_of_pickle_is_refused(tmp_path: Path) -> None:
    target = with_cache(tiny_llama())
    write_random(tmp_path, target)
    (tmp_path / WEIGHTS).rename(tmp_path / "head.bin")
    assert (tmp_path / CONFIG).is_file()
    with pytest.raises(ModelError, match="pickle"):
        EagleDrafter.build(Parts(target, heads={"eagle": tmp_path}))
