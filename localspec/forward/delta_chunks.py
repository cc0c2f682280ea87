"""Gated delta nets in closed forms: the states of many tokens at once, in a few products.

A GPU takes longer to start a kernel than to run one step of a recurrence. Here a forward of a few
rows reads the settled states once, and the pending tokens and its own rows by their ingredients;
nothing moves the settled states until their slots run out. The rows of a prompt move them in pieces
of PIECE rows. Sums are grouped as a text was read, so a row's bits depend on that: on a processor
`states.OrderedStates` do better.

Source: the chunk form of Gated DeltaNet (arXiv 2412.06464).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localspec.formats.attention import NUM_PENDING
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.states import WIDEST, RowInputs, StateNet, StateRows, States, by_value_head

PIECE = 64  # Rows of a prompt that are solved as one system of equations.


class ClosedStates(States):
    """States that are moved over many tokens at once. `decays` hold logarithms here."""

    is_capturable = True

    def __init__(self, shape: DeltaSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.slots = torch.arange(NUM_PENDING, device=device)
        self.inverse = UnitInverse(PIECE, device)

    def rows(self, num_rows: int) -> StateRows:
        """See States."""
        if num_rows > WIDEST:
            return PromptRows(self)
        return self.rows_at(self.slots[self.num_pending : self.num_pending + num_rows])

    def rows_at(self, slots: torch.Tensor) -> FewRows:
        """See States."""
        return FewRows(self, slots)

    def _prepare(self, start: int, num_rows: int) -> None:
        if num_rows > WIDEST:
            self._settle(self.num_pending)

    def _advance(self, count: int) -> None:
        """S = e^G S + the sum of e^(G - G_i) k_i delta_i^T, of all layers."""
        layers, heads = self.shape.num_layers, self.shape.num_value_heads
        totals = self.decays[:, :count].cumsum(1)  # [layers, count, heads]
        weights = torch.exp(totals[:, -1:] - totals)[..., None]
        deltas = (self.deltas[:, :count] * weights).transpose(1, 2).flatten(0, 1)
        keys = by_value_head(self.keys[:, :count].flatten(0, 1), heads)
        keys = keys.view(layers, count, heads, -1).permute(0, 2, 3, 1).flatten(0, 1)
        self.settled.mul_(torch.exp(totals[:, -1])[..., None, None])
        self.settled.view(-1, *self.settled.shape[2:]).baddbmm_(keys, deltas)


class FewRows:
    """At most WIDEST rows after the pending tokens, all of it addressed by tensors."""

    def __init__(self, states: ClosedStates, slots: torch.Tensor) -> None:
        num_before = states.shape.kernel - 1
        self._states, self._slots = states, slots
        self._columns = slots + num_before
        self._before = slots[:1] + states.slots[:num_before]
        self._is_later = states.slots > slots[:, None]  # [n, NUM_PENDING]
        states.deltas.index_fill_(1, slots, 0.0)  # those of an earlier forward add nothing

    def outputs(
        self, net: StateNet, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See StateRows."""
        columns = self._states.columns[layer]
        channels = channels.to(columns.dtype)
        window = torch.cat((columns.index_select(0, self._before), channels))
        columns.index_copy_(0, self._columns, channels)
        return self.read(layer, net.inputs(window, gates))

    def read(self, layer: int, inputs: RowInputs) -> torch.Tensor:
        """As `outputs`, of what the rows bring."""
        states, slots = self._states, self._slots
        num_rows, num_heads, _ = inputs.values.shape
        states.keys[layer].index_copy_(0, slots, inputs.heads[:, 1])
        states.decays[layer].index_copy_(0, slots, inputs.log_decays)
        asked, weights, left = self._weights(layer, inputs.heads)
        # Queries and keys stand one after the other: both ask the state, and what is pending.
        seen = torch.bmm(asked, states.settled[layer]).view(num_heads, 2, num_rows, -1)
        seen = (seen * left[:, None, :, None]).flatten(1, 2)
        seen = torch.baddbmm(seen, weights, states.deltas[layer].transpose(0, 1))
        shares = inputs.shares.T[..., None]  # [heads, n, 1]
        of_new = weights.index_select(2, slots)  # [heads, 2 n, n]
        deltas = shares * (inputs.values.transpose(0, 1) - seen[:, num_rows:])
        if num_rows > 1:
            deltas = states.inverse.times(shares * of_new[:, num_rows:], deltas)
        states.deltas[layer].index_copy_(0, slots, deltas.transpose(0, 1))
        return torch.baddbmm(seen[:, :num_rows], of_new[:, :num_rows], deltas).transpose(0, 1)

    def _weights(
        self, layer: int, heads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries, then keys, of rows for each value head, [heads, 2 n, key_size]; the
        weights of their answers from each slot, [heads, 2 n, NUM_PENDING]; and what is left of the
        settled states, [heads, n]."""
        states, num_rows = self._states, heads.shape[0]
        num_heads, num_keys = states.shape.num_value_heads, heads.shape[2]
        asked = heads.permute(2, 1, 0, 3).flatten(1, 2)  # [key heads, 2 n, key_size]
        alike = torch.bmm(asked, states.keys[layer].permute(1, 2, 0)).view(num_keys, 1, 2, -1)
        totals = states.decays[layer].cumsum(0).T  # [heads, NUM_PENDING]
        own = totals.index_select(1, self._slots)
        spans = (own[..., None] - totals[:, None]).masked_fill(self._is_later, float("-inf"))
        spans = torch.exp(spans).view(num_keys, -1, 1, num_rows * NUM_PENDING)
        weights = (alike * spans).view(num_heads, 2 * num_rows, NUM_PENDING)
        asked = asked[:, None].expand(-1, num_heads // num_keys, -1, -1).flatten(0, 1)
        return asked, weights, torch.exp(own)


class PromptRows:
    """More than WIDEST rows, before which every token is settled. They settle all but the last
    WIDEST of them."""

    def __init__(self, states: ClosedStates) -> None:
        self._states = states
        self._last = states.rows_at(states.slots[:WIDEST])

    def outputs(
        self, net: StateNet, layer: int, channels: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """See StateRows."""
        columns, num_before = self._states.columns[layer], self._states.shape.kernel - 1
        window = torch.cat((columns[:num_before], channels.to(columns.dtype)))
        first = channels.shape[0] - WIDEST
        columns[: num_before + WIDEST] = window[first:]
        inputs = net.inputs(window, gates)
        settled = self._settle(layer, _part(inputs, slice(first)))
        return torch.cat((settled, self._last.read(layer, _part(inputs, slice(first, None)))))

    def _settle(self, layer: int, inputs: RowInputs) -> torch.Tensor:
        """Move the settled states over rows, and return what the rows read."""
        num_rows, num_heads, _ = inputs.values.shape
        # A row of zeros changes no state.
        queries, keys = (
            _in_pieces(by_value_head(part, num_heads)) for part in inputs.heads.unbind(1)
        )
        values = _in_pieces(inputs.values)
        shares, decays = (
            _in_pieces(part[..., None]) for part in (inputs.shares, inputs.log_decays)
        )
        totals = decays.cumsum(2)  # [pieces, heads, PIECE, 1]
        is_later = torch.ones(PIECE, PIECE, dtype=torch.bool, device=totals.device).triu_(1)
        spans = torch.exp((totals - totals.mT).masked_fill(is_later, float("-inf")))
        alike = (shares * spans * (keys @ keys.mT)).flatten(0, 1)
        answers = spans * (queries @ keys.mT)
        left = torch.exp(totals)
        brought = torch.cat((shares * values, shares * left * keys), -1).flatten(0, 1)
        brought = self._states.inverse.times(alike, brought).view(*keys.shape[:3], -1)
        news, reads = torch.split(brought, [values.shape[3], keys.shape[3]], -1)
        stays = torch.exp(totals[:, :, -1:] - totals) * keys
        state, outputs = self._states.settled[layer], list[torch.Tensor]()
        for piece, queried in enumerate((left * queries).unbind()):
            deltas = torch.baddbmm(news[piece], reads[piece], state, alpha=-1)
            outputs.append(torch.baddbmm(torch.bmm(queried, state), answers[piece], deltas))
            state.mul_(left[piece, :, -1:]).baddbmm_(stays[piece].mT, deltas)
        return torch.cat(outputs, 1).transpose(0, 1)[:num_rows]


class UnitInverse:
    """The inverse of I + A, where A is strictly lower triangular: of blocks that double in size.

    With the inverses X of two neighbouring blocks known, that of the block of both is X - X B X,
    where B is what stands below their diagonal."""

    def __init__(self, size: int, device: torch.device) -> None:
        """size: the largest system."""
        places = torch.arange(size, device=device)
        rows, columns = places[:, None], places
        self._whole = (rows == columns).float()
        self._blocks = list[torch.Tensor]()
        width = 1
        while width < size:
            is_lower = rows // width % 2 > columns // width % 2
            is_block = rows // (2 * width) == columns // (2 * width)
            self._blocks.append((is_lower & is_block).float())
            width *= 2

    def times(self, lower: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the inverse times `values`, [b, n, m], of two rows at least. lower: A, [b, n, n];
        what stands on its diagonal and above is left out."""
        size = lower.shape[1]
        blocks = [block[:size, :size] for block in self._blocks[: (size - 1).bit_length()]]
        inverse = torch.addcmul(self._whole[:size, :size], lower, blocks[0], value=-1)
        for block in blocks[1:]:
            inverse = torch.baddbmm(inverse, torch.bmm(inverse, lower * block), inverse, alpha=-1)
        return torch.bmm(inverse, values)


def _part(inputs: RowInputs, rows: slice) -> RowInputs:
    return RowInputs(
        inputs.heads[rows], inputs.values[rows], inputs.shares[rows], inputs.log_decays[rows]
    )


def _in_pieces(rows: torch.Tensor) -> torch.Tensor:
    """[n, heads, size] -> [pieces, heads, PIECE, size], with rows of zeros at the end."""
    missing = -rows.shape[0] % PIECE
    rows = F.pad(rows, (0, 0, 0, 0, 0, missing))
    return rows.view(-1, PIECE, *rows.shape[1:]).transpose(1, 2)
