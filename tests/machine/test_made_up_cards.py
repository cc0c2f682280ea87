"""What is planned and offered first on cards that are written down: what an expert would take.

Pure, on the shipped profiles. A card is sold with a little more than its system shows, and the
desktop takes a share.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.machine.catalogue import profile_models
from localspec.machine.memory import GIB, OtherDevice, Room
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import DEFAULT_CONTEXT, PlanReport, PlanRequest
from localspec.machine.profiles import load_profiles
from localspec.machine.recommend import Snapshot, recommend
from localspec.machine.sources import find_model

PROFILES = load_profiles((SHIPPED_PROFILES,))
# What someone who runs such models takes on a card of so many GiB that draws the screen too: on
# Linux and, where the desktop takes more of it, on Windows. None: a smaller model.
Q4, Q8, Q14 = "Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B"
L8, G4, G12 = "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-4b-it", "google/gemma-3-12b-it"
PAIR, ALONE = "draft_model", "ngram"
Choice = tuple[str, str, int] | None
TAKEN: dict[tuple[int, str], tuple[Choice, Choice]] = {
    (6, Q4): (("4-bit", ALONE, 6144), ("4-bit", ALONE, 4096)),
    (6, Q8): (None, None),
    (6, Q14): (None, None),
    (6, L8): (None, None),
    (6, G4): (("4-bit", ALONE, 8192), ("4-bit", ALONE, 8192)),
    (6, G12): (None, None),
    (8, Q4): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (8, Q8): (None, None),
    (8, Q14): (None, None),
    (8, L8): (None, None),
    (8, G4): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (8, G12): (None, None),
    (12, Q4): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (12, Q8): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (12, Q14): (None, None),
    (12, L8): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (12, G4): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (12, G12): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (16, Q4): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (16, Q8): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (16, Q14): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (16, L8): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (16, G4): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (16, G12): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (24, Q4): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (24, Q8): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (24, Q14): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
    (24, L8): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (24, G4): (("bf16", PAIR, 8192), ("bf16", PAIR, 8192)),
    (24, G12): (("4-bit", PAIR, 8192), ("4-bit", PAIR, 8192)),
}
# And which older model the Models tab offers first there, under either desktop: files in 4 bits.
OFFERED = {
    6: (f"{Q4}-AWQ", f"{Q4}-AWQ"),
    8: (f"{Q4}-AWQ", f"{Q4}-AWQ"),
    12: (f"{Q8}-AWQ", f"{Q8}-AWQ"),
    16: (f"{Q14}-AWQ", f"{Q14}-AWQ"),
    24: (f"{Q14}-AWQ", f"{Q14}-AWQ"),  # 32B leaves no room for a drafter beside 8192 tokens
}
DESKTOP_GIB = (0.4, 0.8)  # on Linux, on Windows
USABLE = 0.98  # of what a card is sold with
NUM_CORES = {6: 1920, 8: 3072, 12: 5888, 16: 4352, 24: 16384}


def card_room(card_gib: int, desktop_gib: float) -> Room:
    free, total = int((USABLE * card_gib - desktop_gib) * GIB), int(USABLE * card_gib * GIB)
    cores = NUM_CORES[card_gib]
    return Room("cuda", free, total, cores, has_display=True, ram_bytes=32 * GIB)


def alone(name: str) -> Model:
    """A model without its drafts and without its copy in 4 bits."""
    return replace(find_model(name, PROFILES), drafts=(), packed=None)


@pytest.mark.parametrize("card_gib", OFFERED)
def test_the_first_plan_is_what_an_expert_takes(card_gib: int) -> None:
    for (size, model), wanted in TAKEN.items():
        if size != card_gib:
            continue
        target = find_model(model, PROFILES)
        drafts = tuple(find_model(draft.id, PROFILES) for draft in target.drafts)
        target = replace(target, drafts=drafts, packed=None)
        for choice, desktop in zip(wanted, DESKTOP_GIB, strict=True):
            report = plan(PlanRequest(target, card_room(card_gib, desktop)))
            first = report.plans[0] if report.plans else None
            found = first and (first.precision, first.drafter, first.context_length)
            usable = found if first and first.context_length >= 4096 else None
            assert usable == choice, (model, desktop, found)


def test_every_model_is_in_the_table_for_every_card() -> None:
    assert TAKEN.keys() == set(product(OFFERED, (Q4, Q8, Q14, L8, G4, G12)))


@pytest.mark.parametrize("model", [L8, Q8])
def test_a_model_that_fits_with_its_head_in_4_bits_too_is_refused_with_these_words(
    model: str,
) -> None:
    """Such a head changes the answers, so it is never planned unasked."""
    request = PlanRequest(alone(model), card_room(8, DESKTOP_GIB[0]))
    refused = [each.reason for each in plan(request).refused if each.drafter == ALONE]
    assert len(refused) == 1 and refused[0].endswith(": --dtype 4-bit-head would fit.")
    asked = plan(replace(request, only_precision="4-bit-head")).plans[0]
    assert (asked.precision, asked.context_length) == ("4-bit-head", DEFAULT_CONTEXT)


@pytest.mark.parametrize(("card_gib", "model"), [(8, L8), (8, Q8), (12, Q14)])
def test_files_in_4_bits_fit_a_card_for_which_the_model_is_too_large_otherwise(
    card_gib: int, model: str
) -> None:
    """What AWQ keeps in groups of 128 never stands on the card in full precision."""
    target = alone(model)
    packed = replace(target, known_shape=replace(target.shape, group_size=128))
    for desktop in DESKTOP_GIB:
        request = PlanRequest(packed, card_room(card_gib, desktop), only_precision="4-bit-head")
        assert plan(request).plans[0].context_length >= 4096, desktop


def test_of_fewer_bits_every_context_that_fits_is_named() -> None:
    request = PlanRequest(alone(Q8), Room("cuda", int(7.9 * GIB)), 16384)
    (refused,) = (each.reason for each in plan(request).refused if each.drafter == ALONE)
    assert refused.endswith(
        "4-bit at context 1024 or --dtype 4-bit-head at context 12288 would fit."
    )


@pytest.mark.slow
@pytest.mark.parametrize("card_gib", OFFERED)
def test_the_first_offer_of_older_models_is_what_an_expert_takes(card_gib: int) -> None:
    models = [model for model in profile_models(PROFILES, []) if not model.is_current]
    for desktop, wanted in zip(DESKTOP_GIB, OFFERED[card_gib], strict=True):
        snapshot = Snapshot(card_room(card_gib, desktop), "bf16")
        offered = recommend(snapshot, models, DEFAULT_CONTEXT).card
        assert offered is not None and offered.id == wanted, desktop


# -- two cards ------------------------------------------------------------------------------


def second_card(free_gib: float, is_asked: bool = False) -> OtherDevice:
    return OtherDevice("cuda:1", Room("cuda", int(free_gib * GIB)), "bf16", is_asked)


def planned_on(first_gib: float, other: OtherDevice | None) -> PlanReport:
    target = replace(alone(Q8), drafts=(find_model("Qwen/Qwen3-0.6B", PROFILES),))
    return plan(PlanRequest(target, Room("cuda", int(first_gib * GIB)), other=other))


def test_both_are_on_one_card_where_they_fit_there() -> None:
    first, *others = planned_on(24, second_card(8)).plans
    assert (first.precision, first.draft_device, first.draft_bytes) == ("bf16", None, None)
    assert "they take turns" in first.reason and "cuda:1 stays free" in first.reason
    assert all(each.draft_device is None for each in others)


def test_the_draft_is_on_the_other_card_where_that_keeps_more_of_the_target() -> None:
    alone, beside = planned_on(19, None).plans[0], planned_on(19, second_card(8)).plans[0]
    assert alone.precision == "4-bit"
    found = (beside.precision, beside.drafter, beside.context_length, beside.draft_device)
    assert found == ("bf16", PAIR, 8192, "cuda:1")
    assert "beside the target in bf16 it" in beside.reason and "token ids" in beside.reason
    assert beside.bytes.draft_weights == beside.bytes.draft_kv == 0
    assert beside.draft_bytes is not None and beside.draft_bytes.total <= 8 * GIB
    pair = planned_on(24, None).plans[0]
    assert beside.draft_weights == pair.draft_weights == pair.bytes.draft_weights


def test_a_draft_that_the_other_card_cannot_hold_is_refused_with_the_figures() -> None:
    report = planned_on(19, second_card(2))
    assert report.plans[0].precision == "4-bit" and report.plans[0].draft_device is None
    assert any("on cuda:1, 2.0 GiB is free there" in each.reason for each in report.refused)


def test_what_the_target_would_fit_in_is_said_of_a_draft_on_the_other_card_too() -> None:
    """There is no arrangement for it: in 4 bits both are on one card."""
    refused = [each.reason for each in planned_on(16, second_card(12)).refused]
    assert any("bf16 with draft Qwen/Qwen3-0.6B on cuda:1" in each for each in refused)
    pairs = [each for each in refused if "with draft" in each]
    assert all(each.endswith("4-bit would fit.") for each in pairs)


def test_a_draft_that_is_asked_for_elsewhere_is_planned_only_there_and_loaded_there() -> None:
    asked = second_card(8, is_asked=True)
    pairs = [each for each in planned_on(24, asked).plans if each.drafter == PAIR]
    assert pairs and all(each.draft_device == "cuda:1" for each in pairs)
    snapshot = Snapshot(Room("cuda", 19 * GIB), "bf16", other=second_card(8))
    models = [each for each in profile_models(PROFILES, []) if each.id == Q8]
    card = recommend(snapshot, models, DEFAULT_CONTEXT).card
    assert card is not None and card.gain is not None
    options = card.load_options()
    assert (options.dtype, options.draft_device) == ("bfloat16", "cuda:1")
