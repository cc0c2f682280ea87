"""Weights that stay in the RAM beside a GPU: they are counted there, and too little RAM is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.errors import ConfigError
from localspec.core.speculation import Measurement
from localspec.machine.hardware import probe
from localspec.machine.memory import GIB, Room, room_for, snapshot_bytes
from localspec.machine.plan_report import machine_for, render
from localspec.machine.planner import plan
from localspec.machine.plans import PlanReport, PlanRequest
from localspec.machine.profiles import load_profiles
from localspec.machine.recommend import Snapshot, recommend
from tests.kit.fake_nvml import CUDA_BUILD, LINUX, FakeNvml

MODELS = {
    id: model
    for profile in load_profiles((SHIPPED_PROFILES,)).values()
    for id, model in profile.models.items()
}
E4B = "google/gemma-4-E4B-it"
TABLES = 2 * 262144 * 42 * 256  # bytes of E4B's


def planned(name: str, card_gib: float, ram_gib: float | None) -> PlanReport:
    ram_bytes = None if ram_gib is None else int(ram_gib * GIB)
    room = Room("cuda", int(card_gib * GIB), num_cuda_cores=5888, ram_bytes=ram_bytes)
    return plan(PlanRequest(MODELS[name], room))


def test_tables_are_counted_in_the_ram_and_not_on_the_card() -> None:
    (first, *_) = planned(E4B, 7, 8).plans
    assert first.bytes.in_ram == TABLES
    assert first.bytes.total < 7 * GIB < first.bytes.total + TABLES
    assert "Tables of 5.2 GiB stay in the RAM" in first.reason
    assert "Tables" not in planned("google/gemma-4-12B-it", 16, 8).plans[0].reason


def test_too_little_ram_for_tables_is_refused_with_the_figures() -> None:
    report = planned(E4B, 24, 5)
    assert not report.plans
    assert all(
        "keeps 5.3 GiB of its weights in the RAM, and 5.0 GiB of RAM is free" in each.reason
        for each in report.refused
        if each.drafter in ("off", "ngram")
    )


def test_where_card_and_computer_share_their_memory_tables_are_part_of_the_need() -> None:
    """Apple GPUs, and cards without memory of their own."""
    apart, shared = planned(E4B, 24, 8).plans[0], planned(E4B, 24, None).plans[0]
    copies = snapshot_bytes(MODELS[E4B].shape, 8192, "bf16")
    assert shared.bytes.total == apart.bytes.total + TABLES + copies and shared.bytes.in_ram == 0


def test_copies_of_states_and_windows_are_counted_up_to_their_bound() -> None:
    """The sizes of one copy: 147 MiB of states, 800 MiB of windows."""
    hybrid, windows = MODELS["Qwen/Qwen3.8-27B"].shape, MODELS["google/gemma-4-31B-it"].shape
    assert snapshot_bytes(hybrid, 8192, "bf16") == pytest.approx(8 * 147 * 2**20, rel=0.01)
    assert snapshot_bytes(windows, 8192, "bf16") == 4 * GIB
    assert snapshot_bytes(replace(hybrid, not_native="of a setting"), 8192, "bf16") == 0
    reason = planned("Qwen/Qwen3.8-27B", 22, 16).plans[0].reason
    assert "Up to 1.1 GiB of RAM hold earlier states of a chat, to go back to." in reason


def test_ram_is_free_for_models_but_for_a_margin() -> None:
    """The system and other programs keep a gibibyte or a share of it."""
    found = probe(FakeNvml(), replace(LINUX, ram_available_bytes=9 * GIB), CUDA_BUILD)
    assert room_for(found).ram_bytes == 9 * GIB - int(0.04 * LINUX.ram_total_bytes)
    assert room_for(replace(found, device="cpu", gpu=None)).ram_bytes is None


# -- experts ------------------------------------------------------------------------------------

OSS = "openai/gpt-oss-20b"


def test_experts_are_offered_in_the_ram_where_the_card_does_not_hold_them() -> None:
    report = planned(OSS, 8, 16)
    first = report.plans[0]
    assert all(each.experts_in_ram for each in report.plans)
    assert first.bytes.total <= 8 * GIB and first.bytes.in_ram == pytest.approx(
        9.47 * GIB, rel=0.01
    )
    assert "Its experts, 9.5 GiB, are in the RAM and computed by the processor" in first.reason
    assert "A token reads 1.2 GiB of them" in first.reason
    assert not any(each.experts_in_ram for each in planned(OSS, 16, 32).plans)


def test_a_card_and_a_ram_that_are_both_too_small_are_refused_with_both_figures() -> None:
    report = planned(OSS, 8, 6)
    assert not report.plans
    (reason,) = (each.reason for each in report.refused if each.drafter == "off")
    assert "8.0 GiB is free" in reason
    assert "With its experts in the RAM it needs 9.5 GiB there, and 6.0 GiB of RAM is" in reason


def test_a_refusal_in_more_bits_names_those_in_which_experts_fit_the_ram() -> None:
    def refused(ram_gib: float) -> str:
        report = planned("Qwen/Qwen3.6-35B-A3B", 15, ram_gib)
        return next(each.reason for each in report.refused if each.drafter == "off")

    assert refused(20).endswith("15.0 GiB is free: 4-bit with its experts in the RAM would fit.")
    assert "in the RAM it needs 16.9 GiB there, and 12.0 GiB of RAM is free." in refused(12)


def test_where_experts_are_to_be_is_followed() -> None:
    room = Room("cuda", 24 * GIB, num_cuda_cores=5888, ram_bytes=32 * GIB)
    asked = PlanRequest(MODELS[OSS], room, experts="ram")
    assert {each.experts_in_ram for each in plan(asked).plans} == {True}
    small = replace(asked, room=replace(room, free_bytes=8 * GIB), experts="gpu")
    assert not plan(small).plans
    assert {each.experts_in_ram for each in plan(replace(small, experts="auto")).plans} == {True}
    dense = replace(asked, target=MODELS[E4B])
    assert {each.experts_in_ram for each in plan(dense).plans} == {False}


def test_costs_measured_with_experts_elsewhere_are_of_no_use() -> None:
    room = Room("cuda", 8 * GIB, num_cuda_cores=5888, ram_bytes=32 * GIB)
    measured = Measurement(OSS, "bf16", {1: 50.0, 4: 60.0}, {"ngram": 0.1}, {"ngram": (0.5,)})
    for has_experts_in_ram, is_known in ((True, True), (False, False)):
        learnt = replace(measured, has_experts_in_ram=has_experts_in_ram)
        plans = plan(PlanRequest(MODELS[OSS], room, measurements=(learnt,))).plans
        ngram = next(each for each in plans if (each.drafter, each.precision) == ("ngram", "bf16"))
        assert (ngram.expected_speedup is not None) == is_known


def test_a_model_with_experts_in_the_ram_is_offered_and_not_first() -> None:
    room = Room("cuda", 7 * GIB, num_cuda_cores=5888, ram_bytes=32 * GIB)
    found = recommend(Snapshot(room, "bf16"), [MODELS[OSS], MODELS[E4B]], 8192)
    assert found.card is not None and found.card.id == E4B
    (split,) = found.larger
    assert split.plan.experts_in_ram and split.load_options().experts == "ram"


def test_a_card_says_what_a_model_needs_whose_tables_the_ram_does_not_hold() -> None:
    room = Room("cuda", 24 * GIB, num_cuda_cores=5888, ram_bytes=2 * GIB)
    (card,) = recommend(Snapshot(room, "bf16"), [MODELS[E4B]], 8192).others
    assert card.refusal is not None and "RAM" in card.refusal and card.plan.bytes.in_ram == TABLES


def test_the_ram_of_another_machine_can_be_planned_for() -> None:
    here = probe(FakeNvml(), LINUX, CUDA_BUILD)
    there = machine_for(None, (16.0,), here, ram_gib=32.0)
    assert room_for(there).ram_bytes == 32 * GIB - int(0.04 * 32 * GIB)
    text = render(PlanReport("cuda", (), ()), room_for(there))
    assert text.startswith("Planning for a GPU with 14.9 GiB free, and 30.7 GiB of RAM beside it.")
    with pytest.raises(ConfigError, match="--ram-gib"):
        machine_for(None, (16.0,), here, ram_gib=-1.0)
