"""The frozen target while a draft or a head is trained for it.

Contract: any family that transformers knows, used as it is. `Target.taught` computes the hidden
states of one batch and keeps nothing, so that memory is bounded by the batch. A `Teacher` is what
a loss needs of the target: its sizes, its embedding and its output head. Layers are numbered as
in forward.features. The target runs in transformers and not in forward.decoder: that one runs one
sequence at a time under inference mode, and what it returns cannot be used by autograd.

Not here: the loop (train_loop), the target's answers (collect).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localspec.core.errors import ModelError
from localspec.forward.by_transformers import load_module, read_config
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes
from localspec.forward.model import scaled
from localspec.training.rows import TokenRow, padded
from localspec.weights.precision import Bits

MAX_HEAD_ERROR = 0.05  # of the logits' norm; rounding stays below it


@dataclass(frozen=True)
class Teacher:
    """embed: ids [...] int64 -> input embeddings [..., d]. head: normalised rows [..., d] ->
    logits [..., V] fp32, differentiable with respect to the rows."""

    sizes: TargetSizes
    embed: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TaughtBatch:
    """A batch with the target's hidden states.

    tokens: [B, n + 1] int64. weights: [B, n], loss weights of the predicted tokens tokens[:, 1:].
    features: layer -> [B, n, d] fp32, of tokens[:, :-1]; LAST is what the output head reads.
    Padding stands at the end of a row and has weight 0.
    """

    tokens: Tensor
    weights: Tensor
    features: Mapping[int, Tensor]


@dataclass(frozen=True)
class Target:
    """A loaded transformers module, its weights frozen."""

    module: Any
    folder: Path

    @property
    def device(self) -> torch.device:
        found: torch.device = self.module.device
        return found

    @property
    def sizes(self) -> TargetSizes:
        hidden_size = self.module.get_input_embeddings().weight.shape[1]
        vocab_size = self.module.get_output_embeddings().weight.shape[0]
        return TargetSizes(hidden_size, vocab_size, self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def config(self) -> Any:
        """Of the part that reads text."""
        return self.module.config.get_text_config()

    def teacher(self) -> Teacher:
        embedding = self.module.get_input_embeddings()
        head = self.module.get_output_embeddings()

        def embed(ids: Tensor) -> Tensor:
            rows: Tensor = embedding(ids)
            return rows.float()

        def logits(rows: Tensor) -> Tensor:
            products = functional.linear(rows.to(head.weight.dtype), head.weight, head.bias)
            return scaled(products.float(), self.module.config)

        return Teacher(self.sizes, embed, logits)

    @torch.no_grad()
    def taught(self, rows: Sequence[TokenRow], layers: Sequence[int]) -> TaughtBatch:
        """Rows as one batch, with the hidden states of LAST and of `layers` in fp32. Raises
        ModelError for the residual of the last layer, which transformers returns only
        normalised."""
        if self.sizes.num_layers - 1 in layers:
            raise ModelError("transformers gives the last layer's states normalised only.")
        tokens, weights = (each.to(self.device) for each in padded(rows))
        states = self.module(
            input_ids=tokens[:, :-1],
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states  # the embedding, then every layer; the last normalised
        wanted = {*layers, LAST}
        features = {layer: states[-1 if layer == LAST else layer + 1].float() for layer in wanted}
        return TaughtBatch(tokens, weights, features)


def load_target(
    folder: Path, dtype: torch.dtype, device: torch.device, bits: Bits | None = None
) -> Target:
    """The target of a model folder. Raises ModelError, MemoryShortage."""
    target = Target(load_module(folder, dtype, device, bits), folder)
    require_known_head(target)
    return target


@torch.no_grad()
def require_known_head(target: Target) -> None:
    """Raise ModelError where `Teacher.head` does not give the model's own logits: what is trained
    on it would learn another distribution."""
    tokens = torch.tensor([[0, 1]], device=target.device) % target.sizes.vocab_size
    made = target.module(input_ids=tokens, use_cache=False, output_hidden_states=True)
    own = made.logits[0].float()  # [2, V]
    taught = target.teacher().head(made.hidden_states[-1][0])  # [2, V]
    is_finite = bool(torch.isfinite(own).all())
    if is_finite and float((taught - own).norm()) > MAX_HEAD_ERROR * float(own.norm()):
        raise ModelError(
            f"{target.folder.name} computes its logits in a way that is not known here, so a draft "
            "or a head would learn another distribution. Use a drafter that needs no training: "
            "ngram, lookahead or a draft model of the same family."
        )


def sizes_of(folder: Path) -> TargetSizes:
    """What a head must agree with, from the config alone. Raises ModelError."""
    config = read_config(folder).get_text_config()
    return TargetSizes(config.hidden_size, config.vocab_size, config.num_hidden_layers)
