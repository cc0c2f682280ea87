"""From logits to the next token.

Contract: `scores` serves target and draft alike: the next token is the one with the largest score,
its logit plus the temperature times the turn's noise at its place (engine.noise). Greedy is
temperature 0, the case without noise. Order of the warps: the mask of a
grammar (`masked`, which target and draft apply before), penalties (repetition: CTRL, arXiv
1909.05858; presence and frequency: OpenAI's), temperature, top-k, top-p (arXiv 1904.09751), min-p
(arXiv 2407.01082). A token that they leave out scores -inf. `distributions` gives the probabilities
that the choice follows.

Not here: acceptance (verify), models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from localspec.core import decoding
from localspec.core.decoding import SamplingParams
from localspec.forward.upload import indices, uploaded

Number = float | torch.Tensor  # a setting, or a tensor of one element on the device


class Warp(NamedTuple):
    """The warps but the penalty; None: not in use. As tensors of one element they are inputs of a
    recorded graph, which then serves every setting."""

    temperature: Number
    top_k: int | torch.Tensor | None = None
    top_p: Number | None = None
    min_p: Number | None = None


def warp_of(sampling: SamplingParams) -> Warp:
    """None of the cuts changes the likeliest token, so greedy has none."""
    if sampling.temperature == 0.0:
        return Warp(0.0)
    top_p = sampling.top_p if sampling.top_p < 1.0 else None
    return Warp(sampling.temperature, sampling.top_k or None, top_p, sampling.min_p or None)


def scores(
    logits: torch.Tensor,
    sequence: decoding.Sequence,
    texts: Sequence[Sequence[int]],
    share: float = 1.0,
) -> torch.Tensor:
    """Scores of what may follow `sequence` and each of the drafted `texts`: [n, V] -> [n, V].

    logits: fp32, not modified. share: of the noise; the target chooses with all of it."""
    sampling = sequence.sampling
    histories = ([*sequence.tokens, *text] for text in texts)
    warp = warp_of(sampling)
    logits = penalised(logits, sampling, histories, sequence.prompt_length)
    if sampling.temperature == 0.0:
        return logits
    noise = noise_after(sequence, [len(text) for text in texts], logits.device)
    return perturbed(logits, warp, noise, share)


def masked(
    logits: torch.Tensor, sequence: decoding.Sequence, texts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Logits [n, V], -inf where the turn's grammar lets no such token follow `sequence` and each of
    the drafted `texts`; the same tensor where there is no grammar."""
    if sequence.grammar is None:
        return logits
    rows = sequence.grammar.masks(sequence.reply, texts)
    packed = uploaded(np.frombuffer(b"".join(rows), np.uint8), torch.uint8, logits.device)
    packed = packed.view(len(rows), -1, 1)  # [n, V / 8, 1]
    bits = packed >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    return logits.masked_fill(bits.view(len(rows), -1)[:, : logits.shape[-1]] == 0, -math.inf)


def noise_after(
    sequence: decoding.Sequence, depths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """The noise of what may follow `sequence` and so many drafted tokens: [n, V]."""
    first, last = min(depths), max(depths)
    rows = sequence.noise.on(device).rows(len(sequence.tokens), last + 1)[first:]
    if len(depths) == len(rows) and list(depths) == list(range(first, last + 1)):  # a chain
        return rows
    return rows.index_select(0, indices([depth - first for depth in depths], rows.device))


def perturbed(
    logits: torch.Tensor, warp: Warp, noise: torch.Tensor, share: Number = 1.0
) -> torch.Tensor:
    """Scores by a share of the noise [n, V] of each row of logits [n, V]."""
    kept, size = cut(logits, warp), share * warp.temperature
    if isinstance(size, torch.Tensor):
        return kept + size * noise
    return torch.add(kept, noise, alpha=size)


def choices(scores: torch.Tensor) -> list[int | None]:
    """The token that each row of scores [n, V] chooses; None for a row that holds no numbers."""
    heights, best = peaks(scores)
    return [
        token if math.isfinite(height) else None
        for height, token in zip(heights, best, strict=True)
    ]


def distributions(
    logits: torch.Tensor,
    sampling: SamplingParams,
    histories: Iterable[Sequence[int]],
    prompt_length: int = 0,
) -> torch.Tensor:
    """Probabilities of the next token: [n, V] -> [n, V], rows sum to 1. histories: for each row
    the tokens before it, iterated over only under a penalty. prompt_length: of them, those that are
    not the reply's."""
    logits = penalised(logits, sampling, histories, prompt_length)
    if sampling.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)  # [n, 1]
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    return tempered(cut(logits, warp_of(sampling)), sampling.temperature)


def tempered(logits: torch.Tensor, temperature: Number) -> torch.Tensor:
    """Softmax of logits over the temperature; a tiny one must not overflow."""
    return torch.softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperature, dim=-1)


def cut(logits: torch.Tensor, warp: Warp) -> torch.Tensor:
    """Logits [n, V], -inf where top-k, top-p or min-p leaves a token out."""
    if warp.top_k is not None:
        logits = logits.masked_fill(logits < _kth_largest(logits, warp.top_k), -math.inf)
    if warp.top_p is not None:
        logits = _keep_top_p(logits, warp.temperature, warp.top_p)
    if warp.min_p is not None:  # a share of the largest probability is a distance of logits
        floor = logits.amax(dim=-1, keepdim=True) + warp.temperature * _log(warp.min_p)  # [n, 1]
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def penalised(
    logits: torch.Tensor,
    sampling: SamplingParams,
    histories: Iterable[Sequence[int]],
    prompt_length: int = 0,
) -> torch.Tensor:
    """Logits under the penalties; the same tensor where there is none. See `distributions`."""
    once, each = sampling.presence_penalty, sampling.frequency_penalty
    if once == each == 0.0:
        return _without_repetition(logits, sampling.repetition_penalty, histories)
    kept = list(histories)
    changed = _without_repetition(logits, sampling.repetition_penalty, kept).clone()
    for row, history in zip(changed, kept, strict=True):
        written = Counter(history[prompt_length:])
        if written:
            tokens = indices([*written], row.device)
            counts = indices([*written.values()], row.device)
            row[tokens] -= once + each * counts
    return changed


def _without_repetition(
    logits: torch.Tensor, penalty: float, histories: Iterable[Sequence[int]]
) -> torch.Tensor:
    """Logits under the repetition penalty; the same tensor where there is none."""
    if penalty == 1.0:
        return logits
    vocab_size = logits.shape[-1]
    seen = [at * vocab_size + token for at, history in enumerate(histories) for token in {*history}]
    places, changed = indices(seen, logits.device), logits.flatten().clone()
    values = repelled(changed.index_select(0, places), penalty)
    return changed.index_copy_(0, places, values).view_as(logits)


def repelled(logits: torch.Tensor, penalty: Number) -> torch.Tensor:
    """Logits of tokens that were seen, under the repetition penalty."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def _log(value: Number) -> Number:
    return value.log() if isinstance(value, torch.Tensor) else math.log(value)


def _kth_largest(logits: torch.Tensor, top_k: int | torch.Tensor) -> torch.Tensor:
    """[n, 1]."""
    if isinstance(top_k, int):
        return logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
    ordered = logits.sort(dim=-1, descending=True).values  # topk needs a number on the host
    return ordered.index_select(-1, top_k - 1)


def _keep_top_p(logits: torch.Tensor, temperature: Number, top_p: Number) -> torch.Tensor:
    """The smallest set of most likely tokens that reaches top_p; ties fall to the lower id."""
    ordered, index = tempered(logits, temperature).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered  # mass ahead of each token
    is_out = torch.zeros_like(before, dtype=torch.bool).scatter_(-1, index, before >= top_p)
    return logits.masked_fill(is_out, -math.inf)


def peaks(rows: torch.Tensor) -> tuple[list[float], list[int]]:
    """Height and place of the largest value of each row, [n, V]; a NaN counts as the largest.

    One copy from a device, in fp32, which holds every id. On a CPU by numpy, which is five times
    as fast as torch's maximum."""
    if rows.device.type != "cpu":
        height, place = rows.max(dim=-1)
        heights, places = torch.stack((height, place.to(height.dtype))).tolist()
        return heights, [int(one) for one in places]
    values = rows.numpy()
    best = values.argmax(axis=-1)
    return values[range(len(best)), best].tolist(), best.tolist()
