"""The places in which replies are decoded together, who gets which, and a reply in one.

Contract: a `Slot` decodes one reply at a time, over a cache of its own, with drafters of its own;
all slots share the weights of target and drafters, and what is learnt. `best_slot` is a free one
that can serve a request; its cache stays, for the next turn of the same conversation. The first
slot has every drafter that is loaded; the others have those that can serve several sequences.

Not here: what runs in one forward (engine.batch), loading the slots (loading).
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING

from localspec.chat.reply_text import ReplyText, Start
from localspec.controller.acceptance import bucket_of
from localspec.controller.plain_baseline import PlainBaseline
from localspec.core.backend import Request
from localspec.core.decoding import AUTO, OFF, SamplingParams, Sequence
from localspec.core.grammar import Grammar
from localspec.core.turn_stats import TurnStats

if TYPE_CHECKING:  # the engine brings torch, which the page must not wait for
    from localspec.controller.controller import Controller
    from localspec.engine.engine import Engine
    from localspec.forward.prefix_store import PrefixStore

FINGERPRINT_LENGTH = 16  # hex digits


@dataclass(eq=False)
class Slot:
    """engine, controller: its own. chat: the logged chat whose text its caches hold, None for a
    text that is not written."""

    engine: Engine
    controller: Controller
    is_free: bool = True
    chat: int | None = None

    def take(self, chat: int | None, store: PrefixStore | None) -> None:
        """Begin a reply. chat: see Slot."""
        self.is_free, self.chat = False, chat
        if chat is not None and store is not None:
            store.welcome(chat)

    def tell_kept(self, sequence: Sequence) -> None:
        """Tell the controller what drafters need not read of a text, though it saw no reading."""
        for name, drafter in self.engine.drafters.items():
            if (num_kept := getattr(drafter, "num_kept", None)) is not None:
                tokens = sequence.tokens[:-1]
                self.controller.catch_up.know(name, sequence, num_kept(tokens))

    def serves(self, drafter: str) -> bool:
        return drafter in (AUTO, OFF) or drafter in self.engine.drafters

    def num_held(self, prompt: Several[int]) -> int:
        """Tokens of the prompt that its cache holds."""
        from localspec.core.prefix import common_prefix_length

        return common_prefix_length(self.engine.target.cache.tokens, list(prompt))

    def baseline(self, sampling: SamplingParams) -> PlainBaseline | None:
        """What a turn that begins now is compared with; None until plain decoding was measured."""
        if not self.controller.is_measured(sampling):
            return None
        return PlainBaseline(self.controller.costs_at(bucket_of(sampling)))


def keep_read(
    slots: Several[Slot], store: PrefixStore | None, disk_bytes: int | None, cancel: threading.Event
) -> Iterator[str]:
    """See core.Backend.keep_read."""
    if store is None:
        return
    if store.files is not None:
        store.files.most_bytes = disk_bytes
    for slot in slots:
        for cache in slot.engine.caches:
            if cache.prefixes is None:
                continue
            for phrase in cache.prefixes.save(cache, slot.chat if disk_bytes else None):
                yield phrase
                if cancel.is_set():
                    return


def best_slot(slots: Several[Slot], drafter: str, prompt: Several[int]) -> Slot | None:
    """Of the free ones that have this drafter, the one that holds most of the prompt if that is
    more than half of it, else the first, which has most drafters; None where none is free."""
    free = [slot for slot in slots if slot.is_free and slot.serves(drafter)]
    if len(free) > 1:
        held = {slot.num_held(prompt): slot for slot in reversed(free)}
        most = max(held)
        if 2 * most > len(prompt):
            return held[most]
    return next(iter(free), None)


@dataclass(eq=False)
class RunningTurn:
    """One reply under way. asked: the request as it came, which `request` completes. stats: of what
    was decoded so far. rounds_at: by drafter, OFF for plain
    ones, the context lengths of its rounds."""

    asked: Request
    request: Request
    start: Start
    text: ReplyText
    grammar: Grammar | None
    started_s: float
    cancel: threading.Event
    stats: TurnStats
    rounds_at: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def passed_ms(self) -> float:
        return 1000.0 * (perf_counter() - self.started_s)

    def goes_on(self, sequence: Sequence) -> bool:
        is_ended = sequence.finish_reason is not None or self.text.is_stopped
        return not is_ended and not self.cancel.is_set()


def stats_before(request: Request, start: Start) -> TurnStats:
    digest = hashlib.sha256(repr(start.prompt).encode()).hexdigest()
    return TurnStats(
        len(start.prompt),
        exact=request.sampling.leniency is None,
        prompt_fingerprint=digest[:FINGERPRINT_LENGTH],
        continued_from=start.source,
    )


def with_energy(stats: TurnStats, before: float | None, now: float | None) -> TurnStats:
    """Return the statistics with the joules that the card used since `before`, where it counts."""
    if now is None or before is None:
        return stats
    return replace(stats, energy_joules=now - before)


def compared(stats: TurnStats, baseline: PlainBaseline | None) -> TurnStats:
    """Return them with what plain decoding would have taken, where its costs are measured."""
    if baseline is None:
        return stats
    return stats.compared(baseline.plain_ms, baseline.least_ms, baseline.was_shared)
