"""The data behind the token view: where each token of a reply came from, and its replay.

Contract: everything comes from the log, in the shape that static/tokens.js reads and shows as text
nodes. The texts of the runs, joined, are the reply exactly: tokens that are parts of one character
stand in one run. Counts are of tokens, and equal the log's. A replay runs in the service's queue,
only compares, and is kept, the latest of each reply.

Not here: drawing (static/tokens.js), what a replay is (chat.audit).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from localspec.chat import audit
from localspec.chat.service import ChatService, Task
from localspec.core.backend import DraftedToken
from localspec.core.decoding import AUTO, FORCED, OFF, TARGET
from localspec.core.errors import StoreError
from localspec.core.units import DASH, capital, took
from localspec.drafters.registry import REGISTRY, label_of
from localspec.record.drafted import TokenRecord

MAX_KEPT = 50  # replays
LENIENT = "Checking was lenient here, as you chose: other guesses passed as well."

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


def token_view(service: ChatService, message_id: int) -> dict[str, Any]:
    """The view of a stored reply, and the drafters that it can be made again with. Raises
    StoreError for one that the log does not have, or of which an earlier version logged less."""
    reply = service.reply_record(message_id)
    sizes = (len(reply.tokens), len(reply.steps))
    if reply.record is None or (len(reply.record.lengths), len(reply.record.rounds)) != sizes:
        raise StoreError(
            "The log does not have what was drafted for this reply, as an earlier localspec wrote "
            "it. Regenerate it to see where each token comes from."
        )
    counts = (
        "num_draft_tokens", "num_checked_tokens", "num_accepted_tokens", "num_output_tokens"
    )  # fmt: skip
    return {
        **{name: reply.row[name] for name in counts},
        **provenance_of(reply.text, reply.provenance, reply.steps, reply.record),
        "notes": [
            *([capital(reply.row["reason"])] if reply.row["reason"] else []),
            *([LENIENT] if reply.row["exact"] is False else []),
        ],
        "drafters": _drafters(service),
    }


def _drafters(service: ChatService) -> list[dict[str, str]]:
    """Those that are loaded, plain decoding and the controller's choice among them."""
    loaded = service.status().description
    known = () if loaded is None else loaded.drafters
    able = [(one.name, label_of(one.name)) for one in known if one.is_available]
    choices = ((OFF, "without drafting"), (AUTO, "with drafting"), *able)
    return [{"name": name, "label": label} for name, label in choices]


def kind_of(drafter: str) -> Kind:
    """The kind of a token that this drafter guessed."""
    return REGISTRY[drafter].token_kind if drafter in REGISTRY else "draft"


def provenance_of(
    text: str,
    sources: Sequence[str],
    steps: Sequence[Mapping[str, Any]],
    record: TokenRecord,
) -> dict[str, Any]:
    """The reply's runs, its rounds, and the legend of the kinds that are in it. sources: where each
    output token came from, as logged. steps: rows of the log."""
    pieces = cut(text[record.start :], record.lengths)
    tokens, shown, done = list[ShownToken](), list[dict[str, Any]](), 0
    for number, (step, drafted) in enumerate(zip(steps, record.rounds, strict=True)):
        place = slice(done, done + step["num_output_tokens"])
        tokens += _tokens(number, sources[place], step, drafted)
        shown.append(_round(step, sources[place], pieces[place], drafted))
        done = place.stop
    counts = Counter(token.kind for token in tokens)
    return {
        "runs": _runs(text[: record.start], tokens, pieces),
        "rounds": shown,
        "legend": [
            {"kind": kind, "label": label, "meaning": meaning, "count": counts[kind]}
            for kind, (label, meaning) in KINDS.items()
            if counts[kind]
        ],
    }


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
) -> dict[str, Any]:
    """One check by the model: how many guesses, its time in words, "" where that is not known, and
    the guesses that were refused. not_reached: guesses behind a wrong one."""
    times = (step["draft_ms"], step["verify_ms"])
    drafters = [name for name in (step["drafter"], step["filler"]) if name is not None]
    return {
        "drafter": " and ".join(map(label_of, drafters)) if step["num_draft_tokens"] else DASH,
        "drafted": step["num_draft_tokens"],
        "accepted": step["num_accepted_tokens"],
        "time": "" if None in times else took(sum(times)),
        "is_probe": bool(step["is_probe"]),
        "missed": _missed(drafted, sources, pieces),
        "not_reached": sum(one.outcome == "not_reached" for one in drafted),
    }


def _missed(
    drafted: Sequence[DraftedToken], sources: Sequence[str], pieces: Sequence[str]
) -> list[dict[str, Any]]:
    """instead: the text that stands in its place, None where the reply ended there."""
    kept = {one.parent: one.text for one in drafted if one.outcome == "accepted"}
    if sources and sources[-1] == TARGET:
        kept.setdefault(_end_of(drafted), pieces[-1])
    return [
        {"text": one.text, "instead": kept.get(one.parent), "confidence": one.confidence}
        for one in drafted
        if one.outcome == "rejected"
    ]


def _runs(earlier: str, tokens: Sequence[ShownToken], pieces: Sequence[str]) -> list[TokenRun]:
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
    return runs


class Audits:
    """The replays of this server, by message id."""

    def __init__(self, service: ChatService) -> None:
        self._service = service
        self._kept: OrderedDict[int, tuple[audit.Replay, Task]] = OrderedDict()

    def start(self, message_id: int, drafter: str) -> dict[str, Any]:
        """Queue a replay, unless one is under way or it cannot be. drafter: as in Request. Raises
        StoreError."""
        known = self._kept.get(message_id)
        if known is None or known[1].done.is_set():
            replay = self._service.replay(message_id, drafter)
            model = self._service.lifecycle.known  # else it is looked at when it is loaded
            if model is not None and (refusal := audit.why_not(replay.row, model.target)):
                return {"state": "refused", "text": refusal}
            task = self._service.enqueue("making a reply again", replay.run)
            self._kept[message_id] = replay, task
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return self.state(message_id)

    def state(self, message_id: int) -> dict[str, Any]:
        known = self._kept.get(message_id)
        if known is None:
            return {"state": "none", "text": ""}
        replay, task = known
        if not task.done.is_set():
            return {"state": "running", "text": "Making it again …"}
        if replay.finding is None:
            text = replay.refusal or task.error or "The replay was stopped."
            return {"state": "failed", "text": text}
        outcome = "changed" if replay.finding.is_explained else replay.finding.outcome
        return {"state": outcome, "text": audit.sentence(replay)}

    def stop(self, message_id: int) -> dict[str, Any]:
        known = self._kept.get(message_id)
        if known is not None:
            known[1].cancel.set()
        return self.state(message_id)
