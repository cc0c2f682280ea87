"""Train a target so that its first layers can draft: an exit's loss, and layers left out.

Contract: `early_exit_loss` is a LossFunction: the loss of all layers plus that of one exit, the
exits taken in turn, while each layer is left out of a batch with a chance that grows with its
depth. What a batch gets depends on the batch's number alone, so that a resumed run repeats it.
The exit shares the final norm and the head, so nothing is added to the model.

Source: LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710), with whole batches for its samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from torch import Tensor

from localspec.training.batches import Batch
from localspec.training.model import Decoder
from localspec.training.pretrain import HeadLoss, LossFunction, head_loss


@dataclass(frozen=True)
class EarlyExit:
    """exits: after how many layers the model may leave. weight: of the exit's loss beside the
    whole model's. dropout: chance to leave out the last layer; earlier ones have less."""

    exits: tuple[int, ...] = (2, 3, 4, 6)
    weight: float = 0.3
    dropout: float = 0.1

    def exit_of(self, number: int) -> int:
        """The exit whose loss batch `number` carries."""
        return self.exits[number % len(self.exits)]

    def skipped(self, number: int, num_layers: int) -> frozenset[int]:
        """The layers that batch `number` leaves out; never the first."""
        rng = Random(f"layers/{number}")
        chances = (self.dropout * (2.0 ** (i / (num_layers - 1)) - 1.0) for i in range(num_layers))
        return frozenset(i for i, chance in enumerate(chances) if rng.random() < chance)


def early_exit_loss(plan: EarlyExit, head: HeadLoss = head_loss) -> LossFunction:
    """A loss in nats over a batch, by loss weight."""

    def loss(model: Decoder, batch: Batch) -> Tensor:
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        skipped = plan.skipped(batch.number, model.shape.num_layers)
        last, left = model.hidden_with_exit(inputs, plan.exit_of(batch.number), skipped)
        whole = head(last, model.embedding.weight, targets, batch.weights)
        return whole + plan.weight * head(left, model.embedding.weight, targets, batch.weights)

    return loss
