"""What is recommended on machines that are written down: pure, on the shipped profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.options import LoadOptions
from localspec.core.precisions import Precision
from localspec.core.speculation import Measurement
from localspec.machine.catalogue import profile_models
from localspec.machine.gains import ExpectedGain, assumed_speedup
from localspec.machine.memory import GIB, Room
from localspec.machine.model import Model, on_this_machine
from localspec.machine.profiles import load_profiles
from localspec.machine.recommend import (
    MOST_BYTES_ON_CPU,
    Card,
    Recommendation,
    Snapshot,
    card_of,
    recommend,
)

ALL_MODELS = profile_models(load_profiles((SHIPPED_PROFILES,)), [])
MODELS = [  # of earlier generations, with draft models alone
    replace(model, drafts=tuple(each for each in model.drafts if each.head is None))
    for model in ALL_MODELS
    if not model.is_current
]
QWEN = "Qwen/Qwen3-8B"


def gpu(gib: float, full: Precision = "bf16") -> Snapshot:
    room = Room("cuda", int(gib * GIB), int(gib * GIB), 5888, has_display=True)
    return Snapshot(room, full, disk_free_bytes=200_000_000_000)


def cpu(gib: float) -> Snapshot:
    return Snapshot(Room("cpu", int(gib * GIB), int(gib * GIB)), "fp32", disk_free_bytes=None)


def found(
    snapshot: Snapshot,
    context_length: int = 8192,
    cached: Mapping[str, int] | None = None,
    hub_bytes: Mapping[str, int] | None = None,
) -> Recommendation:
    """cached: bytes on disk of what the hub's cache has, and hub_bytes, what the hub says."""
    here = {id: Model(id, path=Path(id), num_bytes=size) for id, size in (cached or {}).items()}
    models = [on_this_machine(model, here, hub_bytes or {}) for model in MODELS]
    return recommend(snapshot, models, context_length)


def first(snapshot: Snapshot, context_length: int = 8192, **known: Mapping[str, int]) -> Card:
    card = found(snapshot, context_length, **known).card
    assert card is not None
    return card


def model(name: str) -> Model:
    return next(each for each in MODELS if each.id == name)


@pytest.mark.slow
@pytest.mark.parametrize("gib", [8.0, 10.3, 16.0, 24.0, 48.0, 80.0])
def test_on_a_gpu_it_is_an_open_pair_that_fits(gib: float) -> None:
    card = first(gpu(gib))
    assert card.plan.draft is not None and card.plan.drafter == "draft_model"
    assert card.model.license in ("Apache-2.0", "MIT") and card.model.is_gated is not True
    assert card.refusal is None and card.spare_bytes >= 0
    assert "Coder" not in card.id


@pytest.mark.slow
@pytest.mark.parametrize("gib", [8.0, 12.0, 16.0, 24.0])
def test_a_model_of_the_newest_generation_is_offered_before_older_ones(gib: float) -> None:
    result = recommend(gpu(gib), ALL_MODELS, 8192)
    assert result.card is not None and result.card.model.is_current
    assert result.card.plan.context_length >= 4096
    older = first(gpu(gib))
    assert older.id in {card.id for card in (*result.smaller, *result.larger, *result.others)}


@pytest.mark.slow
def test_more_memory_never_recommends_a_smaller_model() -> None:
    cards = [first(gpu(gib)) for gib in (6, 8, 12, 16, 24, 48, 80)]
    sizes = [float(f"{card.model.shape.num_params:.1e}") for card in cards]  # as they are compared
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_what_a_card_needs_and_spares_adds_up_to_what_is_free() -> None:
    snapshot = gpu(10.3)
    for card in (first(snapshot), card_of(snapshot, model("Qwen/Qwen3-32B"), 8192)):
        assert card.plan.bytes.total + card.spare_bytes == snapshot.room.free_bytes
    assert card.spare_bytes < 0 and card.refusal is not None, "what does not fit is short by that"


def test_a_model_that_does_not_fit_says_what_would() -> None:
    card = card_of(gpu(10.3), model("meta-llama/Llama-3.1-70B-Instruct"), 8192)
    assert card.refusal is not None and "GiB is free" in card.refusal
    assert "would fit" in card.refusal
    assert card.load_options(anyway=True).anyway is True


def test_a_download_without_a_dry_run_is_an_estimate_and_with_one_exact() -> None:
    guessed = first(gpu(12.0))
    assert not guessed.is_exact
    target, draft = guessed.parts
    packed = 6_100_000_000  # of Qwen3-8B-AWQ, as the hub says
    assert target.stored_bytes == pytest.approx(packed, rel=0.02)
    assert draft.stored_bytes == pytest.approx(2 * model(draft.id).shape.num_params, rel=0.02)
    sizes = {part.id: 1_000 + number for number, part in enumerate(guessed.parts)}
    asked = first(gpu(12.0), hub_bytes=sizes)
    assert asked.is_exact and asked.download_bytes == sum(sizes.values())
    assert asked.disk_left_bytes == 200_000_000_000 - asked.download_bytes


@pytest.mark.slow
def test_what_is_here_is_not_fetched_again() -> None:
    target, draft = (part.id for part in first(gpu(10.3)).parts)
    half = first(gpu(10.3), cached={target: 5_000})
    assert [part.is_here for part in half.parts] == [True, False] and not half.is_here
    assert half.download_bytes == half.parts[1].stored_bytes
    whole = found(gpu(10.3), cached={target: 5_000, draft: 700})
    assert whole.card is not None and whole.card.is_here and whole.card.download_bytes == 0
    assert whole.card in whole.here


def test_an_unknown_disk_stays_unknown() -> None:
    assert first(replace(gpu(10.3), disk_free_bytes=None)).disk_left_bytes is None


def test_the_alternatives_are_smaller_and_larger_and_fit() -> None:
    result = found(gpu(12.0))
    assert result.card is not None and result.smaller and result.larger
    size = result.card.model.shape.num_params
    assert all(card.model.shape.num_params < size for card in result.smaller)
    assert all(card.model.shape.num_params > size for card in result.larger)
    assert all(card.refusal is None for card in (*result.smaller, *result.larger))
    names = [card.id for card in result.others]
    assert len(names) == len(set(names)) and result.card.id not in names


def test_on_a_processor_a_model_is_held_to_what_it_reads_in_time() -> None:
    card = first(cpu(64.0))
    assert card.plan.precision == "fp32", "quantised weights are seldom faster there"
    assert card.plan.bytes.target_weights <= MOST_BYTES_ON_CPU
    assert found(cpu(64.0)).larger, "slower ones can still be chosen"


def test_when_nothing_fits_the_reasons_say_what_is_lacking() -> None:
    result = recommend(gpu(1.0), [each for each in MODELS if each.page is not None], 8192)
    assert result.card is None and len(result.reasons) == 2
    assert all("is free" in reason for reason in result.reasons)


def test_what_ships_is_here_and_never_the_recommendation() -> None:
    result = found(gpu(10.3))
    assert [card.id for card in result.here] == ["localspec/demo"]
    demo = result.here[0]
    assert demo.is_here and demo.download_bytes == 0 and result.card != demo


def test_a_model_of_a_short_context_is_not_first_where_a_longer_one_is_wanted() -> None:
    known = model("google/gemma-3-4b-it")
    short = replace(known, known_shape=replace(known.shape, context_length=1024))
    gemma = card_of(gpu(24.0), short, 8192)
    assert gemma.plan.context_length == 1024 and gemma.model.is_gated is True
    only = recommend(gpu(24.0), [replace(gemma.model, is_gated=False, license="MIT")], 8192)
    assert only.card is None


def test_a_model_that_asks_for_an_agreement_is_not_the_first_offered() -> None:
    asking = replace(model(QWEN), is_gated=True)
    assert recommend(gpu(24.0), [model(QWEN)], 8192).card is not None
    assert recommend(gpu(24.0), [asking], 8192).card is None


def test_a_card_loads_exactly_its_plan_and_fetches_nothing() -> None:
    card = first(gpu(10.3))
    assert card.load_options() == LoadOptions(
        model=card.id,
        draft=card.plan.draft_name,
        context=card.plan.context_length,
        dtype={"bf16": "bfloat16"}.get(card.plan.precision, card.plan.precision),
        fetches=False,
    )


# -- the gain -------------------------------------------------------------------------------


def test_a_gain_that_was_not_measured_is_a_range_with_its_assumptions() -> None:
    gain = first(gpu(10.3)).gain
    assert gain is not None and not gain.is_measured
    assert 1.0 <= gain.low < gain.high < 4.0 and "assumes" in gain.basis


def test_a_measured_gain_replaces_the_range() -> None:
    card = first(gpu(24.0))
    measured = Measurement(
        card.id, card.plan.precision, {1: 20.0, 2: 20.0, 8: 22.0}, {"draft_model": 2.0},
        {"draft_model": (0.8,)}, card.plan.draft_name,
    )  # fmt: skip
    again = first(replace(gpu(24.0), measurements=(measured,)))
    gain = again.gain
    assert isinstance(gain, ExpectedGain) and gain.is_measured and gain.low == gain.high > 1.5


def test_a_draft_as_dear_as_its_target_gains_nothing_and_never_loses() -> None:
    assert assumed_speedup(0.5, 1.0, 0.1) == 1.0
    assert assumed_speedup(0.9, 0.05, 0.03) > 2.5
    # By hand: one draft token at half a step's cost, always right: 2 tokens for 1.5 steps.
    assert assumed_speedup(1.0, 0.5, 0.0) == pytest.approx(9 / 5)


def test_without_a_draft_the_card_says_what_drafts_there() -> None:
    card = card_of(gpu(24.0), model("mistralai/Mistral-7B-Instruct-v0.3"), 8192)
    assert card.plan.draft is None and card.plan.drafter in ("ngram", "self_quant")
    assert "n-gram" in card.model.note and card.gain is not None
