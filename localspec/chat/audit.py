"""Replays a greedy reply without speculation and compares the tokens.

Contract: the replay goes through the Backend seam with drafting off, from the same conversation
and settings, and stops at the first token that differs. There the target's candidates are read: a
margin within the rounding of the precision is a tie, which one forward of several tokens may break
differently than several forwards of one; a wider margin is a fault. A reply that cannot be replayed
is refused with the reason.

Not here: sampled replies (distribution). Source of the fp32 bound: bench.exactness, the same
figure.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from localspec.backend import Backend, Candidate, Message, Request, chunks_of
from localspec.core import OFF, SamplingParams

Outcome = Literal["identical", "tie", "differs", "cancelled"]

NUM_CANDIDATES = 8
# Logits this close are tied: 1e-4 in fp32, elsewhere two steps of the precision between 16 and 32,
# the range of the largest logits of common models.
TIES = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.032}


@dataclass(frozen=True)
class Difference:
    """The first position in which two token sequences differ. first, second: the token of each
    there, None for one outside the candidates. margin: between their logits."""

    place: int
    first: Candidate | None
    second: Candidate | None
    best: tuple[Candidate, ...]
    tie: float

    @property
    def margin(self) -> float | None:
        if self.first is not None and self.second is not None:
            return abs(self.first.logit - self.second.logit)
        return None

    @property
    def is_tie(self) -> bool:
        return self.margin is not None and self.margin <= self.tie


@dataclass(frozen=True)
class Finding:
    """The result of a replay. num_compared: equal tokens."""

    outcome: Outcome
    num_compared: int
    difference: Difference | None = None


@dataclass
class Replay:
    """The replay of one logged reply; `run` is a job for `ChatService.enqueue`. messages: the
    conversation that it answered. row: of its turn. tokens: of the reply. finding: None until it is
    done, and where `refusal` says why it cannot be done."""

    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    tokens: tuple[int, ...]
    finding: Finding | None = None
    refusal: str | None = None

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """Decode it again without drafting, if it can be."""
        loaded = backend.describe()
        self.refusal = why_not(self.row, loaded.target, loaded.dtype)
        if self.refusal is None:
            self.finding = self._compared(backend, cancel)

    def _compared(self, backend: Backend, cancel: threading.Event) -> Finding:
        penalty, again = self.row["repetition_penalty"], tuple[int, ...]()
        sampling = SamplingParams(repetition_penalty=1.0 if penalty is None else penalty)
        # One token more than was written: a reply that now ends later must show.
        limit = len(self.tokens) + (1 if self.row["finish_reason"] == "eos" else 0)
        request = Request(self.messages, sampling, limit, drafter=OFF)
        with closing(chunks_of(backend, request, cancel)) as chunks:
            for chunk in chunks:
                again += chunk.tokens
                if self.tokens[: len(again)] != again:
                    break
        place = first_difference(self.tokens, again)
        if place is None:
            return Finding("identical", len(again))
        if cancel.is_set() and place == len(again):
            return Finding("cancelled", place)
        found = explain(backend, self.messages, self.tokens, again, place)
        return Finding("tie" if found.is_tie else "differs", place, found)


def why_not(row: Mapping[str, Any], target: str | None, dtype: str | None) -> str | None:
    """Why this logged turn cannot be replayed; None if it can. target, dtype: what is loaded."""
    if row["temperature"] is None or not row["num_output_tokens"]:
        return "There is nothing to compare: the reply has no tokens, or its settings are unknown."
    if row["temperature"] > 0:
        return (
            f"This reply was sampled at temperature {row['temperature']:g}, so no single text is "
            "the right one. The distribution of many replies can be checked instead: run the "
            "distribution test on the Race tab."
        )
    if row["exact"] is False:
        return (
            "Checking was lenient, as you chose: the text may differ from that of plain decoding."
        )
    if row["continues_message_id"] is not None:
        return (
            "This reply continues an earlier one that was interrupted. Only replies written in one "
            "turn can be replayed; regenerate it to get one."
        )
    if row["model"] != target:
        return (
            f"It was written by {row['model'] or 'a model that was not recorded'}, but "
            f"{target or 'no model'} is loaded. Load that model and try again."
        )
    if row["dtype"] != dtype:
        return (
            f"It was written in {row['dtype']}, but the model is loaded in {dtype}, whose rounding "
            "may give another text. Load it in the precision of the reply."
        )
    return None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; the end of the shorter sequence counts as one."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def explain(
    backend: Backend,
    messages: tuple[Message, ...],
    first: Sequence[int],
    second: Sequence[int],
    place: int,
) -> Difference:
    """The target's logits of both tokens at `place`, where the sequences differ."""
    shared = tuple(first[:place])
    best = backend.candidates(messages, shared, NUM_CANDIDATES)
    dtype = backend.describe().dtype
    tie = next((value for name, value in TIES.items() if name in dtype), TIES["float32"])
    return Difference(
        place, _candidate(best, first, place), _candidate(best, second, place), best, tie
    )


def _candidate(best: Sequence[Candidate], tokens: Sequence[int], place: int) -> Candidate | None:
    if place < len(tokens):
        return next((one for one in best if one.token == tokens[place]), None)
    # The reply ended here: the end of text is the likeliest token without text.
    return next((one for one in best if not one.text), None)


def _tokens(number: int) -> str:
    return f"{number} token" if number == 1 else f"{number} tokens"


def sentence(finding: Finding) -> str:
    """The finding as a sentence."""
    if finding.outcome == "identical":
        return (
            "Identical: replayed without speculation, the model wrote the same "
            f"{_tokens(finding.num_compared)}."
        )
    if finding.outcome == "cancelled":
        return f"Stopped after the first {_tokens(finding.num_compared)}, which are the same."
    assert finding.difference is not None
    return describe(finding.difference, "The logged reply", "the replay")


def describe(found: Difference, first: str, second: str) -> str:
    """Where two texts differ, and by how much. first, second: their names."""
    head = (
        f"They differ from token {found.place + 1} on: {first.lower()} has {shown(found.first)}, "
        f"{second} {shown(found.second)}."
    )
    if found.margin is None:
        return f"{head} One of them is not among the {len(found.best)} likeliest: this is a fault."
    margin = f"Their logits are {found.margin:.2g} apart"
    if found.is_tie:
        return (
            f"{head} {margin}, within the rounding of this precision ({found.tie:g}): a tie, which "
            "checking several tokens at once may break differently. Both are the model's choice."
        )
    return f"{head} {margin}, more than rounding explains ({found.tie:g}): this is a fault."


def shown(candidate: Candidate | None) -> str:
    """A candidate in a sentence."""
    if candidate is None:
        return "another token"
    name = f"“{candidate.text}”" if candidate.text else "the end of the reply"
    return f"{name} (logit {candidate.logit:.4f}, {100 * candidate.probability:.1f} %)"
