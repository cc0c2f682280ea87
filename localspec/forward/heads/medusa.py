"""Medusa heads: several guesses at once, each from the target's last hidden state alone.

Contract: head k (from 1), given the state that predicted the root, predicts the token k places
after the root. A head is a few residual blocks, x + SiLU(W x + b), and an output layer: the
target's own in our format, one of each head's own in the published one. `head_states` is the one
function that inference and training share.

Not here: which guesses are tried (drafters.medusa), training (training.medusa).
Source: Medusa (Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from localspec.formats.head_folder import PUBLISHED_CONFIG, is_published, target_named
from localspec.forward.heads.files import (
    HeadSettings,
    Shapes,
    TargetSizes,
    TensorLayout,
    read_head,
    read_published,
    read_tensors,
    take,
    take_published,
)
from localspec.forward.model import LanguageModel
from localspec.weights.linear import bytes_of

KIND = "medusa"
PUBLISHED_WEIGHTS = "medusa_lm_head.safetensors"
MAX_HEADS, MAX_LAYERS = 16, 8  # more than anybody trained; settings that say more are damaged


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
        return bytes_of(self.weight, self.bias, *(self.outputs or ()))

    @torch.inference_mode()
    def logits(
        self, rows: torch.Tensor, shared: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Every head's logits after each state: [n, d] -> [n, K, V] fp32. shared: the target's
        head."""
        states = head_states(self.weight, self.bias, rows)  # [K, n, d]
        if self.outputs is None:
            logits = shared(states.transpose(0, 1).flatten(0, 1))  # [n * K, V]
            return logits.view(len(rows), self.num_heads, -1)
        pairs = zip(states, self.outputs, strict=True)
        return torch.stack([F.linear(state, output) for state, output in pairs], dim=1).float()


def shapes(num_heads: int, num_layers: int, hidden_size: int) -> Shapes:
    """The tensors of our format."""
    stack = (num_heads, num_layers, hidden_size)
    return {"weight": (*stack, hidden_size), "bias": stack}


def read_counts(settings: HeadSettings) -> tuple[int, int]:
    """Numbers of heads and of their layers in our format. Raises ModelError."""
    num_layers = settings.whole("num_layers", most=MAX_LAYERS)
    return settings.whole("num_heads", most=MAX_HEADS), num_layers


def read_medusa(folder: Path, target: LanguageModel) -> MedusaHeads:
    """The heads in `folder`, in our format or the published one. Raises ModelError."""
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    if is_published(folder):
        return _published(folder, sizes, dtype, target.device)
    files = read_head(folder, KIND, sizes)
    wanted = shapes(*read_counts(files.settings), sizes.hidden_size)
    found = take(files.tensors, wanted, folder.name, dtype, target.device)
    return MedusaHeads(found["weight"], found["bias"])


def _published(
    folder: Path, sizes: TargetSizes, dtype: torch.dtype, device: torch.device
) -> MedusaHeads:
    config = read_published(folder, KIND)
    if "medusa_num_heads" not in config.values:
        raise config.unfit(f"its {PUBLISHED_CONFIG} has no medusa_num_heads")
    tensors = read_tensors(folder / PUBLISHED_WEIGHTS)
    num_heads = config.whole("medusa_num_heads", most=MAX_HEADS)
    num_layers = config.whole("medusa_num_layers", 1, MAX_LAYERS)
    # A well-known config says 2 beside a file of 5 heads; its authors read the file.
    firsts = {name.partition(".")[0] for name in tensors}
    in_file = {"medusa_num_heads": sum(first.isdecimal() for first in firsts)}
    if in_file["medusa_num_heads"] > num_heads:
        num_heads = replace(config, values=in_file).whole("medusa_num_heads", most=MAX_HEADS)
    _require_same_target(config, tensors.get(f"0.{num_layers}.weight"), sizes)
    layout = _layout(num_heads, num_layers, sizes)
    found = take_published(tensors, layout, folder.name, dtype, device)
    wanted = shapes(num_heads, num_layers, sizes.hidden_size)
    return MedusaHeads(
        found["weight"].view(wanted["weight"]),
        found["bias"].view(wanted["bias"]),
        tuple(found[f"output {head}"] for head in range(num_heads)),
    )


def _layout(num_heads: int, num_layers: int, sizes: TargetSizes) -> TensorLayout:
    """Head k's tensors are named k.l.linear.{weight, bias} for block l, then k.L.weight."""
    size, heads = sizes.hidden_size, range(num_heads)
    blocks = [f"{head}.{layer}.linear" for head in heads for layer in range(num_layers)]
    output = (sizes.vocab_size, size)
    return {
        "weight": {f"{block}.weight": (size, size) for block in blocks},
        "bias": {f"{block}.bias": (size,) for block in blocks},
        **{f"output {head}": {f"{head}.{num_layers}.weight": output} for head in heads},
    }


def _require_same_target(
    config: HeadSettings, output: torch.Tensor | None, sizes: TargetSizes
) -> None:
    """Raises ModelError naming the model the heads were made for, where their sizes tell."""
    if output is None or tuple(output.shape) == (sizes.vocab_size, sizes.hidden_size):
        return
    base = target_named(config.values) or "another model"
    raise config.unfit(
        f"they were made for {base} (output {list(output.shape)}), and this target's is "
        f"{[sizes.vocab_size, sizes.hidden_size]}"
    )
