"""Makes a logged reply again and compares the tokens.

Contract: the replay goes through the Backend seam from the same conversation, settings and seed,
with any drafter or none, and stops at the first token that differs. For a greedy reply the target's
candidates are read there: a margin within the rounding of the precision is a tie, which one forward
of several tokens may break differently than several forwards of one; a wider margin is a fault.
What changed since the reply was logged (weights, precision, kernels, prompt) is named beside a
difference. A reply that cannot be made again is refused with the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

from localspec.chat.branches import shown_message, tokens_of
from localspec.chat.compare import Answer, answers, compare
from localspec.chat.journal import without_half_a_character
from localspec.chat.turn import SAMPLED, prompt_messages
from localspec.core.backend import (
    Backend,
    Candidate,
    Description,
    Message,
    Request,
)
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import StoreError
from localspec.core.precisions import PRECISIONS
from localspec.core.units import counted, enumerated, took
from localspec.drafters.registry import PLAIN, label_of
from localspec.record.rows import API
from localspec.record.store import Store

Outcome = Literal["identical", "tie", "differs", "cancelled"]

NUM_CANDIDATES = 8
# Logits this close are tied: 1e-4 in fp32, elsewhere two steps of the precision between 16 and 32,
# the range of the largest logits of common models. Quantised layers may compute in any of them.
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
    """The result of a replay. num_compared: equal tokens. changes: what is not as it was when the
    reply was logged, in words. decode_ms: what writing the same reply took now."""

    outcome: Outcome
    num_compared: int
    difference: Difference | None = None
    changes: tuple[str, ...] = ()
    decode_ms: float | None = None

    @property
    def is_explained(self) -> bool:
        """Whether a difference is no fault, because something changed."""
        return self.outcome == "differs" and bool(self.changes)


@dataclass(eq=False)
class Replay:
    """The replay of one logged reply; `run` is a job for `ChatService.enqueue`. messages: what it
    answered, and the reply that it continued, whose ids are begun_tokens. row: of its turn. tokens:
    of the reply. drafter: as in Request. text: what was written again. finding: None until it is
    done, and where `refusal` says why it cannot be done."""

    messages: tuple[Message, ...]
    row: Mapping[str, Any]
    tokens: tuple[int, ...]
    drafter: str = OFF
    begun_tokens: tuple[int, ...] = ()
    text: str = ""
    finding: Finding | None = None
    refusal: str | None = None

    def run(self, backend: Backend, cancel: threading.Event) -> None:
        """Make it again, if it can be."""
        loaded = backend.describe()
        self.refusal = why_not(self.row, loaded.target)
        if self.refusal is None:
            self.finding = self._compared(backend, loaded, cancel)

    @property
    def _limit(self) -> int:
        """One token more than was written: a reply that now ends later must show."""
        return len(self.tokens) + (1 if self.row["finish_reason"] == "eos" else 0)

    @property
    def request(self) -> Request:
        thinks, budget = self.row["thinks"], self.row["thinking_budget"]
        return Request(
            self.messages,
            _sampling_of(self.row),
            self._limit if budget is None else self.row["max_tokens"],
            drafter=self.drafter,
            workload=self.row["workload"] or "",
            continues=self.row["continues_message_id"] is not None,
            begun_tokens=self.begun_tokens,
            thinks=None if thinks is None else bool(thinks),
            thinking_budget=budget,
            is_raw=bool(self.row["is_raw"]),
            grammar=self.row["grammar"] or "",
            is_ceiling=self.row["source"] == API,
            # A reply that did not end by itself may hold an end that was to be ignored.
            ignores_end=self.row["finish_reason"] != "eos",
        )

    def _compared(self, backend: Backend, loaded: Description, cancel: threading.Event) -> Finding:
        answer = self._answered(backend, cancel)
        again, decode_ms = answer.tokens[: self._limit], answer.stats.decode_ms
        changed = changes(self.row, loaded, answer.stats.prompt_fingerprint)
        place = first_difference(self.tokens, again)
        if place is None:
            return Finding("identical", len(again), changes=changed, decode_ms=decode_ms)
        if cancel.is_set() and place == len(again):
            return Finding("cancelled", place)
        messages = self.messages[:-1] if self.request.continues else self.messages
        found = explain(backend, messages, self.begun_tokens, self.tokens, again, place)
        is_tie = self.row["temperature"] == 0 and found.is_tie
        return Finding("tie" if is_tie else "differs", place, found, changed)

    def _answered(self, backend: Backend, cancel: threading.Event) -> Answer:
        """Return the reply made again, up to the first token that differs."""
        answer = Answer(0.0)

        def ask(request: Request, drafter: str) -> Generator[Answer, None, None]:
            return answers(backend, replace(request, drafter=drafter), cancel)

        with closing(compare(ask, [self.request], [self.drafter], 1, cancel)) as samples:
            for sample in samples:
                answer, self.text = sample.answer, sample.answer.text
                again = answer.tokens[: self._limit]
                if self.tokens[: len(again)] != again or len(again) == self._limit:
                    break
        return answer


def replay_of(store: Store, message_id: int, drafter: str) -> Replay:
    """The replay of a stored reply. Raises StoreError where the log has no tokens of it."""
    row, tokens, _ = logged_reply(store, message_id)
    shown = [shown_message(one, {}) for one in store.branch(message_id)[:-1]]
    messages = prompt_messages(row["system_prompt"] or "", shown[row["num_left_out"] or 0 :])
    begun_id = row["continues_message_id"]
    if begun_id is None:
        return Replay(messages, row, tokens, drafter)
    reply = store.branch(begun_id)[-1]
    text, thinking = map(without_half_a_character, (reply.text, reply.thinking))
    messages = (*messages, Message("assistant", text, thinking=thinking))
    return Replay(messages, row, tokens, drafter, tokens_of(store, begun_id))


def logged_reply(
    store: Store, message_id: int
) -> tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]:
    """The row of a reply's turn, its tokens and where each came from. Raises StoreError."""
    row, found = store.turn_of(message_id), store.reply_tokens(message_id)
    if row is None or found is None:
        raise StoreError(
            "The log has no tokens of this reply: it is not finished, was not recorded, its text "
            "was not to be logged, or a server wrote it that does not tell its tokens."
        )
    return row, tuple(found[0]), tuple(found[1])


def _sampling_of(row: Mapping[str, Any]) -> SamplingParams:
    """The settings that decide the tokens; what an older log does not know was not used."""
    return SamplingParams(**{name: row[name] for name in SAMPLED if row[name] is not None})


def why_not(row: Mapping[str, Any], target: str | None) -> str | None:
    """Why this logged turn cannot be made again; None if it can. target: what is loaded."""
    if row["temperature"] is None or not row["num_output_tokens"]:
        return "There is nothing to compare: the reply has no tokens, or its settings are unknown."
    if row["temperature"] > 0 and row["seed"] is None:
        return (
            f"This reply was sampled at temperature {row['temperature']:g} and its seed was not "
            "logged, so it cannot be made again. Regenerate it to get one that can."
        )
    if row["exact"] is False:
        return (
            "Checking was lenient, as you chose: the text may differ from that of plain decoding."
        )
    if row["model"] != target:
        return (
            f"It was written by {row['model'] or 'a model that was not recorded'}, but "
            f"{target or 'no model'} is loaded. Load that model and try again."
        )
    return None


def changes(
    row: Mapping[str, Any], loaded: Description, prompt_fingerprint: str | None
) -> tuple[str, ...]:
    """What is not as it was when the turn was logged, in words. Unknown is not told apart."""

    def is_other(logged: str | None, now: str | None) -> bool:
        return None not in (logged, now) and logged != now

    named = [
        ("precision", PRECISIONS.get(row["dtype"], row["dtype"]), loaded.precision),
        ("device", row["device"], loaded.device),
        ("kernels", row["kernels"], loaded.kernels),
    ]
    found = [
        f"the {name} ({old} then, {new} now)" for name, old, new in named if is_other(old, new)
    ]
    if is_other(row["target_fingerprint"], loaded.fingerprint):
        found.append("the files of the model")
    if is_other(row["prompt_fingerprint"], prompt_fingerprint):
        found.append("the prompt as the model reads it (its chat template or tokenizer)")
    if row["prompt_fingerprint"] is None and row["temperature"] > 0:
        found.append("how localspec draws tokens (it was written by an earlier version)")
    return tuple(found)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; the end of the shorter sequence counts as one."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def explain(
    backend: Backend,
    messages: tuple[Message, ...],
    begun: tuple[int, ...],
    one: tuple[int, ...],
    other: tuple[int, ...],
    place: int,
) -> Difference:
    """The target's logits of the tokens in this place, where two replies differ first. begun: ids
    of the reply before both."""
    best = backend.candidates(messages, (*begun, *one[:place]), NUM_CANDIDATES)
    tie = TIES.get(backend.describe().dtype or "", max(TIES.values()))
    first, second = (_candidate(best, reply[place:]) for reply in (one, other))
    return Difference(place, first, second, best, tie)


def _candidate(best: Sequence[Candidate], rest: Sequence[int]) -> Candidate | None:
    """Of the first token of the rest of a reply; at its end the likeliest one without text."""
    return next((one for one in best if (one.token == rest[0] if rest else not one.text)), None)


def sentence(replay: Replay) -> str:
    """What a replay that is done found, as a sentence or two."""
    finding, how = replay.finding, "without drafting" if replay.drafter == OFF else "with drafting"
    assert finding is not None, "the replay is done"
    changed = enumerated(finding.changes) if finding.changes else ""
    compared = counted(finding.num_compared, "token")
    if finding.outcome == "identical":
        still = f", although {changed} changed" if changed else ""
        same = f"Identical: made again {how}, the model wrote the same {compared}{still}."
        return f"{same}{_both_times(replay.row, finding.decode_ms, replay.drafter)}"
    if finding.outcome == "cancelled":
        return f"Stopped after the first {compared}, which are the same."
    assert finding.difference is not None
    if changed:
        head = where(finding.difference, "The logged reply", "the replay")
        return f"{head} Since it was written, {changed} changed, so another text is no fault."
    is_greedy = replay.row["temperature"] == 0
    return describe(finding.difference, "The logged reply", "the replay", is_greedy)


def _both_times(row: Mapping[str, Any], decode_ms: float | None, drafter: str) -> str:
    """Return what writing took then and now, as a sentence; "" where the log does not know it."""
    if row["decode_ms"] is None or not decode_ms:
        return ""
    before = PLAIN if not row["num_draft_tokens"] else f"with {label_of(row['drafter'])}"
    now = PLAIN if drafter == OFF else "with drafting" if drafter == AUTO else None
    return (
        f" Writing took {took(row['decode_ms'])} then, {before}, and {took(decode_ms)} now, "
        f"{now or f'with {label_of(drafter)}'}."
    )


def where(found: Difference, first: str, second: str) -> str:
    """The first place in which two texts differ, and what stands there. first, second: their
    names."""
    return (
        f"They differ from token {found.place + 1} on: {first.lower()} has {shown(found.first)}, "
        f"{second} {shown(found.second)}."
    )


def describe(found: Difference, first: str, second: str, is_greedy: bool) -> str:
    """Where two texts of one seed differ, and what that means. first, second: their names."""
    head = where(found, first, second)
    if not is_greedy:
        return (
            f"{head} The seed is the same, so both should be: rounding may tell them apart, where "
            "one forward of several tokens does not give the bits of several forwards of one."
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
