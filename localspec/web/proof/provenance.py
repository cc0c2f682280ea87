"""Where each token of a reply came from, as data for the token view.

Contract: pure. `runs` of a Provenance, joined, are the reply's text exactly: tokens that are parts
of one character stand in one run. Counts are of tokens, and equal the log's.

As JSON the tuples are lists and the names those that static/tokens.js reads.

Not here: reading the log (tokens), drawing (static/tokens.js).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from localspec.backend import DraftedToken
from localspec.core import FORCED, TARGET
from localspec.drafters.registry import REGISTRY, label_of
from localspec.record.drafted import TokenRecord
from localspec.units import DASH, took

Kind = Literal["draft", "self", "ngram", "corrected", "bonus", "plain", "forced"]

# In the order of the legend: name, what it means.
KINDS: Mapping[Kind, tuple[str, str]] = {
    "draft": ("small model", "guessed by a smaller model, and the model agreed"),
    "self": (
        "self-draft",
        "guessed by the model itself or a part of it, and the model agreed",
    ),
    "ngram": ("word lookup", "copied from where these words stood before, and the model agreed"),
    "corrected": ("corrected", "the model's own, in the place of a guess it refused"),
    "bonus": ("bonus", "the model's own, after guesses that were all right"),
    "plain": ("no draft", "the model's own, in a step without guesses"),
    "forced": ("ended", "not the model's: it ends the thinking at its budget"),
}


class ShownToken(NamedTuple):
    """One output token. round: its place among the rounds, from 0."""

    kind: Kind
    round: int
    drafter: str
    confidence: float | None = None


class TokenRun(NamedTuple):
    """Text and the tokens that make it up; shown as the last of them, which completed it."""

    text: str
    tokens: tuple[ShownToken, ...]


@dataclass(frozen=True)
class Missed:
    """A guess that was rejected. instead: the text that stands in its place, None where the reply
    ended there."""

    text: str
    instead: str | None
    confidence: float | None


@dataclass(frozen=True)
class ShownRound:
    """One check by the model. drafted, accepted, not_reached: how many guesses; the last are those
    behind a wrong one. time: in words, "" where it is not known."""

    drafter: str
    drafted: int
    accepted: int
    time: str
    is_probe: bool
    missed: tuple[Missed, ...]
    not_reached: int


@dataclass(frozen=True)
class Provenance:
    """See the module."""

    rounds: tuple[ShownRound, ...]
    runs: tuple[TokenRun, ...]
    counts: Mapping[Kind, int]


def kind_of(drafter: str) -> Kind:
    """The kind of a token that this drafter guessed."""
    return REGISTRY[drafter].token_kind if drafter in REGISTRY else "draft"


def provenance_of(
    text: str,
    sources: Sequence[str],
    steps: Sequence[Mapping[str, Any]],
    record: TokenRecord,
) -> Provenance:
    """sources: where each output token came from, as logged. steps: rows of the log."""
    pieces = cut(text[record.start :], record.lengths)
    tokens, shown, done = list[ShownToken](), list[ShownRound](), 0
    for number, (step, drafted) in enumerate(zip(steps, record.rounds, strict=True)):
        place = slice(done, done + step["num_output_tokens"])
        tokens += _tokens(number, sources[place], step, drafted)
        shown.append(_round(step, sources[place], pieces[place], drafted))
        done = place.stop
    counts: dict[Kind, int] = {
        kind: count for kind in KINDS if (count := sum(one.kind == kind for one in tokens))
    }
    return Provenance(tuple(shown), _runs(text[: record.start], tokens, pieces), counts)


def cut(text: str, lengths: Sequence[int]) -> list[str]:
    """The text by tokens; what is left at the end belongs to the last."""
    pieces, done = [], 0
    for length in lengths:
        pieces.append(text[done : done + length])
        done += length
    if pieces:
        pieces[-1] += text[done:]
    return pieces


def _tokens(
    number: int,
    sources: Sequence[str],
    step: Mapping[str, Any],
    drafted: Sequence[DraftedToken],
) -> list[ShownToken]:
    accepted = iter([one for one in drafted if one.outcome == "accepted"])
    found = []
    for source in sources:
        if source in (TARGET, FORCED):
            kind = "forced" if source == FORCED else _target_kind(step, drafted)
            found.append(ShownToken(kind, number, TARGET))
            continue
        one = next(accepted, None)
        confidence = None if one is None else one.confidence
        found.append(ShownToken(kind_of(source), number, label_of(source), confidence))
    return found


def _target_kind(step: Mapping[str, Any], drafted: Sequence[DraftedToken]) -> Kind:
    if not step["num_draft_tokens"]:
        return "plain"
    end = _end_of(drafted)
    is_refused = any(one.outcome == "rejected" and one.parent == end for one in drafted)
    return "corrected" if is_refused else "bonus"


def _end_of(drafted: Sequence[DraftedToken]) -> int:
    """The place of the last accepted token, -1 if there is none: a path's places only grow."""
    return max((i for i, one in enumerate(drafted) if one.outcome == "accepted"), default=-1)


def _round(
    step: Mapping[str, Any],
    sources: Sequence[str],
    pieces: Sequence[str],
    drafted: Sequence[DraftedToken],
) -> ShownRound:
    times = (step["draft_ms"], step["verify_ms"])
    return ShownRound(
        drafter=label_of(step["drafter"]) if step["num_draft_tokens"] else DASH,
        drafted=step["num_draft_tokens"],
        accepted=step["num_accepted_tokens"],
        time="" if None in times else took(sum(times)),
        is_probe=bool(step["is_probe"]),
        missed=_missed(drafted, sources, pieces),
        not_reached=sum(one.outcome == "not_reached" for one in drafted),
    )


def _missed(
    drafted: Sequence[DraftedToken], sources: Sequence[str], pieces: Sequence[str]
) -> tuple[Missed, ...]:
    kept = {one.parent: one.text for one in drafted if one.outcome == "accepted"}
    if sources and sources[-1] == TARGET:
        kept.setdefault(_end_of(drafted), pieces[-1])
    return tuple(
        Missed(one.text, kept.get(one.parent), one.confidence)
        for one in drafted
        if one.outcome == "rejected"
    )


def _runs(
    earlier: str, tokens: Sequence[ShownToken], pieces: Sequence[str]
) -> tuple[TokenRun, ...]:
    runs = [TokenRun(earlier, ())] if earlier else []
    waiting: tuple[ShownToken, ...] = ()
    for token, piece in zip(tokens, pieces, strict=False):
        waiting = (*waiting, token)
        if piece:
            runs.append(TokenRun(piece, waiting))
            waiting = ()
    if waiting and runs:  # a control token at the end has no text of its own
        last = runs.pop()
        runs.append(TokenRun(last.text, (*last.tokens, *waiting)))
    return tuple(runs)
