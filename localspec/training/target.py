"""The frozen target while something is trained for it: its hidden states, embedding and head.

Contract: any family transformers knows, used as it is. `lesson` computes the asked-for hidden
states of a batch and keeps nothing, so that memory is bounded by the batch; layers count as in
forward.features.

Not here: the loop (frame), the answers (collect).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from localspec.errors import ModelError
from localspec.forward.features import LAST
from localspec.forward.heads.files import TargetSizes
from localspec.forward.scaling import scaled
from localspec.forward.weights import Bits, load_module, read_config
from localspec.training.recipe import Lesson, Teacher
from localspec.training.rows import Batch

HEAD_MARGIN = 0.05  # of the logits' norm: rounding alone


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
        config = self.module.config.get_text_config()
        return TargetSizes(hidden_size, vocab_size, config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        """Positions it was made for."""
        config = self.module.config.get_text_config()
        return int(config.max_position_embeddings)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def teacher(self) -> Teacher:
        embedding = self.module.get_input_embeddings()
        head = self.module.get_output_embeddings()

        def embed(ids: Tensor) -> Tensor:
            rows: Tensor = embedding(ids)
            return rows.float()

        def logits(rows: Tensor) -> Tensor:
            weight = head.weight
            products = functional.linear(rows.to(weight.dtype), weight, head.bias)
            return scaled(products.float(), self.module.config)

        return Teacher(self.sizes, embed, logits)

    @torch.no_grad()
    def lesson(self, batch: Batch, layers: Sequence[int]) -> Lesson:
        """What the target computes on a batch: LAST and the layers asked for, fp32. Raises
        ModelError for the last layer's residual, which transformers does not give."""
        if self.sizes.num_layers - 1 in layers:
            raise ModelError("transformers gives the last layer's states normalised only.")
        tokens = batch.tokens.to(self.device)
        states = self.module(
            input_ids=tokens[:, :-1],
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
        ).hidden_states  # the embedding, then every layer; the last normalised
        wanted = {*layers, LAST}
        features = {layer: states[-1 if layer == LAST else layer + 1].float() for layer in wanted}
        return Lesson(tokens, batch.weights.to(self.device), features)


def load_target(
    folder: Path, dtype: torch.dtype, device: torch.device, bits: Bits | None = None
) -> Target:
    """The target of a model folder. Raises ModelError, MemoryShortage."""
    target = Target(load_module(folder, dtype, device, bits), folder)
    _require_known_head(target)
    return target


@torch.no_grad()
def _require_known_head(target: Target) -> None:
    """Raises ModelError where the head as it is taught is not the model's own: what is trained on
    it would learn another distribution."""
    tokens = torch.tensor([[0, 1]], device=target.device) % target.sizes.vocab_size
    made = target.module(input_ids=tokens, use_cache=False, output_hidden_states=True)
    own = made.logits[0].float()  # [2, V]
    taught = target.teacher().head(made.hidden_states[-1][0])  # [2, V]
    if bool(torch.isfinite(own).all()) and float((taught - own).norm()) > HEAD_MARGIN * float(
        own.norm()
    ):
        raise ModelError(
            f"{target.folder.name} makes its logits in a way that is not known here, so nothing "
            "that is trained for it would learn its own distribution. Use a drafter that needs no "
            "training: ngram, lookahead or a draft model of the same family."
        )


def sizes_of(folder: Path) -> TargetSizes:
    """What a head must agree with, from the config alone. Raises ModelError."""
    config = read_config(folder).get_text_config()
    return TargetSizes(config.hidden_size, config.vocab_size, config.num_hidden_layers)
