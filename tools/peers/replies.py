"""Replies of other engines under this project's own definitions.

Contract: prefill apart, decoding timed from there, end of text counted as decided and not as
output. Where an engine hands out its first tokens with the prefill, decoding is timed from them on
and they are charged at the mean of the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localspec.bench.cases import Case
from localspec.bench.runs import MeasuredReply
from localspec.core.decoding import SamplingParams


def request_for(
    case: Case, sampling: SamplingParams, max_tokens: int, end_ids: frozenset[int]
) -> dict[str, Any]:
    """What every worker is asked; engines add to it."""
    return {
        "prompt": list(case.prompt),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "seed": case.seed,
        "end_ids": sorted(end_ids),
    }


def reply_of(answer: Mapping[str, Any], end_ids: frozenset[int]) -> MeasuredReply:
    """A worker's answer as a reply. token_times_ms there: since the end of prefill, one for each
    decided token; is_first_in_prefill: whether the first came with it."""
    decided = tuple(answer["tokens"])
    times_ms = tuple(answer["token_times_ms"])
    assert len(times_ms) == len(decided), "one time for each token"
    tokens = output_of(decided, end_ids)
    whole_ms = times_ms[-1] if times_ms else None
    return MeasuredReply(
        tokens=tokens,
        decided=decided,
        decode_ms=after_first_ms(times_ms) if answer["is_first_in_prefill"] else whole_ms,
        num_drafts=answer.get("num_drafts", 0),
        num_draft_tokens=answer.get("num_draft_tokens", 0),
        num_accepted_tokens=answer.get("num_accepted_tokens", 0),
        peak_memory_bytes=answer.get("peak_memory_bytes"),
    )


def output_of(decided: Sequence[int], end_ids: frozenset[int]) -> tuple[int, ...]:
    """The tokens without a closing end of text."""
    has_ended = bool(decided) and decided[-1] in end_ids
    return tuple(decided[:-1] if has_ended else decided)


def after_first_ms(times_ms: Sequence[float]) -> float | None:
    """Decode time where the first tokens came with the prefill: the mean of the later ones,
    taken for every token; None where there are no later ones."""
    num_first = sum(time_ms == times_ms[0] for time_ms in times_ms)
    num_later = len(times_ms) - num_first
    if num_later == 0:
        return None
    return (times_ms[-1] - times_ms[0]) / num_later * len(times_ms)
