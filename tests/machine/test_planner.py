"""What fits into 4 to 24 GiB and into none, in which order, and what is said of the rest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.draft_window import DRAFT_CONTEXT
from localspec.core.speculation import Measurement
from localspec.machine.compatibility import Compatibility
from localspec.machine.memory import (
    GIB,
    MIB,
    Arrangement,
    Room,
    Shortage,
    bytes_of,
    longest_fitting,
    shortage_of,
)
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import Plan, PlanReport, PlanRequest
from localspec.machine.profiles import load_profiles

MODELS = {
    entry.id: entry
    for profile in load_profiles((SHIPPED_PROFILES,)).values()
    for entry in profile.models.values()
    if entry.path is None
}
PAIRS = {
    "Qwen/Qwen3-8B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-4B": "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-7B-Instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Llama-3.2-1B-Instruct",
}
SAME_TOKENS = Compatibility(True, "all tokens have the same id in both")
FLAT = {1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0, 16: 10.0}


def gpu(free_gib: float) -> Room:
    return Room("cuda", int(free_gib * GIB), num_cuda_cores=5888)


def request(target: str, room: Room, context: int | None = 4096) -> PlanRequest:
    return PlanRequest(with_draft(target, PAIRS[target]), room, context)


def with_draft(target: str, draft: str) -> Model:
    """A model, never its copy in 4 bits, with one draft of the same tokens."""
    drafts = (replace(MODELS[draft], compatibility=SAME_TOKENS),)
    return replace(MODELS[target], drafts=drafts, packed=None)


def arms(report: PlanReport) -> set[tuple[str, str]]:
    return {(each.precision, each.drafter) for each in report.plans}


def first(report: PlanReport, precision: str = "bf16") -> Plan:
    return next(each for each in report.plans if each.precision == precision)


# -- sizes of memory ------------------------------------------------------------------------


@pytest.mark.parametrize("target", PAIRS)
@pytest.mark.parametrize("free_gib", [0, 4, 6, 8, 12, 16, 24])
def test_every_plan_fits_and_every_drafter_is_planned_or_refused(
    target: str, free_gib: int
) -> None:
    report = plan(request(target, gpu(free_gib)))
    for each in report.plans:
        assert each.bytes.total <= free_gib * GIB
        assert each.expected_speedup is None
        assert each.reason
    drafters = {each.drafter for each in (*report.plans, *report.refused)}
    assert drafters == {"draft_model", "mtp", "self_quant", "ngram", "off"}


@pytest.mark.parametrize(
    ("free_gib", "precisions"),
    [(4, []), (6, []), (8, ["4-bit"]), (12, ["4-bit"]), (24, ["bf16", "4-bit"])],
)
def test_precisions_of_llama_8b_by_memory(free_gib: int, precisions: list[str]) -> None:
    report = plan(request("meta-llama/Llama-3.1-8B-Instruct", gpu(free_gib)))
    assert [each.precision for each in report.plans if each.drafter == "off"] == precisions


def test_8_bit_is_planned_only_where_it_is_asked_for() -> None:
    """It is slower than 4-bit on a GPU and on a processor."""
    on_cpu = plan(request("Qwen/Qwen3-4B", Room("cpu", 20 * GIB, 32 * GIB)))
    assert {each.precision for each in on_cpu.plans} == {"bf16", "4-bit"}
    asked = replace(request("Qwen/Qwen3-8B", gpu(24)), only_precision="8-bit")
    assert {each.precision for each in plan(asked).plans} == {"8-bit"}


def test_more_memory_never_takes_a_plan_away() -> None:
    sizes = (4, 6, 8, 12, 16, 24)
    for target in PAIRS:
        found = [arms(plan(request(target, gpu(size)))) for size in sizes]
        assert all(less <= more for less, more in itertools.pairwise(found))
        assert found[0] < found[-1]


def test_a_computer_without_a_gpu_plans_for_its_ram() -> None:
    report = plan(request("Qwen/Qwen3-4B", Room("cpu", 20 * GIB, 32 * GIB)))
    assert report.device == "cpu" and first(report).drafter == "draft_model"
    assert {each.bytes.runtime for each in report.plans} == {400 * MIB}  # no CUDA context
    assert min(each.bytes.margin for each in report.plans) >= GIB


def test_apple_gpus_are_planned_without_bitsandbytes() -> None:
    room = Room("mps", 24 * GIB)
    report = plan(replace(request("Qwen/Qwen3-4B", room), full="fp16"))
    assert arms(report) == {("fp16", "draft_model"), ("fp16", "ngram"), ("fp16", "off")}
    assert any(each.drafter == "self_quant" for each in report.refused)


# -- bytes ----------------------------------------------------------------------------------


def test_the_parts_of_llama_8b_with_a_1b_draft() -> None:
    target = MODELS["meta-llama/Llama-3.1-8B-Instruct"]
    draft = MODELS["meta-llama/Llama-3.2-1B-Instruct"]
    needed = bytes_of(Arrangement(target, "bf16", 8192, draft=draft), gpu(24))
    angle = 4  # a cosine and a sine, of 2 bytes each, for every number of a head
    assert needed.target_weights == 2 * 8_030_261_248 + 128 * 8192 * angle
    assert needed.draft_weights == 2 * 1_235_814_400 + 64 * DRAFT_CONTEXT * angle
    assert needed.target_kv == 8192 * 128 * 1024 == GIB
    assert needed.draft_kv == DRAFT_CONTEXT * 32 * 1024 == 96 * MIB
    assert needed.logits == 16 * 128_256 * 4 * 6
    assert needed.margin == int(0.04 * 24 * GIB)
    parts = needed.as_dict()
    assert parts.pop("total") == sum(parts.values()) == needed.total


def test_a_self_draft_shares_the_cache_and_the_embedding() -> None:
    target = MODELS["Qwen/Qwen3-8B"]
    plain = bytes_of(Arrangement(target, "bf16", 8192), gpu(24))
    doubled = bytes_of(Arrangement(target, "bf16", 8192, self_draft="4-bit"), gpu(24))
    assert doubled.draft_kv == 0 and doubled.target_kv == plain.target_kv
    shape = target.shape
    nf4 = 0.5625 * (shape.linear_params + shape.vocab_size * shape.hidden_size)
    assert nf4 <= doubled.draft_weights < 1.001 * nf4


def test_a_load_needs_room_for_weights_and_caches_and_for_no_estimate() -> None:
    pair = Arrangement(MODELS["Qwen/Qwen3-8B"], "bf16", 8192, draft=MODELS["Qwen/Qwen3-0.6B"])
    planned = bytes_of(pair, gpu(24))
    held = (planned.target_weights, planned.draft_weights, planned.target_kv, planned.draft_kv)
    room = replace(gpu(0), free_bytes=sum(held), is_loading=True)
    assert bytes_of(pair, room).total == sum(held) < planned.total
    assert shortage_of(pair, room) is None and longest_fitting(pair, room) == pair
    less = replace(room, free_bytes=sum(held) - 1)
    assert shortage_of(pair, less) == Shortage(sum(held), sum(held) - 1)
    shorter = longest_fitting(pair, less)
    assert shorter is not None and shorter.context_length == 6144
    assert shortage_of(pair, replace(room, is_loading=False)) is not None


def test_a_display_and_windows_keep_a_larger_margin() -> None:
    assert Room("cuda", 8 * GIB).margin_bytes == 512 * MIB
    assert Room("cuda", 8 * GIB, has_display=True).margin_bytes == GIB
    assert Room("cuda", 20 * GIB, 24 * GIB).margin_bytes == int(0.04 * 24 * GIB)


def test_a_larger_gpu_has_a_larger_cuda_context() -> None:
    assert Room("cuda", GIB, num_cuda_cores=4352).runtime_bytes == 107 * MIB
    assert Room("cuda", GIB, num_cuda_cores=24064).runtime_bytes == 555 * MIB
    assert Room("cuda", GIB, num_cuda_cores=None).runtime_bytes == 555 * MIB
    assert Room("cuda", GIB, num_cuda_cores=1024).runtime_bytes == 107 * MIB


# -- refusals -------------------------------------------------------------------------------


def refusals(report: PlanReport, drafter: str) -> list[str]:
    return [each.reason for each in report.refused if each.drafter == drafter]


def test_a_refusal_gives_need_free_memory_and_what_would_fit() -> None:
    report = plan(request("Qwen/Qwen3-8B", gpu(22), context=32768))
    (reason,) = refusals(report, "draft_model")
    needed = bytes_of(
        Arrangement(MODELS["Qwen/Qwen3-8B"], "bf16", 32768, draft=MODELS["Qwen/Qwen3-0.6B"]),
        gpu(22),
    ).total
    shown = float(reason.split("needs ")[1].split(" GiB")[0])
    assert needed / GIB <= shown < needed / GIB + 0.1001
    assert "22.0 GiB is free: context 24576 or 4-bit would fit." in reason


def test_the_remedy_of_a_refusal_really_fits() -> None:
    for free_gib in (8, 12, 16, 22):
        asked = request("Qwen/Qwen3-8B", gpu(free_gib), context=32768)
        for reason in refusals(plan(asked), "off"):
            remedy = reason.rpartition(": ")[2]
            if "context " in remedy and "would fit" in remedy:
                context = int(remedy.split("context ")[1].split()[0])
                kept = "bf16" if remedy.startswith("context") else remedy.split()[0]
                again = plan(replace(asked, context_length=context))
                plain = [each for each in again.plans if each.drafter == "off"]
                assert (kept, context) in {(each.precision, each.context_length) for each in plain}


def test_when_nothing_fits_the_least_need_is_named() -> None:
    report = plan(request("Qwen/Qwen3-8B", gpu(4)))
    assert report.plans == ()
    (reason,) = refusals(report, "off")
    assert "even 4-bit-head at context 1024 needs" in reason and "smaller model" in reason


def test_a_draft_with_other_tokens_is_refused_with_the_reason() -> None:
    other = Compatibility(False, "the token 'a' has id 3 in the target and 4 in the draft")
    asked = request("Qwen/Qwen3-8B", gpu(24))
    drafts = (replace(asked.target.drafts[0], compatibility=other),)
    asked = replace(asked, target=replace(asked.target, drafts=drafts))
    report = plan(asked)
    assert "draft_model" not in {each.drafter for each in report.plans}
    assert "'a' has id 3" in refusals(report, "draft_model")[0]


def test_an_unchecked_draft_says_so() -> None:
    asked = request("Qwen/Qwen3-8B", gpu(24))
    unknown = replace(asked.target, drafts=(MODELS["Qwen/Qwen3-0.6B"],))
    report = plan(replace(asked, target=unknown))
    (found,) = [
        each for each in report.plans if (each.precision, each.drafter) == ("bf16", "draft_model")
    ]
    assert "its vocabulary is checked after download" in found.reason


def test_a_draft_as_large_as_its_target_is_refused() -> None:
    asked = request("Qwen/Qwen3-8B", gpu(80))
    same = with_draft("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")
    assert "not smaller" in refusals(plan(replace(asked, target=same)), "draft_model")[0]


def test_a_draft_takes_no_more_memory_for_a_longer_context() -> None:
    """It reads the first tokens and the latest, also beyond the context that it was made for."""
    target = with_draft("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-0.6B")
    sizes = [
        each.bytes.draft_kv
        for context in (4096, 65536)
        for each in plan(PlanRequest(target, gpu(80), context)).plans
        if (each.precision, each.drafter) == ("bf16", "draft_model")
    ]
    assert len(sizes) == 2 and sizes[0] == sizes[1] > 0


def test_a_draft_beyond_a_tenth_of_its_target_says_so() -> None:
    small = plan(request("Qwen/Qwen3-8B", gpu(24)))  # 0.6 of 8.2 billion
    large = plan(request("meta-llama/Llama-3.2-3B-Instruct", gpu(24)))  # 1.2 of 3.2 billion
    assert "beyond a tenth" not in first(small).reason
    assert first(large).draft_name == "meta-llama/Llama-3.2-1B-Instruct"
    assert "38% of its target's 3.2 billion: beyond a tenth" in first(large).reason


def test_a_model_without_a_known_draft_says_how_to_name_one() -> None:
    asked = request("Qwen/Qwen3-8B", gpu(24))
    asked = replace(asked, target=replace(asked.target, drafts=()))
    assert "--draft" in refusals(plan(asked), "draft_model")[0]


def test_a_mixture_of_experts_counts_all_of_them_in_every_precision() -> None:
    target = MODELS["Qwen/Qwen3-30B-A3B"]
    report = plan(PlanRequest(replace(target, drafts=()), gpu(80), 4096))
    weights = {each.precision: each.bytes.target_weights for each in report.plans}
    assert weights.keys() == {"bf16", "4-bit"}
    num_params, tables = target.shape.num_params, 4096 * 128 * 4
    assert weights["bf16"] == 2 * num_params + tables > 60e9
    in_4_bits = target.shape.linear_params + target.shape.expert_params
    in_full = 2 * (num_params - in_4_bits) + tables
    assert weights["4-bit"] == pytest.approx(in_full + 0.5625 * in_4_bits, rel=0.001)
    assert "every expert" in refusals(report, "self_quant")[0]


def test_a_quantised_target_alone_leaves_no_self_draft() -> None:
    asked = replace(request("Qwen/Qwen3-8B", gpu(24)), only_precision="4-bit")
    report = plan(asked)
    assert {each.precision for each in report.plans} == {"4-bit"}
    assert "quantised target itself" in refusals(report, "self_quant")[0]


# -- concessions and order ------------------------------------------------------------------


def test_a_shortened_context_is_said() -> None:
    report = plan(request("Qwen/Qwen3-8B", gpu(24), context=32768))
    short = [each for each in report.plans if each.context_length < 32768]
    assert short
    assert all(f"cut to {each.context_length} of 32768" in each.reason for each in short)


def test_a_context_beyond_the_models_own_is_said() -> None:
    report = plan(request("Qwen/Qwen3-4B", gpu(80), context=100_000))
    assert {each.context_length for each in report.plans} == {40960}
    assert "40960 tokens, not the 100000 asked" in report.plans[0].reason


def test_a_pair_comes_first_then_precision_then_context() -> None:
    def order(free_gib: float) -> list[tuple[str, int, str]]:
        report = plan(request("Qwen/Qwen3-8B", gpu(free_gib), context=32768))
        return [(each.precision, each.context_length, each.drafter) for each in report.plans]

    first = order(22)[0]
    assert first == ("4-bit", 32768, "draft_model"), "in bf16 it would take some of the context"
    plans = order(24)
    assert plans[0] == ("bf16", 32768, "draft_model")
    assert plans.index(("bf16", 32768, "off")) < plans.index(("bf16", 16384, "self_quant"))
    assert plans.index(("bf16", 16384, "self_quant")) < plans.index(("4-bit", 32768, "off"))


def test_less_than_half_the_context_comes_after_lower_precision() -> None:
    report = plan(request("Qwen/Qwen3-8B", gpu(18), context=32768))
    contexts = [each.context_length for each in report.plans]
    precisions = [each.precision for each in report.plans]
    assert precisions.index("4-bit") < precisions.index("bf16")
    assert contexts[0] >= 16384 > contexts[precisions.index("bf16")]
    halves = [context >= 16384 for context in contexts]
    assert halves == sorted(halves, reverse=True)


# -- measured gains -------------------------------------------------------------------------


def gains(draft_step_ms: float, acceptance: float, ngram: float = 0.3) -> Measurement:
    return Measurement(
        "Qwen/Qwen3-8B",
        "bf16",
        FLAT,
        {"draft_model": draft_step_ms, "ngram": 0.1, "self_quant": 6.0},
        {"draft_model": (acceptance,), "ngram": (ngram,), "self_quant": (0.9,)},
        draft="Qwen/Qwen3-0.6B",
    )


def planned(measurement: Measurement) -> dict[str, Plan]:
    report = plan(replace(request("Qwen/Qwen3-8B", gpu(40)), measurements=(measurement,)))
    return {each.drafter: each for each in report.plans if each.precision == "bf16"}


def test_planted_costs_move_the_expected_speedup() -> None:
    cheap, costly = planned(gains(1.0, 0.8)), planned(gains(7.0, 0.8))
    value = cheap["draft_model"].expected_speedup
    other = costly["draft_model"].expected_speedup
    best = max(((1 - 0.8 ** (n + 1)) / 0.2) / (1 + 0.1 * n) for n in range(1, 16))
    assert value == pytest.approx(best)
    assert other is not None and other < 1.2 < best
    assert cheap["off"].expected_speedup == 1.0


def test_planted_acceptance_moves_the_ranking() -> None:
    assert next(iter(planned(gains(1.0, 0.8, ngram=0.3)))) == "draft_model"
    assert next(iter(planned(gains(1.0, 0.3, ngram=0.9)))) == "ngram"


def test_a_drafter_measured_to_lose_ranks_below_off_and_says_why() -> None:
    found = planned(gains(9.0, 0.4))
    order = list(found)
    assert order.index("off") < order.index("draft_model")
    assert "off is faster" in found["draft_model"].reason


def test_planted_costs_can_put_self_quant_first() -> None:
    cheap_copy = replace(gains(9.0, 0.4), draft_step_ms={"self_quant": 2.0, "ngram": 0.1})
    assert next(iter(planned(cheap_copy))) == "self_quant"
    slow_copy = planned(gains(1.0, 0.8))["self_quant"].expected_speedup
    fast_copy = planned(cheap_copy)["self_quant"].expected_speedup
    assert slow_copy is not None and fast_copy is not None and slow_copy < fast_copy


def test_costs_of_another_model_draft_or_precision_say_nothing() -> None:
    measured = gains(1.0, 0.8)
    for other in (
        replace(measured, target="Qwen/Qwen3-4B"),
        replace(measured, precision="4-bit"),
    ):
        assert {each.expected_speedup for each in planned(other).values()} == {None}
    foreign = planned(replace(measured, draft="Qwen/Qwen3-1.7B"))
    assert foreign["draft_model"].expected_speedup is None
    assert foreign["ngram"].expected_speedup is not None


def test_the_report_has_exactly_the_agreed_keys() -> None:
    report = plan(request("Qwen/Qwen3-8B", gpu(24))).as_dict()
    assert list(report) == ["device", "plans", "refused"]
    assert list(report["plans"][0]) == [
        "target", "precision", "drafter", "draft", "draft_device", "experts_in_ram", "context",
        "bytes", "draft_bytes", "further_reply_bytes", "fits", "expected_speedup", "reason",
    ]  # fmt: skip
    assert {"total", "in_ram"} <= report["plans"][0]["bytes"].keys()
    report = plan(request("Qwen/Qwen3-8B", gpu(4))).as_dict()
    assert all(list(each) == ["drafter", "reason"] for each in report["refused"])


def test_a_model_that_is_not_native_says_why_in_each_plan() -> None:
    asked = request("Qwen/Qwen3-4B", gpu(12))
    shape = replace(asked.target.shape, not_native="it has attention sinks")
    target = replace(asked.target, known_shape=shape)
    told = "Qwen3-4B runs on transformers' own forward, which is slower, because it has attention"
    reasons = [each.reason for each in plan(replace(asked, target=target)).plans]
    assert len(reasons) > 3 and all(told in reason for reason in reasons)
    assert not any("transformers" in each.reason for each in plan(asked).plans)
