"""The Gumbel noise of one turn: a pure function of (seed, position, token).

Contract: a token is the argmax of its logit plus the temperature times its noise, which draws from
the softmax of the logits over the temperature (the Gumbel-max rule). Draft and target read the same
noise, so near distributions choose the same token, and no rule of a drafter can change what the
target chooses. A position is the index of the token in the whole sequence, prompt included. So a
reply that is continued later and one written in one go agree, and two turns of one chat with one
seed do not share noise.

The hash is SplitMix64 (Steele et al. 2014) as a counter generator: one 64-bit value gives the bits
of two tokens. They are the same on every device; the logarithms may differ in the last place. So a
draft model on a device of its own makes its noise there, and none of it is copied.

Source: arXiv 2408.07978 for draft and target that share their noise.
"""

from __future__ import annotations

import torch

from localspec.forward.upload import indices

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
MASK = 2**64 - 1
SCALE = 2.0**-31 * (1.0 - 2.0**-24)  # the largest number stays below 1 in fp32
BLOCK_ROWS = 16  # made at once, ahead of their use
BLOCK_TOKENS = 2**17  # on a CPU: a block must fit into its cache


class GumbelNoise:
    """The noise of one turn. A row is made once: draft and target read the same one."""

    def __init__(self, seed: int, vocab_size: int, device: torch.device) -> None:
        self._given_seed = seed
        self._seed = mixed((seed + GOLDEN) & MASK)
        self._vocab_size = vocab_size
        self._device = device
        is_cpu = device.type == "cpu"
        self._block = min(BLOCK_ROWS, max(1, BLOCK_TOKENS // vocab_size)) if is_cpu else BLOCK_ROWS
        self._first = 0  # position of the first row that is held
        self._held = torch.empty(0, vocab_size, device=device)
        self._counters = torch.empty(0, dtype=torch.long)  # of pairs of tokens, when first needed
        self._elsewhere = dict[torch.device, GumbelNoise]()

    def on(self, device: torch.device) -> GumbelNoise:
        """See core.Noise."""
        if device == self._device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = GumbelNoise(self._given_seed, self._vocab_size, device)
        return self._elsewhere[device]

    def rows(self, position: int, count: int) -> torch.Tensor:
        """The noise of `count` positions from `position` on, [count, V] fp32, not to be modified.
        Rows before `position` are dropped when new ones are made."""
        at = position - self._first
        if not 0 <= at <= len(self._held):
            self._first, self._held, at = position, self._held[:0], 0
        while at + count > len(self._held):
            made = self._made(self._first + len(self._held))
            self._first, self._held, at = position, torch.cat((self._held[at:], made)), 0
        return self._held[at : at + count]

    @torch.inference_mode()
    def _made(self, position: int) -> torch.Tensor:
        """A block of rows from `position` on."""
        if not len(self._counters):
            pairs = torch.arange(1, self._vocab_size // 2 + 2, device=self._device)
            self._counters = pairs * signed(GOLDEN)
        places = range(position, position + self._block)
        keys = [signed(mixed((self._seed + place * GOLDEN) & MASK)) for place in places]
        bits = hashed(indices(keys, self._device)[:, None] + self._counters)
        return gumbel(bits.view(torch.int32)[:, : self._vocab_size])


def mixed(value: int) -> int:
    """The finaliser of SplitMix64."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        value = ((value ^ value >> shift) * multiplier) & MASK
    return value ^ value >> SHIFTS[-1]


def hashed(values: torch.Tensor) -> torch.Tensor:
    """`mixed` of each int64 value, in place; torch's products wrap, its shifts keep the sign."""
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        values.bitwise_xor_((values >> shift).bitwise_and_(MASK >> shift)).mul_(signed(multiplier))
    last = SHIFTS[-1]
    return values.bitwise_xor_((values >> last).bitwise_and_(MASK >> last))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel numbers from int32 bits, of which the sign does not count.

    Small numbers v in (0, 1) are the fine ones, and -log(-log(1 - v)) is largest for those: an
    unlikely token can win with its own chance."""
    minus_v = torch.add(torch.tensor(-SCALE / 2), bits.float().abs_(), alpha=-SCALE)
    return minus_v.log1p_().neg_().log_().neg_()


def signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value."""
    return value - 2**64 if value >= 2**63 else value
