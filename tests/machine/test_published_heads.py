"""Heads that were published for a model: their sizes, what is planned of them, and their price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.errors import ConfigError
from localspec.core.speculation import Measurement
from localspec.machine.catalogue import profile_models
from localspec.machine.gains import expected_gain
from localspec.machine.head_shapes import HeadShape
from localspec.machine.memory import GIB, Room
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import Plan, PlanReport, PlanRequest
from localspec.machine.profiles import load_profile, load_profiles
from localspec.machine.recommend import Card, Snapshot, card_of, recommend

PROFILES = load_profiles((SHIPPED_PROFILES,))
HEADS = {id: head for profile in PROFILES.values() for id, head in profile.heads.items()}
MODELS = {model.id: model for model in profile_models(PROFILES, [])}
GEMMA, QWEN = "google/gemma-4-12B-it", "Qwen/Qwen3.8-27B"
ASSISTANT, DFLASH2 = f"{GEMMA}-assistant", "z-lab/Qwen3.8-27B-DFlash2"
# Bytes of the files on the hub, and their names, as publishers and people who fetched them say.
PUBLISHED = {
    "google/gemma-4-E2B-it-assistant": 157e6,
    ASSISTANT: 2 * 423e6,
    DFLASH2: 2 * 1.924e9,
    "z-lab/gpt-oss-20b-DFlash": 1.46 * 2**30,
    "deepseek-ai/dspark_qwen3_4b_block7": 2.79e9,
    "deepseek-ai/dspark_qwen3_8b_block7": 4.74e9,
    "RedHatAI/Qwen3-8B-speculator.eagle3": 2_044_116_968,
    "RedHatAI/Qwen3-14B-speculator.eagle3": 2_775_244_776,
    "RedHatAI/Qwen3-32B-speculator.eagle3": 3_121_274_856,
}


def planned(id: str, gib: float, context: int = 16384, **changed: object) -> PlanReport:
    room = Room("cuda", int(gib * GIB), 24 * GIB, 5888, ram_bytes=32 * GIB)
    request = PlanRequest(MODELS[id], room, context, only_precision="4-bit")
    return plan(replace(request, **changed))  # type: ignore[arg-type]


def of_drafter(report: PlanReport, drafter: str) -> Plan:
    return next(each for each in report.plans if each.drafter == drafter)


@pytest.mark.parametrize("id", PUBLISHED)
def test_a_head_is_as_large_as_published(id: str) -> None:
    assert HEADS[id].stored_bytes == pytest.approx(PUBLISHED[id], rel=0.012)


def test_every_head_is_named_by_a_model_of_its_profile() -> None:
    for profile in PROFILES.values():
        named = {draft.id for model in profile.models.values() for draft in model.drafts}
        assert profile.heads.keys() <= named
        assert all(head.page == f"https://huggingface.co/{head.id}" for head in HEADS.values())


def test_a_head_holds_its_weights_the_states_it_reads_and_its_keys() -> None:
    head = HeadShape("block", 1000, 500, state_width=8, kv_width=3, window_kv_width=5, window=64)
    assert head.published_bytes == 2 * 1500
    assert head.held_bytes(100, 2) == (2000, 2 * 100 * (8 + 2 * 3 + 2 * 5))
    assert head.held_bytes(1000, 2)[1] == 2 * (1000 * (8 + 2 * 3) + (64 + 256) * 2 * 5)


# -- plans ----------------------------------------------------------------------------------


def test_a_head_is_planned_with_its_bytes_and_what_there_is_to_fetch() -> None:
    report = planned(GEMMA, 24)
    first, plain = report.plans[0], of_drafter(report, "off")
    assert (first.drafter, first.draft_name, first.context_length) == (
        "assistant",
        ASSISTANT,
        16384,
    )
    assert first.bytes.draft_weights == 2 * 422838272 and first.bytes.draft_kv == 0
    assert first.bytes.total == plain.bytes.total + first.bytes.draft_weights
    assert "drafts for 807 MiB" in first.reason and "846 MB to fetch" in first.reason
    block = of_drafter(report, "block")
    assert block.bytes.draft_kv == 2 * 16384 * (5 * 3840 + 2 * 5 * 512)
    as_data = first.as_dict()
    assert (as_data["drafter"], as_data["draft"]) == ("assistant", ASSISTANT)
    gain = expected_gain(first, "cuda")
    assert gain is not None and 1.0 < gain.low < gain.high < 3.0


@pytest.mark.parametrize("id", [GEMMA, "Qwen/Qwen3-8B"])
def test_a_drafter_goes_before_any_of_the_context_does(id: str) -> None:
    """Room for the whole context alone, and for a drafter beside half of it."""
    target = replace(MODELS[id], packed=None)
    plain = of_drafter(planned(id, 40, target=target), "off").bytes.total
    report = planned(id, plain / GIB + 0.6, target=target)
    assert (report.plans[0].drafter, report.plans[0].context_length) == ("ngram", 16384)
    shorter = [each for each in report.plans if each.draft is not None]
    assert shorter and all(each.context_length < 16384 for each in shorter)
    for each in shorter:
        assert f"Without {each.draft_name} 16384 would fit." in each.reason
    refused = {each.drafter: each.reason for each in report.refused}
    assert "16384 needs" in refused[shorter[0].drafter]


def test_the_module_in_a_targets_files_comes_before_a_head_that_is_to_be_fetched() -> None:
    report = planned(QWEN, 40)
    drafters = [each.drafter for each in report.plans]
    assert drafters.index("mtp") < drafters.index("block") < drafters.index("ngram")


def test_a_measured_gain_puts_a_head_first() -> None:
    flat = {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0, 16: 10.0}
    steps, accepted = {"mtp": 2.0, "block": 1.0}, {"mtp": (0.5,), "block": (0.9,)}
    measured = Measurement(QWEN, "4-bit", flat, steps, accepted)
    first = planned(QWEN, 40, measurements=(measured,)).plans[0]
    assert first.drafter == "block" and (first.expected_speedup or 0.0) > 1.0
    both = replace(MODELS[QWEN], drafts=(*MODELS[QWEN].drafts, HEADS["z-lab/gpt-oss-20b-DFlash"]))
    unknown = planned(QWEN, 40, target=both, measurements=(measured,))
    gains = {each.expected_speedup for each in unknown.plans if each.drafter == "block"}
    assert gains == {None}, "which of two heads it had is not known"


def test_a_head_of_a_target_on_transformers_forward_is_refused_by_name() -> None:
    target = MODELS[GEMMA]
    slow = replace(target, known_shape=replace(target.shape, not_native="it has a new setting"))
    report = planned(GEMMA, 40, target=slow)
    assert {"assistant", "block"}.isdisjoint(each.drafter for each in report.plans)
    reason = next(each.reason for each in report.refused if each.drafter == "assistant")
    assert ASSISTANT in reason and "because it has a new setting" in reason


# -- cards ----------------------------------------------------------------------------------


def card(id: str, gib: float, context: int = 16384, **here: bool) -> Card:
    """here: whether the target and its drafters are on this machine."""
    model = MODELS[id]
    if here:
        drafts = tuple(
            replace(each, path=Path("here")) if here.get("drafts") else each
            for each in model.drafts
        )
        model = replace(model, path=Path("here"), drafts=drafts, packed=None)
    room = Room("cuda", int(gib * GIB), int(gib * GIB), 5888, ram_bytes=32 * GIB)
    return card_of(Snapshot(room, "bf16", None), model, context)


def test_a_card_fetches_the_planned_head_and_offers_the_others() -> None:
    found = card(GEMMA, 24)
    assert [part.id for part in found.parts] == [GEMMA, ASSISTANT]
    assert found.download_bytes == sum(part.stored_bytes for part in found.parts)
    offered = {offer.model.id: offer for offer in found.offers if offer.model is not None}
    assert offered.keys() == {ASSISTANT, "deepseek-ai/dspark_gemma4_12b_block7"}
    assert offered[ASSISTANT].plan is found.plan
    assert offered[ASSISTANT].needed_bytes == 2 * 422838272
    assert found.load_options().draft == ASSISTANT


def test_the_module_in_a_targets_files_is_offered_without_a_download() -> None:
    module, head = card(QWEN, 40).offers
    assert (module.kind, module.model, module.is_here) == ("mtp", None, True)
    assert module.plan is not None and module.needed_bytes > 0
    assert head.model is not None and head.model.id == DFLASH2 and not head.is_here


def test_an_offer_says_what_it_takes_of_the_context() -> None:
    whole = card(GEMMA, 40).offers[1]
    assert whole.plan is not None and whole.plan.context_length == whole.context_without == 16384
    tight = card(GEMMA, 10.4)
    assert tight.plan.drafter == "ngram" and tight.plan.context_length == 16384
    price = tight.offers[0]
    assert price.plan is not None
    assert price.plan.context_length < price.context_without == 16384
    refused = tight.offers[1]
    assert refused.plan is None and "dspark_gemma4_12b_block7" in refused.refusal


def test_what_is_here_is_loaded_where_the_planned_drafter_is_not() -> None:
    missing = card(GEMMA, 24, target=True)
    assert missing.has_target and not missing.is_here
    assert missing.ready is not None and missing.ready.draft is None
    room = Room("cuda", 24 * GIB, 24 * GIB, 5888, ram_bytes=32 * GIB)
    listed = recommend(Snapshot(room, "bf16"), [missing.parts[0]], 16384)
    assert missing.id in {each.id for each in listed.here}, "the model itself is here"
    whole = card(GEMMA, 24, drafts=True)
    assert whole.ready is whole.plan and whole.is_here


@pytest.mark.parametrize(("gib", "full"), [(16.0, "bf16"), (16.0, "fp32"), (6.0, "fp32")])
def test_on_a_processor_a_small_model_of_the_newest_generation_comes_first(
    gib: float, full: str
) -> None:
    room = Room("cpu", int(gib * GIB), int(gib * GIB))
    found = recommend(Snapshot(room, full), list(MODELS.values()), 8192).card  # type: ignore[arg-type]
    assert found is not None and found.model.is_current and found.model.shape.is_native
    assert found.id == ("Qwen/Qwen3.5-2B" if gib > 8 else "Qwen/Qwen3.5-0.8B")
    assert found.plan.drafter == "mtp"


# -- profiles -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'kind = "blok"\nnum_params = 1',
            "no kind 'blok' of published heads. Did you mean 'block'",
        ),
        ('kind = "mtp"\nnum_params = 1', "no kind 'mtp'"),
        ("num_params = 1", "has no 'kind'"),
        ('kind = "block"', "has no 'num_params'"),
        ('kind = "block"\nnum_param = 1', "num_params"),
    ],
)
def test_a_fault_in_a_heads_table_is_named(tmp_path: Path, table: str, message: str) -> None:
    text = (SHIPPED_PROFILES / "gpt_oss.toml").read_text("utf-8").partition("# Published heads")[0]
    (tmp_path / "own.toml").write_text(f'{text}\n[heads."a/b"]\n{table}\n', "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(tmp_path / "own.toml")
    assert 'own.toml [heads."a/b"]' in str(caught.value)


def test_a_head_needs_no_shape_of_a_model() -> None:
    assert HEADS[ASSISTANT].known_shape is None
    assert Model("a/b", head=HEADS[ASSISTANT].head).stored_bytes == 2 * 422838272
