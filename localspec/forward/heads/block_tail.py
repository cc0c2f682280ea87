"""How the rows of a block become tokens, one after the other.

A row's logits may depend on the token that was chosen before it: by a Markov head (DSpark) or by a
selector among the best tokens (DFlash2). All is tensors on the device, so that a token may be known
there alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from localspec.forward.heads.block_layout import MarkovKind
from localspec.forward.output_head import OutputHead
from localspec.weights.linear import Linear, bytes_of


class Tail(Protocol):
    """What a block's rows lead to, given the tokens chosen so far."""

    @property
    def weight_bytes(self) -> int: ...

    def state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block begins with, [1, r]. hidden: its rows, [k, d]."""
        ...

    def changed(
        self, logits: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's logits after `token` [1], [1, V], and the next state.

        logits: [1, V] fp32. hidden: of the row, [1, d]."""
        ...


@dataclass(frozen=True)
class MarkovHead:
    """Adds W2 of a latent row to the logits. embedding: W1, [V, r]. output: W2, over the drafter's
    own vocabulary. projection: of a gate or of a state, None for the plain kind."""

    kind: MarkovKind
    embedding: torch.Tensor
    output: OutputHead
    projection: Linear | None

    @property
    def weight_bytes(self) -> int:
        held = self.embedding.nbytes + self.output.held_bytes
        return held + (0 if self.projection is None else self.projection.weight_bytes)

    def rows(self, token: torch.Tensor) -> torch.Tensor:
        """Return W1's rows, [n, r]."""
        return F.embedding(token, self.embedding)

    def state(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Tail."""
        return torch.zeros_like(self.embedding[:1])

    def changed(
        self, logits: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Tail."""
        latent, state = self.latent(hidden, token, state)
        return logits + self.output(latent), state

    def latent(
        self, hidden: torch.Tensor, token: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what W2 reads, [1, r], and the next state."""
        row = self.rows(token)
        if self.projection is None:
            return row, state
        if self.kind == "gated":
            gate = torch.sigmoid(self.projection(torch.cat((hidden, row), dim=-1)))
            return gate * row, state
        mixed = self.projection(torch.cat((state, row, hidden), dim=-1))
        gate, candidate, out = mixed.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1.0 - gate) * torch.tanh(candidate)
        return torch.tanh(out), state


@dataclass(frozen=True)
class PathSelector:
    """Leaves the best `top_k` tokens of a row, and adds how well each follows the token before.
    predecessors, successors: [V, r]. projection: of a row, [r, d]."""

    predecessors: torch.Tensor
    successors: torch.Tensor
    projection: Linear
    top_k: int

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.predecessors, self.successors) + self.projection.weight_bytes

    def state(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Tail; there is none."""
        return hidden[:1]

    def changed(
        self, logits: torch.Tensor, hidden: torch.Tensor, token: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Tail."""
        best = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)  # [1, k]
        context = F.embedding(token, self.predecessors) * self.projection(hidden)  # [1, r]
        followers = F.embedding(best.indices[0], self.successors)  # [k, r]
        scores = best.values + (context.float() @ followers.float().T)
        return torch.full_like(logits, float("-inf")).scatter_(1, best.indices, scores), state


@dataclass(frozen=True)
class ConfidenceHead:
    """The chance that a row's token is accepted if those before it are. projection: [1, d], or
    [1, d + r] with W1's row of the token before."""

    projection: Linear
    markov: MarkovHead | None

    def __call__(self, hidden: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """hidden: [1, d]. token: the one before, [1] -> [1] fp32."""
        rows = hidden
        if self.markov is not None:
            rows = torch.cat((hidden, self.markov.rows(token)), dim=-1)
        return torch.sigmoid(self.projection(rows).float())[:, 0]


class BlockRows:
    """The rows of one block that predict tokens, while these are chosen.

    hidden: [k, d]. logits: [k, V] fp32. root: the token before them, [1]. state: of the tail, None
    without one."""

    def __init__(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        root: torch.Tensor,
        tail: Tail | None,
        confidence: ConfidenceHead | None,
        state: torch.Tensor | None,
    ) -> None:
        self.hidden, self._all = hidden, logits
        self._token, self._index = root, 0
        self._tail, self._confidence, self._state = tail, confidence, state

    @property
    def row(self) -> torch.Tensor:
        """The row that predicts the next token, [1, d]."""
        return self.hidden[self._index : self._index + 1]

    def advance(self, token: torch.Tensor) -> None:
        """Go on to the row after `token`, [1]."""
        self._token, self._index = token, self._index + 1

    def logits(self) -> torch.Tensor:
        """Return the logits of the next token, [1, V]; once for each row."""
        own = self._all[self._index : self._index + 1]
        if self._tail is None or self._state is None:
            return own
        own, self._state = self._tail.changed(own, self.row, self._token, self._state)
        return own

    def confidence(self) -> torch.Tensor | None:
        """Return the chance that the drafter states of the next token, [1]; None for none."""
        return None if self._confidence is None else self._confidence(self.row, self._token)
