"""What is measured apart: the clock around forwards, host time, the cost curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.bench import measures
from localspec.bench.arms import parse_arms
from localspec.bench.cost_curve import cost_curve
from localspec.bench.measures import (
    bytes_per_token,
    extras,
    forwards_clocked,
    host_ms_of_rounds,
    host_time,
    models_of,
    own_arms,
    weight_bytes_read,
)
from localspec.bench.stage import Case, Stage
from localspec.bench.suite import BenchSettings
from localspec.machine.shapes import shape_from_config
from tests.bench.tiny_stage import tiny_stage

CASES = [Case("a", "chat", (3, 9, 14, 27, 5), 0), Case("b", "chat", (4, 4, 8, 4, 4, 8), 1)]


@pytest.fixture
def stage() -> Stage:
    return tiny_stage()


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Model:
    """A model whose forward takes two seconds, and asks another one first."""

    def __init__(self, clock: Clock, inner: Model | None = None) -> None:
        self._clock = clock
        self._inner = inner

    def forward(self, tokens: list[int]) -> int:
        if self._inner is not None:
            self._inner.forward(tokens)
        self._clock.now_s += 2.0
        return len(tokens)


def test_the_time_inside_forwards_is_counted_and_nothing_else() -> None:
    clock = Clock()
    model: Any = Model(clock)
    with forwards_clocked([model, model], clock) as spent:
        assert model.forward([1, 2, 3]) == 3
        clock.now_s += 100.0
        model.forward([1])
    assert spent.total_s == 4.0


def test_a_forward_within_a_forward_is_counted_once() -> None:
    clock = Clock()
    inner = Model(clock)
    outer: Any = Model(clock, inner)
    with forwards_clocked([outer, inner], clock) as spent:  # type: ignore[list-item]
        outer.forward([1])
    assert spent.total_s == 4.0


def test_afterwards_the_models_are_as_before_even_after_an_error() -> None:
    model: Any = Model(Clock())
    with pytest.raises(RuntimeError), forwards_clocked([model]):
        raise RuntimeError("stop")
    assert "forward" not in vars(model)
    own = vars(model)["forward"] = lambda tokens: 7
    with forwards_clocked([model]):
        assert model.forward([1]) == 7
    assert vars(model)["forward"] is own


def test_running_several_sequences_counts_as_a_forward_too() -> None:
    class Batched(Model):
        def run(self, segments: list[list[int]]) -> list[int]:
            return [self.forward(tokens) for tokens in segments]

    clock = Clock()
    model: Any = Batched(clock)
    with forwards_clocked([model], clock) as spent:
        assert model.run([[1], [2, 3]]) == [1, 2]
    assert spent.total_s == 4.0 and vars(model).keys() == {"_clock", "_inner"}


def test_every_model_that_runs_is_clocked(stage: Stage) -> None:
    draft: Any = stage.engine.drafters["draft_model"]
    assert models_of(stage) == [stage.engine.target, draft.model]


def test_host_time_leaves_out_what_the_models_take(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, target = Clock(), stage.engine.target
    quick = target.forward

    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        clock.now_s += 5.0
        return quick(*arguments, **named)

    def tick() -> float:
        clock.now_s += 0.001  # whatever the host does takes one tick
        return clock.now_s

    monkeypatch.setattr(measures, "perf_counter", tick)
    monkeypatch.setattr(target, "forward", slow)
    clocked = forwards_clocked
    monkeypatch.setattr(measures, "forwards_clocked", lambda models: clocked(models, tick))
    (arm,) = parse_arms(("off",))
    found = host_ms_of_rounds(stage, stage.controller, arm, CASES[0], 0.0, 8)
    assert len(found) == 8
    assert all(0.0 < ms < 10.0 for ms in found), "5000 ms a round were inside the forward"


def test_host_time_is_listed_by_arm_and_temperature(stage: Stage) -> None:
    arms = parse_arms(("draft_model@2", "auto"))
    found = host_time(stage, CASES, arms, (0.0, 0.7), max_tokens=8)
    names = [(each["arm"], each["temperature"]) for each in found]
    arms_in_order = ("off", "auto", "draft_model@2")
    assert names == [(arm, t) for arm in arms_in_order for t in (0.0, 0.7)]
    assert all(each["host_ms_per_round"] > 0 and each["num_rounds"] > 0 for each in found)


def test_arms_beyond_the_time_limit_stay_unmeasured(stage: Stage) -> None:
    assert host_time(stage, CASES, parse_arms(("auto",)), (0.0,), limit_s=-1.0) == []


def test_measuring_host_time_teaches_nobody(stage: Stage) -> None:
    host_time(stage, CASES, parse_arms(("draft_model@2",)), (0.0,), max_tokens=8)
    assert stage.controller.acceptance.num_rounds("draft_model", "model", 0) == 0


def test_only_arms_of_this_engine_are_measured(stage: Stage) -> None:
    names = ("off", "ngram", "transformers", "self_quant", "draft_model@3")
    assert [arm.name for arm in own_arms(stage, names)] == ["off", "ngram", "draft_model@3"]


def test_the_curve_is_relative_to_a_plain_step_and_the_cache_is_empty_after(stage: Stage) -> None:
    found = cost_curve(stage, widths=(1, 2, 4), contexts=(32, 1024))
    assert list(found["by_context"]) == ["32"], "1024 tokens do not fit a context of 256"
    curve = found["by_context"]["32"]
    assert curve["widths"] == [1, 2, 4] and curve["relative"][0] == 1.0
    assert all(ms > 0 for ms in curve["verify_ms"]) and 3 <= curve["num_cycles"] <= 9
    assert stage.engine.target.cache.length == 0


def test_the_curve_runs_forwards_of_the_width_it_names(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, forward = list[int](), stage.engine.target.forward

    def noting(tokens: Any, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append(len(tokens))
        return forward(tokens, *rest, **named)

    monkeypatch.setattr(stage.engine.target, "forward", noting)
    cost_curve(stage, widths=(1, 3, 5), contexts=(32,))
    assert seen[:4] == [32, 1, 3, 5] and seen[-3:] == [1, 3, 5]


def test_a_drafters_step_is_known_only_where_the_controller_measured_it(stage: Stage) -> None:
    found = cost_curve(stage, widths=(1, 2), contexts=(128,))
    assert found["draft"]["draft_model"]["step_ms"] == pytest.approx(0.5)
    plain_ms = found["by_context"]["128"]["verify_ms"][0]
    assert found["draft"]["draft_model"]["relative"] == pytest.approx(0.5 / plain_ms)
    stage.controller.costs._draft_step.clear()
    unknown = cost_curve(stage, widths=(1, 2), contexts=(128,))["draft"]["draft_model"]
    assert unknown == {"step_ms": None, "relative": None}


CONFIG = {
    "model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 100,
    "num_hidden_layers": 1, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip


def test_an_input_table_is_not_read_unless_it_is_the_head_too() -> None:
    tied = shape_from_config({**CONFIG, "tie_word_embeddings": True}, "tied")
    apart = shape_from_config(CONFIG, "apart")
    assert weight_bytes_read(tied, "bf16", "bf16") == tied.weight_bytes("bf16")
    assert weight_bytes_read(apart, "bf16", "bf16") == tied.weight_bytes("bf16")


def test_experts_that_rest_are_not_read() -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    shape = shape_from_config({**CONFIG, **experts, "tie_word_embeddings": True}, "mixture")
    read = weight_bytes_read(shape, "bf16", "bf16")
    assert shape.weight_bytes("bf16") - read == 2 * shape.expert_params * 6 // 8


def test_bytes_a_token_are_known_from_the_folder_alone(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cache = stage.engine.target.cache
    found = bytes_per_token(replace(stage, target_folder=tmp_path))
    assert found is not None
    assert found["kv_bytes_per_context_token"] == cache.kv_bytes / cache.shape.capacity
    assert found["weight_bytes"] == 4 * (100 * 8 + 8 * 8 * 4 + 3 * 8 * 16 + 3 * 8)
    assert bytes_per_token(stage) is None
    assert bytes_per_token(replace(stage, target_folder=tmp_path, precision="odd")) is None


def test_extras_gather_everything_as_json(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "read_bandwidth", lambda device: 1e9)
    phrases: list[str] = []
    settings = BenchSettings(max_tokens=8, temperatures=(0.0,), arms=("off", "auto"))
    found = extras(stage, CASES, settings, phrases.append)
    assert set(found) == {"costs", "host", "bandwidth_bytes_per_second", "bytes_per_token"}
    assert [each["arm"] for each in found["host"]] == ["off", "auto"] and len(phrases) == 3
    json.dumps(found, allow_nan=False)


def test_without_prompts_there_is_no_host_time(stage: Stage) -> None:
    assert host_time(stage, [], parse_arms(()), (0.0,)) == []
