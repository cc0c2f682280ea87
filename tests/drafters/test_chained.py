"""Lookup and model in one draft: what is copied, where the model goes on, and who is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.core import decoding
from localspec.core.decoding import DraftPlan, Proposal, SamplingParams
from localspec.drafters.chained import ChainedDrafter
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.model import LanguageModel
from tests.kit.tiny import Context, TableModel, scripted, tiny_llama, with_cache, with_plain_cache
from tests.kit.tracing import TracingPool

VOCAB = 64
REPEATING = (5, 9, 12, 40, 30, 7, 5, 9)
FRESH = (1, 2, 3, 4, 5, 6)


def proposed(kind: type, script: Context, prompt: Context, size: int = 6) -> Proposal:
    """By a draft model that would answer `prompt` with `script`."""
    draft = scripted(script, len(prompt), VOCAB)
    parts = Parts(with_cache(tiny_llama()), draft)
    sequence = Engine(parts.target, {}).start(prompt, SamplingParams(), 50, frozenset())
    found: Proposal = kind.build(parts).propose(sequence, DraftPlan("chained", size))
    return found


def signal(prompt: Context) -> object:
    parts = Parts(with_cache(tiny_llama()), scripted((), len(prompt), VOCAB))
    sequence = decoding.Sequence(prompt, SamplingParams(), 50, frozenset(), None)  # type: ignore[arg-type]
    return ChainedDrafter.build(parts).signal(sequence)


def test_a_copy_that_the_model_agrees_with_stands_whole() -> None:
    script = (12, 40, 30, 7, 5, 9, 1, 1)
    assert proposed(ChainedDrafter, script, REPEATING).tokens == (12, 40, 30, 7, 5, 9)


@pytest.mark.parametrize("agreed", [0, 1, 3])
def test_from_the_first_token_it_disagrees_with_the_model_drafts_on(agreed: int) -> None:
    """A scripted model goes by place alone, so what follows is the script whatever was copied."""
    script = (*REPEATING[2 : 2 + agreed], 50, 51, 52, 53, 54, 55)
    assert proposed(ChainedDrafter, script, REPEATING).tokens == script[:6]


@pytest.mark.parametrize(("agreed", "num_copied"), [(0, 0), (3, 3), (6, 6)])
def test_each_token_names_the_one_it_comes_from(agreed: int, num_copied: int) -> None:
    script = (*(*REPEATING[2:], 12, 40)[:agreed], 50, 51, 52, 53, 54, 55)
    makers = proposed(ChainedDrafter, script, REPEATING, 6).makers
    assert makers == ("ngram",) * num_copied + ("draft_model",) * (6 - num_copied)


def test_where_the_copy_ends_the_model_goes_on() -> None:
    script = (12, 40, 30, 7, 5, 9, 12, 40, 60, 61, 62, 63)
    assert proposed(ChainedDrafter, script, REPEATING, 10).tokens == script[:10]


def test_where_nothing_repeats_it_drafts_as_the_model_alone() -> None:
    script = (20, 21, 22, 23, 24, 25, 26)
    alone = proposed(DraftModelDrafter, script, FRESH)
    assert alone.tokens == script[:6]
    assert proposed(ChainedDrafter, script, FRESH) == replace(alone, makers=("draft_model",) * 6)


def greedy_reply(model: LanguageModel, prompt: Context, count: int) -> Context:
    tokens = list(prompt)
    for _ in range(count):
        model.cache.rollback(0)
        tokens.append(int(model.forward(tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("has_rule", [False, True])
def test_where_a_device_captures_it_goes_on_by_the_graphs_of_the_draft_model(
    temperature: float, has_rule: bool
) -> None:
    """It drafted by a loop of its own, which nothing captured."""
    pool = TracingPool()
    target, *drafts = (with_plain_cache(tiny_llama(), 64) for _ in "abc")
    parts = [
        Parts(target, draft, pool=each) for draft, each in zip(drafts, (pool, None), strict=True)
    ]
    (graphs,) = DraftModelDrafter.build(parts[0]).captures
    assert [*graphs.capture()]
    captured, eager = map(ChainedDrafter.build, parts)
    made_by = set[str]()
    rule = (lambda index, confidence: confidence > 0.05) if has_rule else None
    for start in range(20):
        beginning = (start, 9, 12, 40, 30 + start, 7, start, 9)
        prompt = (*beginning, *greedy_reply(target, beginning, start))
        sampling = SamplingParams(temperature, seed=start)
        sequence = Engine(target, {}).start(prompt, sampling, 50, frozenset())
        plan, num_before = DraftPlan("chained", 7, keep_drafting=rule), pool.num_replays
        found, wanted = (each.propose(sequence, plan) for each in (captured, eager))
        assert (found.tokens, found.makers) == (wanted.tokens, wanted.makers)
        assert found.confidences == pytest.approx(wanted.confidences, abs=1e-5)
        assert drafts[0].cache.length <= len(prompt) + len(found.tokens)
        made_by |= {*found.makers}
        assert (pool.num_replays > num_before) is ("draft_model" in found.makers)
    assert made_by == {"ngram", "draft_model"}


def test_it_has_something_of_its_own_to_say_only_where_the_text_repeats() -> None:
    """Elsewhere it would be the draft model under a second name."""
    assert signal(FRESH) is None
    assert signal(REPEATING) == "2"


@pytest.mark.slow
@pytest.mark.parametrize(("agreed", "num_steps"), [(0, 6), (3, 3), (6, 1)])
def test_steps_are_how_often_the_model_ran(
    agreed: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was copied is one; it gives the first token behind the copy as well."""
    forwards = list[int]()
    forward = TableModel.forward

    def counted(self: TableModel, tokens: Context, *rest: object, **named: object) -> object:
        forwards.append(len(tokens))
        return forward(self, tokens, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TableModel, "forward", counted)
    script = (*(*REPEATING[2:], 12, 40)[:agreed], 50, 51, 52, 53, 54, 55)
    proposal = proposed(ChainedDrafter, script, REPEATING, 6)
    assert proposal.num_draft_steps == num_steps == len(forwards)
