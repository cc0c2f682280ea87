"""Medusa heads: several guesses at once, each from the target's last hidden state alone.

Contract: head k (from 1), given the state that predicted the root, names the token k places after
the root. A head is a few residual blocks, x + SiLU(W x + b), and an output layer: the target's
own in our format, one of each head's own in the published one. `head_states` is the one function
that inference and training share. Both formats are read from safetensors only.

Not here: which guesses are tried (drafters.medusa), training (training.medusa).
Source: Medusa (Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from localspec.errors import ModelError
from localspec.forward.heads.files import CONFIG, TargetSizes, read_head, read_tensors, take
from localspec.forward.model import LanguageModel
from localspec.forward.weights import read_object

KIND = "medusa"
PUBLISHED_CONFIG, PUBLISHED_WEIGHTS = "config.json", "medusa_lm_head.safetensors"
MAX_HEADS, MAX_LAYERS = 16, 8  # more than anybody trained; a config that says more is damaged


def head_states(weight: torch.Tensor, bias: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What each head hands to its output layer: rows [n, d] -> [K, n, d].

    weight: [K, L, d, d], bias: [K, L, d]. Weights of zero leave the rows as they are.
    """
    num_heads, num_layers = weight.shape[:2]
    states = rows.expand(num_heads, *rows.shape)  # [K, n, d]
    for layer in range(num_layers):
        turned = torch.baddbmm(bias[:, layer, None], states, weight[:, layer].transpose(1, 2))
        states = states + F.silu(turned)
    return states


@dataclass(frozen=True)
class MedusaHeads:
    """weight: [K, L, d, d]. bias: [K, L, d]. outputs: each head's own [V, d]; None where they
    share the target's."""

    weight: torch.Tensor
    bias: torch.Tensor
    outputs: tuple[torch.Tensor, ...] | None = None

    @property
    def num_heads(self) -> int:
        return self.weight.shape[0]

    @property
    def weight_bytes(self) -> int:
        tensors = (self.weight, self.bias, *(self.outputs or ()))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @torch.inference_mode()
    def logits(
        self, row: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Every head's logits after one state: [1, d] -> [K, V] fp32. shared: the target's head."""
        states = head_states(self.weight, self.bias, row)[:, 0]  # [K, d]
        if self.outputs is None:
            return shared(states)
        pairs = zip(states, self.outputs, strict=True)
        return torch.stack([F.linear(state, output) for state, output in pairs]).float()


def shapes(num_heads: int, num_layers: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """The tensors of our format."""
    stack = (num_heads, num_layers, hidden_size)
    return {"weight": (*stack, hidden_size), "bias": stack}


def read_medusa(folder: Path, target: LanguageModel) -> MedusaHeads:
    """The heads in `folder`, in our format or the published one. Raises ModelError."""
    if not (folder / CONFIG).is_file() and (folder / PUBLISHED_CONFIG).is_file():
        return _published(folder, target)
    sizes = TargetSizes.of(target)
    files = read_head(folder, KIND, sizes)
    num_heads, num_layers = read_counts(folder, files.settings, "num_heads", "num_layers")
    wanted = shapes(num_heads, num_layers, sizes.hidden_size)
    found = take(files.tensors, wanted, folder.name, target.embed([0]).dtype, target.device)
    return MedusaHeads(found["weight"], found["bias"])


def _published(folder: Path, target: LanguageModel) -> MedusaHeads:
    """Head k's tensors are named k.l.linear.{weight, bias} for block l, then k.L.weight."""
    path, remedy = folder / PUBLISHED_CONFIG, "Fetch the heads again."
    config = read_object(path, f"{path} is not valid JSON. {remedy}", remedy)
    if "medusa_num_heads" not in config:
        raise ModelError(
            f"{folder.name} holds no Medusa heads: its {PUBLISHED_CONFIG} has no "
            "medusa_num_heads. Choose another folder."
        )
    tensors = read_tensors(folder / PUBLISHED_WEIGHTS)
    told = {"medusa_num_layers": 1, **config}
    # A well-known config says 2 beside a file of 5 heads; its authors read the file.
    if type(told["medusa_num_heads"]) is int:
        told["medusa_num_heads"] = max(told["medusa_num_heads"], _num_heads_in(tensors))
    num_heads, num_layers = read_counts(folder, told, "medusa_num_heads", "medusa_num_layers")
    sizes = TargetSizes.of(target)
    _require_same_target(folder, config, tensors.get(f"0.{num_layers}.weight"), sizes)
    wanted = _published_shapes(num_heads, num_layers, sizes)
    found = take(tensors, wanted, folder.name, target.embed([0]).dtype, target.device)

    def stacked(part: str) -> torch.Tensor:
        return torch.stack(
            [
                torch.stack([found[f"{head}.{layer}.linear.{part}"] for layer in range(num_layers)])
                for head in range(num_heads)
            ]
        )

    outputs = tuple(found[f"{head}.{num_layers}.weight"] for head in range(num_heads))
    return MedusaHeads(stacked("weight"), stacked("bias"), outputs)


def _num_heads_in(tensors: Mapping[str, torch.Tensor]) -> int:
    firsts = {name.partition(".")[0] for name in tensors}
    return len([first for first in firsts if first.isdecimal()])


def _published_shapes(
    num_heads: int, num_layers: int, sizes: TargetSizes
) -> dict[str, tuple[int, ...]]:
    size, found = sizes.hidden_size, dict[str, tuple[int, ...]]()
    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = (size, size)
            found[f"{head}.{layer}.linear.bias"] = (size,)
        found[f"{head}.{num_layers}.weight"] = (sizes.vocab_size, size)
    return found


def _require_same_target(
    folder: Path, config: Mapping[str, Any], output: torch.Tensor | None, sizes: TargetSizes
) -> None:
    """Raises ModelError naming the model the heads were made for, where their sizes tell."""
    if output is None or tuple(output.shape) == (sizes.vocab_size, sizes.hidden_size):
        return
    base = config.get("base_model_name_or_path") or "another model"
    raise ModelError(
        f"The Medusa heads in {folder.name} were made for {base} (output {list(output.shape)}); "
        f"this target's is {[sizes.vocab_size, sizes.hidden_size]}. Load the heads' own target, or "
        f"train some for this one (python -m localspec train {KIND})."
    )


def read_counts(
    folder: Path, settings: Mapping[str, Any], heads: str, layers: str
) -> tuple[int, int]:
    """Numbers of heads and of their layers, under these names. Raises ModelError."""
    found = settings.get(heads), settings.get(layers)
    for name, count, limit in ((heads, found[0], MAX_HEADS), (layers, found[1], MAX_LAYERS)):
        if type(count) is not int or not 1 <= count <= limit:
            raise ModelError(
                f"The settings in {folder.name} say {name} = {count!r}, but it must be a number "
                f"from 1 to {limit}. Fetch or train the heads again."
            )
    return int(found[0]), int(found[1])  # type: ignore[arg-type]
