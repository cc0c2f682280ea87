"""What a round costs by its width, the bytes a token reads, and how fast memory is read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.bench.cost_curve import (
    bytes_per_token,
    cost_curve,
    read_bandwidth,
    weight_bytes_read,
)
from localspec.bench.runs import BenchEngine
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.machine.shapes import shape_from_config
from tests.bench.tiny_bench import tiny_bench

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> BenchEngine:
    return tiny_bench()


@pytest.mark.slow
def test_the_curve_is_relative_to_a_plain_step_and_the_cache_is_empty_after(
    bench: BenchEngine,
) -> None:
    found = cost_curve(bench, widths=(1, 2, 4), contexts=(32, 1024))
    assert list(found["by_context"]) == ["32"], "1024 tokens do not fit a context of 256"
    curve = found["by_context"]["32"]
    assert curve["widths"] == [1, 2, 4] and curve["relative"][0] == 1.0
    assert all(ms > 0 for ms in curve["verify_ms"])
    assert bench.engine.target.cache.length == 0


@pytest.mark.slow
def test_the_curve_runs_forwards_of_the_width_it_names(
    bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, forward = list[int](), bench.engine.target.forward

    def noting(tokens: Any, *rest: Any, **named: Any) -> torch.Tensor:
        seen.append(len(tokens))
        return forward(tokens, *rest, **named)

    monkeypatch.setattr(bench.engine.target, "forward", noting)
    cost_curve(bench, widths=(1, 3, 5), contexts=(32,))
    assert seen[:5] == [32, 1, 1, 3, 5] and seen[-3:] == [1, 3, 5]


@pytest.mark.slow
def test_a_drafters_step_is_known_only_where_the_controller_measured_it(bench: BenchEngine) -> None:
    found = cost_curve(bench, widths=(1, 2), contexts=(128,))
    assert found["draft"]["draft_model"]["step_ms"] == pytest.approx(0.5)
    plain_ms = found["by_context"]["128"]["verify_ms"][0]
    assert found["draft"]["draft_model"]["relative"] == pytest.approx(0.5 / plain_ms)
    unmeasured = Controller(bench.engine.drafters, Costs(), Acceptance())
    bare = replace(bench, controller=unmeasured)
    unknown = cost_curve(bare, widths=(1, 2), contexts=(128,))["draft"]["draft_model"]
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


def test_bytes_a_token_are_known_from_the_folder_alone(bench: BenchEngine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cache = bench.engine.target.cache
    found = bytes_per_token(replace(bench, target_folder=tmp_path))
    assert found is not None
    assert found["kv_bytes_per_context_token"] == cache.kv_bytes / cache.shape.capacity
    assert found["weight_bytes"] == 4 * (100 * 8 + 8 * 8 * 4 + 3 * 8 * 16 + 3 * 8)
    assert bytes_per_token(bench) is None
    assert bytes_per_token(replace(bench, target_folder=tmp_path, precision="odd")) is None


def test_bandwidth_is_the_bytes_over_the_shortest_read() -> None:
    ticks = count()
    lengths = iter([3.0, 2.0, 0.5, *[1.0] * 100])
    at = [0.0]

    def now() -> float:
        if next(ticks) % 2:
            at[0] += next(lengths)
        return at[0]

    assert read_bandwidth(CPU, 4096, now) == pytest.approx(4096 / 0.5)


def test_without_room_for_the_array_bandwidth_is_unknown() -> None:
    assert read_bandwidth(CPU, 2**55) is None
