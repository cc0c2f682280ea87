"""Enlarged pairs on disk: whole, loadable by our own checks, the same text, or not there at all."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from localspec.core.errors import ConfigError, ModelError
from localspec.forward.by_transformers import load_module
from localspec.machine.compatibility import require_compatible
from localspec.machine.folder_shapes import shape_from_folder
from tests.kit.tiny import CPU, tiny_llama
from tools.inflate import pair as module
from tools.inflate.pair import SIZES, Pair, Widths, inflate

LARGER = Widths(5, 256, 8, 4, 32, 256)  # a copied residual, wider heads, more of everything
TINY_PAIR = Pair(LARGER, Widths(2, 128, 4, 2, 16, 160))
TOKENS = torch.arange(40).reshape(1, 40) % 64


def write_source(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    tiny_llama(**settings).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    return folder


@pytest.fixture
def small_target(tmp_path: Path) -> Path:
    return write_source(tmp_path / "small")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_source(tmp_path / "smaller", num_layers=1)


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY_PAIR)


def quiet(_: str) -> None:
    pass


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = load_module(folder, torch.float32, CPU)(TOKENS).logits[0]
    return found


def assert_same(small: Path, large: Path) -> None:
    wanted = logits(small)
    assert (logits(large) - wanted).abs().max() < 1e-5 * wanted.std()


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name not in ("small", "smaller")]


def test_both_models_say_what_their_sources_say(
    tmp_path: Path, small_target: Path, draft: Path
) -> None:
    result = inflate(small_target, draft, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert_same(small_target, tmp_path / "out" / "target")
    assert_same(draft, tmp_path / "out" / "draft")
    require_compatible(tmp_path / "out" / "target", tmp_path / "out" / "draft")
    assert leftovers(tmp_path) == ["out"]
    json.dumps(result)


def test_the_result_and_the_note_say_what_was_written(
    tmp_path: Path, small_target: Path, draft: Path
) -> None:
    result = inflate(small_target, draft, "tiny", tmp_path / "out", 0.0, 0, quiet)
    shape = shape_from_folder(tmp_path / "out" / "target")
    weights = load_module(tmp_path / "out" / "target", torch.float32, CPU).state_dict()
    assert result["target"]["num_params"] == shape.num_params
    assert sum(tensor.numel() for tensor in weights.values()) == shape.num_params
    assert (shape.num_layers, shape.hidden_size, shape.head_dim) == (5, 256, 32)
    assert (result["target"]["is_exact"], result["draft"]["is_exact"]) == (False, True)
    note = json.loads((tmp_path / "out" / "inflated.json").read_text())
    assert {**note, "out": str(tmp_path / "out")} == result


def test_many_shards_hold_the_same_model(
    tmp_path: Path, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARD_BYTES", 100_000)
    inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    files = sorted((tmp_path / "out" / "target").glob("model-*.safetensors"))
    assert len(files) > 10 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    largest = max(tensor.nbytes for tensor in load_module(
        tmp_path / "out" / "target", torch.float32, CPU).state_dict().values())  # fmt: skip
    assert max(file.stat().st_size for file in files) < max(100_000, largest) + 4096
    assert_same(small_target, tmp_path / "out" / "target")


def test_no_more_than_a_shard_and_a_tensor_are_held(
    tmp_path: Path, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARD_BYTES", 400_000)
    alive, most, total = dict[str, int](), list[int](), list[int]()
    tensors = module.Enlargement.tensors

    def counted(self: Any, *arguments: Any) -> Any:
        for name, tensor in tensors(self, *arguments):
            alive[name] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, name)
            most.append(sum(alive.values()))
            total.append(tensor.nbytes)
            yield name, tensor

    monkeypatch.setattr(module.Enlargement, "tensors", counted)
    inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert sum(total) > 2_000_000
    assert max(most) <= 400_000 + max(total)


def test_a_source_in_shards_and_bf16_stays_in_bf16(tmp_path: Path) -> None:
    source = tmp_path / "small"
    tiny_llama().to(torch.bfloat16).save_pretrained(source, max_shard_size="40KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    inflate(source, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "target", dtype="auto")
    assert found.dtype == torch.bfloat16
    wanted = logits(source)
    assert (logits(tmp_path / "out" / "target") - wanted).abs().max() < 0.2 * wanted.std()


@pytest.mark.slow
def test_noise_reaches_the_draft_alone(tmp_path: Path, small_target: Path, draft: Path) -> None:
    inflate(small_target, draft, "tiny", tmp_path / "out", 0.5, 0, quiet)
    assert_same(small_target, tmp_path / "out" / "target")
    moved = (logits(tmp_path / "out" / "draft") - logits(draft)).abs().max()
    assert moved > 0.1 * logits(draft).std()


def test_without_a_draft_there_is_only_a_target(tmp_path: Path, small_target: Path) -> None:
    result = inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert result["draft"] is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["inflated.json", "target"]


def test_a_folder_with_something_in_it_is_refused_and_kept(
    tmp_path: Path, small_target: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(ConfigError, match="not empty"):
        inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_an_empty_folder_is_used(tmp_path: Path, small_target: Path) -> None:
    (tmp_path / "out").mkdir()
    inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert (tmp_path / "out" / "target" / "config.json").is_file()


def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="disk is full"):
        inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert leftovers(tmp_path) == []


def test_a_disk_too_small_is_said_before_anything_is_written(
    tmp_path: Path, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=module.SPARE_DISK_BYTES)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: free)
    with pytest.raises(ConfigError, match=r"256 MiB free"):
        inflate(small_target, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert leftovers(tmp_path) == []


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, small_target: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean '350M'"):
        inflate(small_target, None, "350", tmp_path / "out", 0.0, 0, quiet)
    with pytest.raises(ConfigError, match="--noise"):
        inflate(small_target, None, "tiny", tmp_path / "out", -1.0, 0, quiet)
    with pytest.raises(ConfigError, match="--noise"):
        inflate(small_target, None, "tiny", tmp_path / "out", float("nan"), 0, quiet)
    with pytest.raises(ModelError, match=r"no config\.json"):
        inflate(tmp_path, None, "tiny", tmp_path / "out", 0.0, 0, quiet)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("size", ["350M", "1B", "8B"])
def test_sizes_fit_the_demo_pair_with_a_draft_in_proportion(size: str, root: Path) -> None:
    pair, demo = SIZES[size], shape_from_folder(root / "assets" / "demo" / "target")
    target, draft = pair.target.of(demo), pair.draft.of(demo)
    assert 0.05 <= draft.num_params / target.num_params <= 0.1
    plan = module.Enlargement(demo, target, 0)
    assert plan.is_exact == (size != "8B")  # heads of 128 need a root of 2
    own = shape_from_folder(root / "assets" / "demo" / "draft")
    assert module.Enlargement(own, pair.draft.of(own), 0).is_exact


def test_sizes_are_what_they_are_called(root: Path) -> None:
    demo = shape_from_folder(root / "assets" / "demo" / "target")
    counts = {size: pair.target.of(demo).num_params for size, pair in SIZES.items()}
    assert counts["350M"] == pytest.approx(350e6, rel=0.02)
    # Of the vocabulary's size apart, the layers are those of the models they are named for.
    assert counts["1B"] == pytest.approx(1.236e9 - 2048 * (128_256 - 6144), rel=0.001)
    assert counts["8B"] == pytest.approx(8.030e9 - 4096 * (2 * 128_256 - 6144), rel=0.001)


@pytest.mark.slow
def test_the_enlarged_demo_target_writes_the_same_text(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the width and heads of 350M with fewer layers and units, in fp32 arithmetic."""
    widths = replace(SIZES["350M"].target, num_layers=13, intermediate_size=896)
    monkeypatch.setitem(SIZES, "tiny", Pair(widths, SIZES["350M"].draft))
    demo = root / "assets" / "demo"
    inflate(demo / "target", demo / "draft", "tiny", tmp_path / "out", 0.0, 0, quiet)
    for role in ("target", "draft"):
        assert_same(demo / role, tmp_path / "out" / role)
        both = logits(demo / role), logits(tmp_path / "out" / role)
        assert torch.equal(*(each.argmax(-1) for each in both))
