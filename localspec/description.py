"""What a backend has loaded: the model, where it runs, what can draft.

Contract: frozen values; unknown is None. The seam (backend) has these names as well.

Not here: turns and their statistics (backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OffCode = Literal[
    "does_not_pay",  # drafting would not be faster here
    "no_room",  # the reply was over before anything could be drafted
    "nothing_to_propose",  # no drafter has anything to propose for this text
    "no_memory",  # the drafters were unloaded, or did not fit
    "no_draft",  # there is nothing that could draft
    "incompatible_vocabulary",  # the chosen draft has another vocabulary
    "switched_off",  # the person chose plain decoding
    "measuring",  # this machine has not been measured yet
    "engine_restarted",  # the engine has just been started again
]


@dataclass(frozen=True)
class DrafterStatus:
    """A drafter as the person sees it: whether it can be chosen, and why or why not. code: of a
    reason why not that a page tells apart, None for the others. shares: drafters with the same word
    hold one model among them (drafters.registry)."""

    name: str
    is_available: bool
    reason: str
    memory_bytes: int | None = None
    code: OffCode | None = None
    shares: str | None = None


@dataclass(frozen=True)
class Server:
    """A server that answers instead of an engine of ours. name: of its program, with the version
    where it tells it. models: all that it offers. limits: what cannot be asked of it, a sentence
    each."""

    name: str
    url: str
    models: tuple[str, ...]
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Description:
    """What a backend has loaded. calibration: measured costs as plain data, None before.
    fingerprint: of the target's files. kernels: the choice among them, None where there is none.
    num_slots: replies that it decodes together; kv_bytes are of all. thinks: whether the model may
    think before it answers, and can be told not to. server: None for an engine of ours; dtype and
    context_length are None only where a server does not tell them."""

    target: str
    draft: str | None
    device: str
    dtype: str | None
    context_length: int | None
    drafters: tuple[DrafterStatus, ...]
    target_bytes: int | None = None
    kv_bytes: int | None = None
    calibration: Mapping[str, Any] | None = None
    notices: tuple[str, ...] = ()
    fingerprint: str | None = None
    kernels: str | None = None
    num_slots: int = 1
    thinks: bool = False
    server: Server | None = None

    @property
    def held_bytes(self) -> int | None:
        """All that is held: target, context and drafters; a model that several drafters share is
        counted once. None where nothing is known."""
        held = dict[str, int]()
        for each in self.drafters:
            part = each.shares or each.name
            held[part] = max(held.get(part, 0), each.memory_bytes or 0)
        return sum(part or 0 for part in (self.target_bytes, self.kv_bytes, *held.values())) or None
