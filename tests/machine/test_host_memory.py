"""Weights that stay in the RAM beside a GPU: they are counted there, and too little RAM is said."""

from __future__ import annotations

from dataclasses import replace

from localspec.core.config import SHIPPED_PROFILES
from localspec.machine.hardware import probe
from localspec.machine.memory import GIB, Room, room_for
from localspec.machine.planner import plan
from localspec.machine.plans import PlanReport, PlanRequest
from localspec.machine.profiles import load_profiles
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
    assert "RAM" not in planned("google/gemma-4-12B-it", 16, 8).plans[0].reason


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
    assert shared.bytes.total == apart.bytes.total + TABLES and shared.bytes.in_ram == 0


def test_ram_is_free_for_models_but_for_a_margin() -> None:
    """The system and other programs keep a gibibyte or a share of it."""
    found = probe(FakeNvml(), replace(LINUX, ram_available_bytes=9 * GIB), CUDA_BUILD)
    assert room_for(found).ram_bytes == 9 * GIB - int(0.04 * LINUX.ram_total_bytes)
    assert room_for(replace(found, device="cpu", gpu=None)).ram_bytes is None
