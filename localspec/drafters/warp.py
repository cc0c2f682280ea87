"""The warps of `engine.sampling.distributions` with their settings as tensors, and drawing.

Contract: for one row of logits `warped` gives what `distributions` gives, in the same order of
warps, but reads temperature, top-k, top-p and min-p from the device: one recorded graph then
serves every setting. Only which warps there are is fixed (`Warp`), since sorting a vocabulary that
nobody cuts would cost. `drawn` is `sampling.draw` with its random number given, on the device.

Where two logits differ but their probabilities round to the same number, top-p may cut one where
`distributions` cuts the other; the row that is returned is the one that is drawn from.

Not here: penalties (they need the history), the draft loop (chunk).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from localspec.core import SamplingParams


@dataclass(frozen=True)
class Warp:
    """Which warps a row goes through; none but softmax when greedy."""

    is_sampled: bool = False
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False

    def example(self) -> SamplingParams:
        """Settings of this kind."""
        return SamplingParams(
            temperature=0.8 if self.is_sampled else 0.0,
            top_k=20 if self.has_top_k else 0,
            top_p=0.9 if self.has_top_p else 1.0,
            min_p=0.05 if self.has_min_p else 0.0,
        )


GREEDY = Warp()


def warp_of(sampling: SamplingParams) -> Warp:
    if sampling.temperature == 0.0:
        return GREEDY
    return Warp(True, sampling.top_k > 0, sampling.top_p < 1.0, sampling.min_p > 0.0)


@dataclass(frozen=True)
class Knobs:
    """The settings' values, [1] each, on the device."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor) -> Knobs:
        """values: [4] as `knobs_of` lays them out."""
        temperature, top_p, min_p = (values[i : i + 1].float() for i in (0, 2, 3))
        return cls(temperature, values[1:2].long(), top_p, min_p)


def knobs_of(sampling: SamplingParams, vocab_size: int) -> tuple[float, float, float, float]:
    """Temperature, top-k, top-p, min-p; those that are not in use are never read."""
    top_k = max(1, min(sampling.top_k, vocab_size))
    return sampling.temperature, float(top_k), sampling.top_p, sampling.min_p


def warped(logits: torch.Tensor, warp: Warp, knobs: Knobs) -> torch.Tensor:
    """Probabilities of the next token, [V] fp32. Plain softmax when greedy: its peak is the
    token, its height the confidence."""
    if not warp.is_sampled:
        return torch.softmax(logits, dim=-1)
    # Less the maximum first: a tiny temperature must not overflow.
    scaled = (logits - logits.amax()) / knobs.temperature
    if not (warp.has_top_k or warp.has_top_p):
        return _at_least(torch.softmax(scaled, dim=-1), warp, knobs)
    ordered, index = scaled.sort(descending=True, stable=True)
    if warp.has_top_k:
        threshold = ordered.index_select(0, knobs.top_k - 1)
        scaled = scaled.masked_fill(scaled < threshold, float("-inf"))
    probs = torch.softmax(scaled, dim=-1)
    if warp.has_top_p:
        heights = probs.index_select(0, index)
        before = heights.cumsum(dim=-1) - heights  # mass ahead of each token
        kept = heights.masked_fill(before >= knobs.top_p, 0.0)
        probs = _renormalised(torch.zeros_like(probs).scatter_(0, index, kept))
    return _at_least(probs, warp, knobs)


def drawn(probs: torch.Tensor, best: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The id at `uniform` ([1] fp64, in [0, 1)) of the cumulative sum of probs [V], as [1].
    best: [1], the likeliest id, for the case that uniform * total rounds up to the total."""
    cumulative = probs.double().cumsum(dim=0)
    place = torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True)  # [1]
    return torch.where(place == probs.shape[0], best, place)


def _at_least(probs: torch.Tensor, warp: Warp, knobs: Knobs) -> torch.Tensor:
    if not warp.has_min_p:
        return probs
    return _renormalised(probs.masked_fill(probs < knobs.min_p * probs.amax(), 0.0))


def _renormalised(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum()
