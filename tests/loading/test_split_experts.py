"""--experts: from the flag to a loaded model, its experts in the RAM beside an imitated card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import app
from localspec.core.errors import ConfigError, MemoryShortage
from localspec.core.options import LoadOptions
from localspec.forward.decoder import Decoder
from localspec.forward.host_experts import HostExperts
from localspec.loading import fitting, local_backend, placement
from localspec.loading.fitting import check_target, load_at, needed_bytes, with_experts
from localspec.loading.local_backend import open_local_backend
from localspec.loading.placement import Place
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.hardware import probe
from localspec.machine.model import Model
from tests.kit.fake_card import CUDA, fake_card, memory_of_card
from tests.kit.fake_nvml import CUDA_BUILD, GIB, LINUX, FakeNvml
from tests.kit.families import small
from tests.kit.model_folders import VOCAB_SIZE, save_tokenizer
from tests.kit.mxfp4 import saved_in_mxfp4

pytestmark = pytest.mark.slow  # imports transformers
CARD = probe(FakeNvml(free_gib=10, total_gib=12), LINUX, CUDA_BUILD)
PLACE = Place(CARD, CUDA, torch.bfloat16, None, 96)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny gpt-oss, whose experts are most of it."""
    folder = tmp_path_factory.mktemp("split") / "oss"
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 512,
             "num_hidden_layers": 1, "layer_types": ["full_attention"]}  # fmt: skip
    saved_in_mxfp4(small("gpt_oss", **sizes), folder)
    save_tokenizer(folder)
    return Model("oss", path=folder)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The machine has this card and no other; what is free of it can be set."""
    free = {"bytes": 10 * GIB}
    for module in (local_backend, fitting):
        monkeypatch.setattr(module, "free_bytes_now", lambda *_, **__: free["bytes"])
    monkeypatch.setattr(local_backend, "probe", lambda: CARD)
    monkeypatch.setattr(local_backend, "hardware_for", lambda *_: CARD)
    monkeypatch.setattr(placement, "device_of", lambda *_: CUDA)
    monkeypatch.setattr(local_backend, "pool_of", lambda place: None)  # it has no streams
    yield free


def test_the_flag_puts_experts_into_the_ram_and_the_page_is_told(mixture: Model, card: Any) -> None:
    flags = app.parse_arguments(["--experts", "ram", "--model", str(mixture.folder)])
    with fake_card():
        backend = open_local_backend(replace(flags.options, context=96), None, lambda phrase: None)
    (part,) = parts_of(backend.loaded.engine.target)
    assert isinstance(part, HostExperts)
    assert "experts in the RAM" in backend.loaded.identity, "its prices are of no use elsewhere"
    notices = backend.describe().notices
    assert any("are in the RAM and computed by the processor" in each for each in notices)


def test_what_is_planned_of_card_and_ram_is_what_loading_keeps_there(
    mixture: Model, card: Any
) -> None:
    split, on_card, parts = replace(PLACE, experts_in_ram=True), list[int](), list[Any]()
    for place in (PLACE, split):
        with fake_card(), memory_of_card() as memory:
            model = load_at(mixture.folder, place).model
            parts += parts_of(model)
            on_card.append(memory.used)
    counted = needed_bytes(mixture.folder, PLACE) - needed_bytes(mixture.folder, split)
    assert on_card[0] - on_card[1] == pytest.approx(counted, rel=0.05)
    shape, part = shape_from_folder(mixture.folder), parts[1]
    assert isinstance(part, HostExperts)
    held = sum(each.weight_bytes for each in part.experts.linears)
    assert shape.host_bytes("bf16", "bf16", has_experts=True) == pytest.approx(held, rel=0.05)


def test_unasked_experts_are_in_the_ram_where_the_card_does_not_hold_them(
    mixture: Model, card: Any
) -> None:
    def is_split(experts: str | None, place: Place = PLACE) -> bool:
        return with_experts(LoadOptions(experts=experts), mixture, place).experts_in_ram

    assert not is_split(None)
    card["bytes"] = needed_bytes(mixture.folder, replace(PLACE, experts_in_ram=True))
    assert is_split(None) and is_split("auto") and not is_split("gpu")
    host = replace(LINUX, ram_available_bytes=LINUX.ram_total_bytes // 25)  # all for others
    full = replace(PLACE, hardware=replace(CARD, host=host))
    assert not is_split(None, full) and is_split("ram", full)
    with pytest.raises(MemoryShortage, match="in the RAM while"):
        check_target(mixture.folder, replace(full, experts_in_ram=True), anyway=False)
    with pytest.raises(MemoryShortage, match="would fit"):
        check_target(mixture.folder, full, anyway=False)


def test_where_there_is_no_card_or_no_expert_the_flag_is_refused(
    mixture: Model, card: Any, saved_target: Path
) -> None:
    options = LoadOptions(experts="ram")
    with pytest.raises(ConfigError, match="Leave --experts out"):
        with_experts(options, mixture, replace(PLACE, device=torch.device("cpu")))
    with pytest.raises(ConfigError, match="is for a mixture of experts"):
        with_experts(options, Model("dense", path=saved_target), PLACE)


def parts_of(model: Any) -> list[Any]:
    assert isinstance(model, Decoder)
    return [block.feed_forward for block in model.weights.blocks]
