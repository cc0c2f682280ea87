"""Sequences that are decoded together: the rows of all run in one forward of the target.

Contract: the *steps* of a sequence are a generator. It yields `Rows` where it needs the target, and
goes on with `Forwarded`; None where it has to wait for another sequence; and anything else for its
reader. `Batch.run` gives a reader what its sequence yields. Whoever reads next drives all: every
sequence goes on until it needs the target, then one forward serves them all. Drafts come first: the
sequences that draft with the same model share its forwards too. One thread reads all, in any order.
So a sequence joins and leaves between any two forwards, one that is not read holds up nobody, and a
sequence alone is the batch of one. An error in one sequence's steps ends that one.

Not here: what a step is (engine), text and requests (chat), the forward itself (forward.decoder).
Source: scheduling by iteration as in Orca (Yu et al. 2022), a prompt in pieces beside the rounds of
others as in Sarathi (arXiv 2308.16369).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from time import perf_counter
from typing import Generic, NamedTuple, TypeVar

import torch

from localspec.core.decoding import ALONE, DraftPlan, Others, Proposal
from localspec.core.decoding import Sequence as Turn
from localspec.forward.decoder import Decoder, forward_together, weights_of
from localspec.forward.model import PREFILL_CHUNK, LanguageModel, Rows

SHARED_CHUNK = 32  # rows of a prompt in a forward that others wait for

Item = TypeVar("Item")
Result = TypeVar("Result")


class Forwarded(NamedTuple):
    """What the model says after each row, [n, V] (see `Rows`), and who else was in the forward."""

    logits: torch.Tensor
    others: Others = ALONE


Steps = Generator[Rows | Item | None, Forwarded, None]


def alone(steps: Generator[Rows, Forwarded, Result]) -> Result:
    """Drive the steps of one sequence to their end."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send(Forwarded(asked.forward()))
    except StopIteration as end:
        result: Result = end.value
        return result


class Stepwise(ABC):
    """A drafter whose model's forwards several sequences may share: a part of `core.Drafter`."""

    @abstractmethod
    def steps(self, sequence: Turn, plan: DraftPlan) -> Generator[Rows, torch.Tensor, Proposal]:
        """`propose`, yielding the rows that it needs a model to run; goes on with their logits."""

    def propose(self, sequence: Turn, plan: DraftPlan) -> Proposal:
        """See core.Drafter."""
        return drafted_alone(self.steps(sequence, plan))


def with_waits(
    steps: Generator[Rows, torch.Tensor, Result],
) -> Generator[Rows, Forwarded, tuple[Result, float]]:
    """What the steps of a draft give, and the ms in which others drafted."""
    waited_ms = 0.0
    with closing(steps):
        try:
            rows = next(steps)
            while True:
                logits, others = yield rows._replace(is_draft=True)
                waited_ms += others.took_ms
                rows = steps.send(logits)
        except StopIteration as end:
            return end.value, waited_ms


def drafted_alone(steps: Generator[Rows, torch.Tensor, Result]) -> Result:
    """Drive the steps of a draft to their end."""
    return alone(with_waits(steps))[0]


class _Member(Generic[Item]):
    """A sequence in the batch. asked: the rows that it waits for, since asked_s. answer: their
    logits, or the error of the forward. forward_s: what counts of that as its own, of a draft
    (was_draft) its share. items: what its reader has not read yet."""

    def __init__(self, steps: Steps[Item]) -> None:
        self.steps = steps
        self.items = deque[Item]()
        self.asked: Rows | None = None
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
            if isinstance(found, Rows):
                self.asked, self.asked_s = found, perf_counter()
            elif found is None:
                self.waits = True
            else:
                self.items.append(found)

    def _next(self) -> Rows | Item | None:
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
        """Tokens of a prompt that one forward may read."""
        return PREFILL_CHUNK if len(self._members) < 2 else SHARED_CHUNK

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
        """Advance every sequence that can; where none can, run the forward that they wait for."""
        members = [each for each in self._members if not each.is_over]
        able = [each for each in members if each.asked is None and not each.waits]
        for member in able:
            member.advance()
        if able:
            return
        asking = [each for each in members if each.asked is not None]
        assert asking, "a sequence waits, and none goes on"
        _forward(_first_of(asking))
        for member in members:
            member.waits = False


def _first_of(asking: Sequence[_Member[Item]]) -> Sequence[_Member[Item]]:
    """Those whose rows run next. While any drafts: all that draft with the model of the first that
    does, since the target's forward waits for drafts. Else all."""
    drafting = [(each, each.asked) for each in asking if each.asked and each.asked.is_draft]
    if not drafting:
        return asking
    first = _drafts_with(drafting[0][1].model)
    return [member for member, asked in drafting if _drafts_with(asked.model) is first]


def _drafts_with(model: LanguageModel) -> object:
    """What drafts must have in common to share forwards. Where a row rounds differently beside
    others (is_fastest), a sequence would not draft what it drafts alone."""
    return model if isinstance(model, Decoder) and model.is_fastest else weights_of(model)


def _forward(members: Sequence[_Member[Item]]) -> None:
    """One forward for all; where it fails one for each, so that it ends only those it fails for."""
    parts = [each.asked for each in members if each.asked is not None]
    started = perf_counter()
    found: list[torch.Tensor | Exception] = []
    if len(parts) > 1:
        with suppress(Exception):  # each then meets its own
            found += forward_together(parts)
    found = found or [_logits_of(part) for part in parts]
    forward_s = perf_counter() - started
    num_rows = sum(len(part.tokens) for part in parts)
    for member, part, logits in zip(members, parts, found, strict=True):
        others = Others(len(parts) - 1, num_rows - len(part.tokens))
        member.asked, member.was_draft = None, part.is_draft
        member.forward_s = forward_s / len(parts) if part.is_draft else forward_s
        member.answer = Forwarded(logits, others) if isinstance(logits, torch.Tensor) else logits


def _logits_of(part: Rows) -> torch.Tensor | Exception:
    try:
        return part.forward()
    except Exception as error:  # raised where the rows were asked for
        return error.with_traceback(None)  # whose frames hold every tensor of the forward
