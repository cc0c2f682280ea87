"""From logits to the distribution that a token is drawn from, and drawing from it.

Contract: pure functions of logits, parameters and history. `distributions` serves target and draft
alike, so a draft token's `probs` row is the one it was drawn from. Greedy is the one-hot case.
Order of the warps: repetition penalty (CTRL, arXiv 1909.05858), temperature, top-k, top-p (arXiv
1904.09751), min-p (arXiv 2407.01082).

Not here: acceptance (verify), models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from localspec.core import SamplingParams
from localspec.errors import NumericsError

TINY_TEMPERATURE = 0.01


def distributions(
    logits: torch.Tensor, sampling: SamplingParams, histories: Iterable[Sequence[int]]
) -> torch.Tensor:
    """Probabilities of the next token for each row of logits.

    logits: [n, V] fp32, not modified. histories: for each row the tokens before it; iterated over
    only under a repetition penalty, so a generator costs nothing without one. Returns [n, V] fp32,
    rows sum to 1.
    """
    logits = penalised(logits, sampling, histories)
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)  # [n, 1]
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    if sampling.temperature < TINY_TEMPERATURE:  # division by it would overflow
        logits = logits - logits.amax(dim=-1, keepdim=True)
    return warped(
        logits if sampling.temperature == 1.0 else logits / sampling.temperature,
        sampling.top_k or None,
        sampling.top_p if sampling.top_p < 1.0 else None,
        sampling.min_p or None,
    )


def warped(
    scaled: torch.Tensor,
    top_k: int | torch.Tensor | None,
    top_p: float | torch.Tensor | None,
    min_p: float | torch.Tensor | None,
) -> torch.Tensor:
    """Probabilities from logits over the temperature, [n, V], under the cuts that are not None.

    A cut is a number, or a tensor of one element on the device, so that one recorded graph serves
    every setting of it.
    """
    if top_k is not None:
        scaled = _keep_top_k(scaled, top_k)
    probs = torch.softmax(scaled, dim=-1)
    if top_p is not None:
        probs = _keep_top_p(probs, top_p)
    if min_p is not None:
        floor = min_p * probs.amax(dim=-1, keepdim=True)
        probs = _renormalise(probs.masked_fill(probs < floor, 0.0))
    return probs


def penalised(
    logits: torch.Tensor, sampling: SamplingParams, histories: Iterable[Sequence[int]]
) -> torch.Tensor:
    """Logits under the repetition penalty; the same tensor where there is none."""
    penalty = sampling.repetition_penalty
    if penalty == 1.0:
        return logits
    changed = logits.clone()
    for row, history in zip(changed, histories, strict=True):
        seen = torch.tensor(sorted(set(history)), device=logits.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return changed


def _keep_top_k(logits: torch.Tensor, top_k: int | torch.Tensor) -> torch.Tensor:
    if isinstance(top_k, int):
        size = min(top_k, logits.shape[-1])
        threshold = logits.topk(size, dim=-1).values[:, -1:]  # [n, 1]
    else:  # topk needs a number on the host
        ordered = logits.sort(dim=-1, descending=True).values
        threshold = ordered.index_select(-1, top_k - 1)  # [n, 1]
    return logits.masked_fill(logits < threshold, float("-inf"))


def _keep_top_p(probs: torch.Tensor, top_p: float | torch.Tensor) -> torch.Tensor:
    """The smallest set of most likely tokens that reaches top_p; ties fall to the lower id."""
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass ahead of each token
    kept = ordered.masked_fill(before >= top_p, 0.0)
    return _renormalise(torch.zeros_like(probs).scatter_(-1, index, kept))


def _renormalise(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def draw(weights: torch.Tensor, rng: torch.Generator) -> int:
    """Draw one id from a row of non-negative weights [V]; they need not sum to 1.

    Inverts the cumulative sum in fp64 with one uniform number from the CPU generator, so the
    same seed draws the same token on every device. Raises NumericsError for a row with a NaN.
    """
    uniform: float = torch.rand((), generator=rng, dtype=torch.float64).item()
    if weights.device.type == "cuda":
        index, total = _inverted_there(weights, uniform)
    else:  # mps has no fp64
        index, total = _inverted_here(weights.cpu(), uniform)
    if math.isnan(total):
        raise no_numbers()
    if index == weights.shape[0]:  # uniform * total rounded up to total
        return int(weights.argmax().item())
    return index


def _inverted_here(weights: torch.Tensor, uniform: float) -> tuple[int, float]:
    """By numpy, which searches one row in a fraction of torch's time."""
    cumulative = weights.double().cumsum(dim=0).numpy()  # [V]
    total = float(cumulative[-1])
    return int(cumulative.searchsorted(total * uniform, side="right")), total


def _inverted_there(weights: torch.Tensor, uniform: float) -> tuple[int, float]:
    """On the device; one copy to the host."""
    cumulative = weights.double().cumsum(dim=0)  # [V]
    place = torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True)  # [1]
    index, total = torch.cat((place.double(), cumulative[-1:])).tolist()
    return int(index), total


def peaks(rows: torch.Tensor) -> tuple[list[float], list[int]]:
    """Height and place of the largest value of each row, [n, V]; a NaN counts as the largest.

    One copy from a device. On a CPU by numpy, which is five times as fast as torch's maximum."""
    if rows.device.type != "cpu":
        height, place = rows.max(dim=-1)
        heights, places = torch.stack((height.double(), place.double())).tolist()
        return heights, [int(one) for one in places]
    values = rows.numpy()
    best = values.argmax(axis=-1)
    return values[range(len(best)), best].tolist(), best.tolist()


def uniforms(count: int, rng: torch.Generator) -> list[float]:
    """`count` numbers in [0, 1) from the turn's own random source."""
    drawn: list[float] = torch.rand(count, generator=rng, dtype=torch.float64).tolist()
    return drawn


def no_numbers() -> NumericsError:
    """The error about a row that holds no numbers."""
    return NumericsError(
        "The model returned values that are not numbers, so no token can be chosen. The "
        "weights may be damaged or the precision too low: load it with --dtype float32, or "
        "fetch the model again."
    )
