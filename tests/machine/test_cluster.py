"""What is written for vLLM and SGLang: how a model is divided, with which flags, and why."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from localspec.cli.cluster import run
from localspec.core.errors import ConfigError, MemoryShortage, SetupError
from localspec.machine import hardware
from localspec.machine.cluster import (
    ClusterCommand,
    GpuLayout,
    Wanted,
    command_for,
    layout_for,
)
from localspec.machine.hardware import probe
from localspec.machine.model import Model
from localspec.machine.nvml import Gpu
from localspec.machine.shapes import ModelShape
from tests.kit.command_line import invoke
from tests.kit.fake_nvml import CPU_BUILD, GIB, LINUX, FakeNvml


def shape(layers: int, hidden: int, heads: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        family="llama", num_layers=layers, hidden_size=hidden, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=128, intermediate_size=4 * hidden, vocab_size=128_000,
        context_length=131_072, is_tied=False,
    )  # fmt: skip


BIG = Model("org/big", "big", known_shape=shape(64, 8192, 64, 8))  # about 70 billion parameters
SMALL = Model("org/small", "small", known_shape=shape(16, 2048, 16, 8))


def gpu(number: int, free_gib: float, total_gib: float = 80.0) -> Gpu:
    return Gpu(
        name=f"GPU {number}", uuid=f"GPU-{number}", pci_bus_id=None,
        total_bytes=int(total_gib * GIB), free_bytes=int(free_gib * GIB), driver="580",
        num_cuda_cores=None, has_display=False,
    )  # fmt: skip


def wanted(**more: Any) -> Wanted:
    usual = {
        "program": "vllm", "target": BIG, "method": "draft_model", "drafter": SMALL,
        "num_draft_tokens": 4, "context_length": 8192,
    }  # fmt: skip
    return Wanted(**{**usual, **more})


def after(made: ClusterCommand, flag: str) -> str:
    return made.arguments[made.arguments.index(flag) + 1]


def test_as_few_gpus_as_hold_it_and_those_with_most_room() -> None:
    gpus = [gpu(0, 10), *(gpu(number, 78) for number in (1, 2, 3))]
    layout = layout_for(wanted(), gpus)
    assert [one.uuid for one in layout.gpus] == ["GPU-1", "GPU-2"]
    assert (layout.tensor_parallel, layout.pipeline_parallel) == (2, 1)
    assert layout.memory_share == 0.95


def test_heads_that_do_not_divide_are_split_by_layers() -> None:
    odd = Model("odd", known_shape=shape(64, 8192, 63, 7))
    layout = layout_for(wanted(target=odd), [gpu(number, 78) for number in range(2)])
    assert (layout.tensor_parallel, layout.pipeline_parallel) == (1, 2)


def test_what_fits_nowhere_says_how_much_there_is() -> None:
    with pytest.raises(MemoryShortage, match="GiB free together"):
        layout_for(wanted(), [gpu(0, 10.2, 12), gpu(1, 10.2, 12)])


def test_vllm_gets_the_draft_split_as_its_target_and_a_head_alone() -> None:
    gpus = [gpu(number, 78) for number in range(2)]
    with_draft = command_for(wanted(), gpus)
    assert with_draft.environment == {"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    assert json.loads(after(with_draft, "--speculative-config")) == {
        "method": "draft_model",
        "model": "org/small",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 2,
    }
    assert after(with_draft, "--tensor-parallel-size") == "2"
    assert after(with_draft, "--gpu-memory-utilization") == "0.95"
    with_head = command_for(wanted(method="eagle3"), gpus)
    told = json.loads(after(with_head, "--speculative-config"))
    assert (told["method"], told["draft_tensor_parallel_size"]) == ("eagle3", 1)
    assert any("one GPU" in note for note in with_head.notes)


def test_ngram_and_off_name_no_draft() -> None:
    ngram = command_for(
        wanted(method="ngram", drafter=None, num_draft_tokens=5), [gpu(0, 178, 180)]
    )
    told = json.loads(after(ngram, "--speculative-config"))
    assert told["method"] == "ngram"
    assert told["num_speculative_tokens"] == 5
    off = wanted(method="off", drafter=None, num_draft_tokens=0)
    plain = command_for(off, [gpu(0, 178, 180)])
    assert "--speculative-config" not in plain.arguments
    with pytest.raises(ConfigError, match="--draft"):
        wanted(drafter=None)
    with pytest.raises(ConfigError, match="Leave --draft out"):
        wanted(method="ngram")
    with pytest.raises(ConfigError, match="Leave --num-draft-tokens out"):
        replace(off, num_draft_tokens=5)


def test_sglang_gets_its_own_words() -> None:
    made = command_for(wanted(program="sglang"), [gpu(number, 78) for number in range(2)])
    assert after(made, "--speculative-algorithm") == "STANDALONE"
    assert after(made, "--speculative-num-steps") == "4"
    assert after(made, "--speculative-num-draft-tokens") == "5"
    assert after(made, "--tp-size") == "2"
    assert after(made, "--mem-fraction-static") == "0.87"
    assert "sglang.launch_server" in made.line
    with pytest.raises(ConfigError, match="--program vllm"):
        command_for(wanted(program="sglang"), [])


def test_without_a_gpu_it_runs_on_the_processor_with_room_for_its_caches() -> None:
    made = command_for(wanted(target=SMALL, method="ngram", drafter=None), [])
    assert made.environment == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert "--tensor-parallel-size" not in made.arguments
    assert "No GPU" in made.notes[0]


@pytest.mark.parametrize(
    ("multiplies_bf16", "asked", "written"),
    [(True, [], "bfloat16"), (False, [], "float32"), (False, ["--dtype", "bf16"], "bfloat16")],
)
def test_the_precision_is_what_the_machine_computes_in_unless_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, multiplies_bf16: bool, asked: list[str], written: str
) -> None:
    host = replace(LINUX, multiplies_bf16=multiplies_bf16)
    there = probe(FakeNvml(failing={"nvmlInit": 12}), host, CPU_BUILD)
    monkeypatch.setattr(hardware, "probe", lambda: there)
    shown = invoke("cluster", "--model", "localspec/demo", "--json", *asked)
    assert shown.exit_code == 0, shown
    command = json.loads(shown.lines[-1])["command"]
    assert command[command.index("--dtype") + 1] == written


def test_a_draft_for_a_method_that_has_none_is_refused() -> None:
    """It was passed over without a word."""
    words = ["cluster", "--model", "localspec/demo", "--draft", "localspec/demo"]
    refused = invoke(*words, "--method", "ngram")
    assert isinstance(refused.error, ConfigError)
    assert "Leave --draft out" in str(refused.error)


def test_a_program_that_does_not_start_is_explained() -> None:
    made = ClusterCommand((sys.executable, "-c", "exit(7)"), {}, "http://127.0.0.1:9", GpuLayout())
    with pytest.raises(SetupError, match="exit code 7"):
        run(made)
    with pytest.raises(SetupError, match="--python"):
        run(replace(made, arguments=("no-such-python",)))
