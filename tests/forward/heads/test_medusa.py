"""Medusa heads in our format and the published one, and files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from localspec.core.errors import ModelError
from localspec.formats.head_folder import PUBLISHED_CONFIG
from localspec.forward.decoder import Decoder
from localspec.forward.heads.files import TargetSizes, write_head
from localspec.forward.heads.medusa import (
    KIND,
    PUBLISHED_WEIGHTS,
    MedusaHeads,
    head_states,
    read_medusa,
)
from tests.kit.heads import change_config
from tests.kit.tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_llama, with_cache

NUM_HEADS, NUM_LAYERS = 3, 2


def target() -> Decoder:
    return with_cache(tiny_llama())


def stack(seed: int = 1) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shape = (NUM_HEADS, NUM_LAYERS, HIDDEN_SIZE)
    return {
        "weight": torch.randn(*shape, HIDDEN_SIZE, generator=rng) * 0.2,
        "bias": torch.randn(shape, generator=rng),
    }


def write_own(folder: Path, model: Decoder, tensors: dict[str, torch.Tensor]) -> Path:
    settings = {"num_heads": NUM_HEADS, "num_layers": NUM_LAYERS}
    write_head(folder, KIND, TargetSizes.of(model), settings, tensors)
    return folder


def published_tensors(seed: int = 2) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            linear = f"{head}.{layer}.linear"
            found[f"{linear}.weight"] = torch.randn(HIDDEN_SIZE, HIDDEN_SIZE, generator=rng)
            found[f"{linear}.bias"] = torch.randn(HIDDEN_SIZE, generator=rng)
        found[f"{head}.{NUM_LAYERS}.weight"] = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=rng)
    return found


def write_published(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    config = {
        "medusa_num_heads": NUM_HEADS,
        "medusa_num_layers": NUM_LAYERS,
        "base_model_name_or_path": "somebody/a-model",
    }
    (folder / PUBLISHED_CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / PUBLISHED_WEIGHTS)
    return folder


def one_by_one(tensors: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
    """The published heads as their paper says them, without any stacking: [K, V]."""
    found = []
    for head in range(NUM_HEADS):
        state = row
        for layer in range(NUM_LAYERS):
            linear = f"{head}.{layer}.linear"
            turned = F.linear(state, tensors[f"{linear}.weight"], tensors[f"{linear}.bias"])
            state = state + turned * torch.sigmoid(turned)
        found.append(F.linear(state, tensors[f"{head}.{NUM_LAYERS}.weight"])[0])
    return torch.stack(found)


def test_heads_of_zero_say_what_the_target_says() -> None:
    model, row = target(), torch.randn(1, HIDDEN_SIZE)
    nothing = {name: torch.zeros_like(tensor) for name, tensor in stack().items()}
    said = MedusaHeads(nothing["weight"], nothing["bias"]).logits(row, model.head)[0]
    assert torch.allclose(said, model.head(row).expand(NUM_HEADS, -1), atol=1e-5)


def test_each_head_and_block_has_its_own_weights() -> None:
    torch.manual_seed(0)
    tensors, rows = stack(), torch.randn(5, HIDDEN_SIZE)
    found = head_states(tensors["weight"], tensors["bias"], rows)
    for head in range(NUM_HEADS):
        state = rows
        for layer in range(NUM_LAYERS):
            weight, bias = tensors["weight"][head, layer], tensors["bias"][head, layer]
            state = state + F.silu(F.linear(state, weight, bias))
        assert torch.allclose(found[head], state, atol=1e-4)


def test_our_own_format_is_read_back(tmp_path: Path) -> None:
    model, tensors = target(), stack()
    found = read_medusa(write_own(tmp_path, model, tensors), model)
    assert torch.equal(found.weight, tensors["weight"])
    assert torch.equal(found.bias, tensors["bias"])
    assert found.outputs is None
    assert found.weight_bytes == 4 * (tensors["weight"].numel() + tensors["bias"].numel())


def test_the_published_format_says_what_its_layers_say(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, tensors, row = target(), published_tensors(), torch.randn(1, HIDDEN_SIZE)
    found = read_medusa(write_published(tmp_path, tensors), model)
    assert found.num_heads == NUM_HEADS
    wanted = one_by_one(tensors, row)
    assert torch.allclose(found.logits(row, model.head)[0], wanted, rtol=1e-3, atol=1e-2)
    assert found.weight_bytes == sum(4 * tensor.numel() for tensor in tensors.values())


def test_a_published_config_that_counts_too_few_heads_is_not_believed(tmp_path: Path) -> None:
    """That of a well-known one says 2 beside a file of 5; its authors read the file."""
    folder = write_published(tmp_path, published_tensors())
    config = json.loads((folder / PUBLISHED_CONFIG).read_text())
    config["medusa_num_heads"] = NUM_HEADS - 1
    (folder / PUBLISHED_CONFIG).write_text(json.dumps(config))
    assert read_medusa(folder, target()).num_heads == NUM_HEADS


def test_published_heads_of_another_model_name_it(tmp_path: Path) -> None:
    tensors = published_tensors()
    for head in range(NUM_HEADS):
        tensors[f"{head}.{NUM_LAYERS}.weight"] = torch.zeros(99, HIDDEN_SIZE)
    with pytest.raises(ModelError, match=r"made for somebody/a-model \(output \[99, 64\]\)"):
        read_medusa(write_published(tmp_path, tensors), target())


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_published(tmp_path, published_tensors())
    (tmp_path / PUBLISHED_WEIGHTS).unlink()
    torch.save(published_tensors(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError) as caught:
        read_medusa(tmp_path, target())
    assert "medusa_lm_head.pt" in str(caught.value) and "refused" in str(caught.value)
    command = str(caught.value).split('python -c "')[1].split('"')[0]
    assert PUBLISHED_WEIGHTS in command
    monkeypatch.chdir(tmp_path)
    exec(command, {})
    assert read_medusa(tmp_path, target()).num_heads == NUM_HEADS


def test_a_published_head_that_lacks_a_block_is_refused(tmp_path: Path) -> None:
    tensors = published_tensors()
    del tensors["1.1.linear.bias"]
    with pytest.raises(ModelError, match=r"lacks 1\.1\.linear\.bias"):
        read_medusa(write_published(tmp_path, tensors), target())


@pytest.mark.parametrize("count", [0, 17, "4", True, None])
def test_counts_no_heads_have_are_refused(tmp_path: Path, count: object) -> None:
    model = target()
    folder = write_own(tmp_path, model, stack())
    change_config(folder, "settings", num_heads=count)
    with pytest.raises(ModelError, match="its num_heads is"):
        read_medusa(folder, model)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "has no medusa_num_heads")],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / PUBLISHED_CONFIG).write_text(text)
    with pytest.raises(ModelError, match=said):
        read_medusa(tmp_path, target())
