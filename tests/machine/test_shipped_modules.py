"""The module for multi-token prediction in a target's files: what it takes, and when it goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.machine.gains import expected_gain
from localspec.machine.memory import GIB, Arrangement, Room, bytes_of
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import PlanReport, PlanRequest
from localspec.machine.profiles import load_profiles

MODELS = {
    id: model
    for profile in load_profiles((SHIPPED_PROFILES,)).values()
    for id, model in profile.models.items()
}
QWEN = "Qwen/Qwen3.8-27B"


def planned(free_bytes: int, target: Model = MODELS[QWEN], context: int = 16384) -> PlanReport:
    room = Room("cuda", free_bytes, num_cuda_cores=5888)
    only = PlanRequest(target, room, context, only_precision="4-bit")
    return plan(only)


def needed(drafter: str, context: int) -> int:
    arrangement = Arrangement(MODELS[QWEN], "4-bit", context, drafter=drafter)
    return bytes_of(arrangement, Room("cuda", 24 * GIB, num_cuda_cores=5888)).total


@pytest.mark.parametrize(
    ("id", "kib"),
    [("Qwen/Qwen3.5-4B", 4), ("Qwen/Qwen3.5-9B", 4), (QWEN, 4), ("Qwen/Qwen3.6-35B-A3B", 2)],
)
def test_a_published_module_keeps_so_much_of_each_token(id: str, kib: int) -> None:
    shape = MODELS[id].shape
    assert shape.mtp is not None and shape.mtp.kv_bytes_per_token() == kib * 1024
    without = replace(shape, mtp=None)
    assert shape.weight_bytes("bf16") == without.weight_bytes("bf16"), "no part of the target"
    assert shape.published_bytes > shape.weight_bytes("bf16"), "but fetched with it"


def test_it_is_preferred_where_it_fits_and_its_bytes_are_counted() -> None:
    first, *others = planned(24 * GIB).plans
    assert (first.drafter, first.context_length) == ("mtp", 16384)
    assert "drafts for" in first.reason and "no further download" in first.reason
    plain = next(each for each in others if each.drafter == "off")
    assert plain.bytes.draft_weights == plain.bytes.draft_kv == 0
    states = 16384 * 5120 * 2  # of the target, which it reads
    assert first.bytes.draft_kv == 16384 * 4096 + states
    assert first.bytes.total == plain.bytes.total + first.bytes.draft_weights + first.bytes.draft_kv
    gain = expected_gain(first, "cuda")
    assert gain is not None and 1.0 < gain.low < gain.high < 3.0


def test_the_module_goes_before_any_of_the_context_does() -> None:
    report = planned(needed("off", 16384))
    first = report.plans[0]
    assert (first.drafter, first.context_length) == ("ngram", 16384)
    shorter = next(each for each in report.plans if each.drafter == "mtp")
    assert shorter.context_length == 8192
    assert "cut to 8192 of 16384 tokens to fit. Without the module 16384 would" in shorter.reason
    refused = next(each.reason for each in report.refused if each.drafter == "mtp")
    assert "with its module for multi-token prediction at context 16384 needs" in refused


def test_it_is_not_planned_where_it_cannot_run() -> None:
    target = MODELS[QWEN]
    slow = replace(target, known_shape=replace(target.shape, not_native="it has a new setting"))
    without = replace(target, known_shape=replace(target.shape, mtp=None))
    for model, said in (
        (slow, "because it has a new setting"),
        (without, "No module"),
    ):
        report = planned(24 * GIB, model)
        assert all(each.drafter != "mtp" for each in report.plans)
        assert said in next(each.reason for each in report.refused if each.drafter == "mtp")
