"""Sequences that are decoded together: the rows of all run in one forward of the target.

Contract: the *steps* of a sequence are a generator. It yields a `Pass` where it needs a model or a
head to run, and goes on with `Forwarded`; None where it has to wait for another sequence; and
anything else for its reader. `Batch.run` gives a reader what its sequence yields. Whoever reads
next drives all: every sequence goes on until it needs a pass, then one forward serves all whose
passes have one key. So a sequence joins and leaves between any two forwards, one that is not read
holds up nobody, and a sequence alone is the batch of one. One thread reads all, in any order. An
error in one sequence's steps ends that one.

Drafts come before the target's forward. A text that a drafter has missed is read in pieces: one
piece, of the drafter that waits longest and of all with the same weights, beside each forward of
the target.

Not here: what a step is (engine), text and requests (chat), the forwards themselves
(forward.passes).
Source: scheduling by iteration as in Orca (Yu et al. 2022), a prompt in pieces beside the rounds of
others as in Sarathi (arXiv 2308.16369).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch

from localspec.core.decoding import ALONE, DraftPlan, Others, Proposal
from localspec.core.decoding import Sequence as Turn
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.passes import Pass, Ready, forward_together

SHARED_CHUNK = 32  # Rows of a prompt in a forward of the target that others wait for.
# Rows of a text in a forward of a drafter that others wait for. A drafter has a quarter of the
# target's weights at the most, as a rule, so that they take no longer than SHARED_CHUNK rows do.
SHARED_DRAFT_CHUNK = 4 * SHARED_CHUNK

Item = TypeVar("Item")
Result = TypeVar("Result")


class Forwarded(NamedTuple):
    """What a pass gives, logits [n, V] after `Rows`, and who else was in the forward."""

    logits: torch.Tensor
    others: Others = ALONE


Steps = Generator[Pass | Item | None, Forwarded, None]


def alone(steps: Generator[Pass, Forwarded, Result]) -> Result:
    """Drive the steps of one sequence to their end."""
    try:
        part = next(steps)
        while True:
            part = steps.send(Forwarded(_run_whole(part)))
    except StopIteration as end:
        result: Result = end.value
        return result


def _run_whole(part: Pass) -> torch.Tensor:
    while (cut := _cut(part, PREFILL_CHUNK)) is not None:
        piece, part = cut
        piece.forward()
    return part.forward()


def _cut(part: Pass, most_rows: int) -> tuple[Pass, Pass] | None:
    """Return the next piece of a text that is read, and what is left behind it; None for the last
    piece, and for any other pass."""
    return part.cut(most_rows) if part.is_reading else None


class Stepwise(ABC):
    """A drafter whose model's forwards several sequences may share: a part of `core.Drafter`."""

    @abstractmethod
    def steps(self, sequence: Turn, plan: DraftPlan) -> Generator[Pass, torch.Tensor, Proposal]:
        """`propose`, yielding the passes that it needs; goes on with what they give."""

    def propose(self, sequence: Turn, plan: DraftPlan) -> Proposal:
        """See core.Drafter."""
        return drafted_alone(self.steps(sequence, plan))


class DraftTimes(NamedTuple):
    """Parts of the time of a draft, in ms. waited: for the drafts of others. reading: of a text
    that the drafter had missed; 0 on a GPU, which is only asked then, and nothing waits for it."""

    waited: float = 0.0
    reading: float = 0.0


def with_times(
    steps: Generator[Pass, torch.Tensor, Result],
) -> Generator[Pass, Forwarded, tuple[Result, DraftTimes]]:
    """What the steps of a draft give, and where its time went."""
    waited_ms = reading_ms = 0.0
    with closing(steps):
        try:
            part = next(steps)
            while True:
                if isinstance(part, Ready):
                    part = steps.send(part.result)
                    continue
                asked_s = perf_counter()
                logits, others = yield replace(part, is_draft=True)
                waited_ms += others.took_ms
                if part.is_reading and logits.device.type == "cpu":
                    reading_ms += 1000.0 * (perf_counter() - asked_s) - others.took_ms
                part = steps.send(logits)
        except StopIteration as end:
            return end.value, DraftTimes(waited_ms, reading_ms)


def drafted_alone(steps: Generator[Pass, torch.Tensor, Result]) -> Result:
    """Drive the steps of a draft to their end."""
    return alone(with_times(steps))[0]


class _Member(Generic[Item]):
    """A sequence in the batch. asked: the pass that it waits for, since asked_s. answer: what that
    gave, or its error. forward_s: what counts of the forwards as its own, of a draft (was_draft)
    its share. items: what its reader has not read yet."""

    def __init__(self, steps: Steps[Item]) -> None:
        self.steps = steps
        self.items = deque[Item]()
        self.asked: Pass | None = None
        self.asked_s = self.forward_s = 0.0
        self.answer: Forwarded | Exception | None = None
        self.was_draft = self.waits = False
        self.is_over = False
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Go on to the next thing that the steps yield."""
        try:
            found = self._next()
        except StopIteration:
            self.is_over = True
        except BaseException as error:  # raised to its own reader
            self.error, self.is_over = error, True
        else:
            if isinstance(found, Pass):
                self.asked, self.asked_s, self.forward_s = found, perf_counter(), 0.0
            elif found is None:
                self.waits = True
            else:
                self.items.append(found)

    def _next(self) -> Pass | Item | None:
        answer, self.answer = self.answer, None
        if answer is None:
            return next(self.steps)
        if isinstance(answer, Exception):
            return self.steps.throw(answer)
        others = answer.others
        if others.num_sequences or self.was_draft:
            took_s = perf_counter() - self.asked_s - self.forward_s
            answer = Forwarded(answer.logits, others._replace(took_ms=1000.0 * took_s))
        return self.steps.send(answer)


class Batch(Generic[Item]):
    """See the module."""

    def __init__(self) -> None:
        self._members = list[_Member[Item]]()

    @property
    def num_rows_read(self) -> int:
        """Tokens of a prompt that one forward of the target may read."""
        return SHARED_CHUNK if self._is_shared else PREFILL_CHUNK

    @property
    def _is_shared(self) -> bool:
        return len(self._members) > 1

    def run(self, steps: Steps[Item]) -> Iterator[Item]:
        """What the steps yield for their reader. Closing it ends them."""
        member = _Member(steps)
        self._members.append(member)
        try:
            while member.items or not member.is_over:
                if member.items:
                    yield member.items.popleft()
                else:
                    self._go_on()
            if member.error is not None:
                raise member.error
        finally:
            self._members.remove(member)
            steps.close()

    def _go_on(self) -> None:
        """Advance every sequence that can; where none can, run what they wait for."""
        members = [each for each in self._members if not each.is_over]
        able = [each for each in members if each.asked is None and not each.waits]
        for member in able:
            member.advance()
        if able:
            return
        asking = [each for each in members if each.asked is not None]
        assert asking, "a sequence waits, and none goes on"
        most_rows = SHARED_DRAFT_CHUNK if self._is_shared else PREFILL_CHUNK
        due = _due(asking)
        num_asking = sum(map(len, due))
        for group in due:
            _forward(group, most_rows, num_asking - 1)
        for member in members:
            member.waits = False


def _due(asking: Sequence[_Member[Item]]) -> list[list[_Member[Item]]]:
    """Return the groups that run next, each in one forward. While any sequence drafts: all that
    draft with the weights of the first that does, since the target's forward waits for drafts.
    Otherwise the target's forward, and a piece of a text that a drafter reads."""
    drafting = [each for each in asking if each.asked and each.asked.is_draft]
    awaited = [each for each in drafting if each.asked and not each.asked.is_reading]
    if awaited:
        return [_with_the_first(awaited)]
    verifying = [each for each in asking if each.asked and not each.asked.is_draft]
    reading = _with_the_first(sorted(drafting, key=lambda each: each.asked_s))
    return [group for group in (reading, verifying) if group]


def _with_the_first(members: Sequence[_Member[Item]]) -> list[_Member[Item]]:
    """Return those whose passes have the key of the first one's."""
    keys = [each.asked.sharing_key for each in members if each.asked is not None]
    return [each for each, key in zip(members, keys, strict=True) if key == keys[0]]


def _forward(members: Sequence[_Member[Item]], most_rows: int, num_others: int) -> None:
    """One forward for all; where it fails one for each, so that it ends only those it fails for.
    num_others: sequences beside one of these that are served at the same time."""
    asked = [each.asked for each in members if each.asked is not None]
    cuts = [_cut(part, most_rows) or (part, None) for part in asked]
    parts = [piece for piece, _ in cuts]
    started = perf_counter()
    found: list[torch.Tensor | Exception] = []
    if len(parts) > 1:
        with suppress(Exception):  # each then meets its own
            found += forward_together(parts)
    found = found or [_result_of(part) for part in parts]
    forward_s = perf_counter() - started
    num_rows = sum(part.num_rows for part in parts)
    for member, (part, left), result in zip(members, cuts, found, strict=True):
        member.forward_s += forward_s / len(parts) if part.is_draft else forward_s
        if left is not None and isinstance(result, torch.Tensor):
            member.asked = left
            continue
        others = Others(num_others, num_rows - part.num_rows)
        member.asked, member.was_draft = None, part.is_draft
        member.answer = Forwarded(result, others) if isinstance(result, torch.Tensor) else result


def _result_of(part: Pass) -> torch.Tensor | Exception:
    try:
        return part.forward()
    except Exception as error:  # raised where the pass was asked for
        return error.with_traceback(None)  # whose frames hold every tensor of the forward
