"""The parts of a Gemma 4 assistant, as read from its folder for one target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from localspec.forward.decoder_weights import Weights
from localspec.forward.output_head import DraftVocabulary, OutputHead
from localspec.weights.linear import Linear, bytes_of


@dataclass(frozen=True)
class OrderedHead:
    """An output head that multiplies with the likeliest clusters of tokens alone.

    weight: [V, d]. centroids: a product to the scores of all clusters, [n, clusters]. token_ids:
    of each cluster, [clusters, V / clusters]. num_chosen: clusters of a row."""

    weight: torch.Tensor
    centroids: Linear
    token_ids: torch.Tensor
    num_chosen: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] fp32 of rows [n, d]; -inf for the tokens of other clusters."""
        chosen = self.centroids(rows).topk(self.num_chosen).indices  # [n, k]
        ids = self.token_ids[chosen].flatten(1)  # [n, k * size]
        logits = (self.weight[ids] @ rows[:, :, None])[..., 0].float()
        everything = logits.new_full((rows.shape[0], self.weight.shape[0]), float("-inf"))
        return everything.scatter_(1, ids, logits)


@dataclass(frozen=True)
class AssistantParts:
    """An assistant as read from its folder, for one target. layers: its own, whose attention has
    the key heads of the target. kv_layers: of each, which of the target's cached layers it reads.
    before: from an embedding and a state of the target to a row. after: from a row to a state."""

    layers: Weights
    kv_layers: tuple[int, ...]
    before: Linear
    after: Linear
    output: OutputHead | OrderedHead

    def entered(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return what the first layer reads, [n, d]. embedded, states: of the target."""
        return self.before(torch.cat((embedded, states.to(embedded.dtype)), -1))

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [n, V] fp32 of rows [n, d]."""
        return self.output(rows)

    def narrowed(self, vocabulary: DraftVocabulary) -> AssistantParts:
        """Return the same assistant that names the tokens of a vocabulary alone. An ordered head
        chooses its tokens anew for each row. Nothing else reads the embedding, which is freed."""
        if isinstance(self.output, OrderedHead):
            return self
        embedding = self.layers.embedding
        output = vocabulary.narrowed(self.output, embedding.device)
        if output is self.output:
            return self
        assert isinstance(embedding, torch.Tensor), "an assistant is not quantised"
        layers = replace(self.layers, embedding=embedding[:0].clone(), head=output.layer)
        return replace(self, layers=layers, output=output)

    @property
    def weight_bytes(self) -> int:
        parts = self.layers.weight_bytes + self.before.weight_bytes + self.after.weight_bytes
        if isinstance(self.output, OutputHead):
            return parts + bytes_of(self.output.ids)
        return parts + self.output.centroids.weight_bytes + bytes_of(self.output.token_ids)
