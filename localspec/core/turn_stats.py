"""The figures of one turn, as every backend tells them and the log keeps them.

Contract: unknown is None, never 0; of the counts those in `TurnStats.untold` are unknown.
Counts follow vLLM's definitions: `acceptance_rate` = accepted / drafted, `mean_accepted_length` =
1 + accepted / num_drafts (the bonus token counted), `draft_share` = accepted / output tokens.
`speedup` is of the whole reply, from the request to the last token, `decode_speedup` of its rounds
alone; both against plain decoding measured here under the same load. A turn that did not draft has
neither.

Not here: what plain decoding would have taken (controller.plain_baseline), formulas (speculation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from localspec.core.decoding import OFF, Step
from localspec.core.filling import guesses_of
from localspec.core.off_code import OffReason
from localspec.core.speculation import (
    MIN_COMPARED_TOKENS,
    DecodeCounts,
    NoSpeedup,
    no_speedup,
    plain_reply_ms,
    speedup,
)

NO_GAIN: Mapping[str, str] = {
    "load_changed": "gain not measurable: the computer was busy",
    "shared": "gain not measurable: other replies were written at the same time",
    "too_short": "gain not measurable: the reply was short",
}


@dataclass(frozen=True)
class TurnStats(DecodeCounts):
    """The running totals of one turn; `plus` adds a round. Times in ms.

    num_checked_tokens: None where a server does not tell it.
    drafter: the one that drafted most of the tokens, OFF when nothing was drafted.
    reply_ms: from the request to the last token. plain_decode_ms: of plain decoding for the same
    tokens; `compared` sets it. no_speedup: why there is none though plain decoding was measured;
    a reply that is too short alone still counts in sums over several. least_plain_decode_ms: where
    that time is not known but surely longer than decode_ms, what it is at least; in no sum.
    exact: False where the request asked for leniency; num_lenient_tokens: output tokens that exact
    checking would have refused.
    reason: why this drafter and γ, as a sentence. off: why nothing was drafted, None where
    something was or nothing is known yet. continued_from: whether a reply was continued from its
    own tokens or from its text encoded again; None for one from the start. num_thinking_tokens,
    thinking_ms: output tokens of the thought, and its rounds. untold: names of fields that a server
    did not tell; what stands in them means nothing. num_reused_tokens: of the prompt, those that
    were read before; num_disk_tokens: of these, those that came from the disk. reading_by: ms in
    which each drafter read the text before it could guess.
    """

    num_prompt_tokens: int
    num_reused_tokens: int = 0
    num_disk_tokens: int = 0
    num_steps: int = 0
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    plain_decode_ms: float | None = None
    least_plain_decode_ms: float | None = None
    reply_ms: float | None = None
    no_speedup: NoSpeedup | None = None
    exact: bool = True
    num_lenient_tokens: int = 0
    energy_joules: float | None = None  # of the whole card over this turn, None without a counter
    reason: str = ""
    off: OffReason | None = None
    continued_from: Literal["tokens", "text"] | None = None
    prompt_fingerprint: str | None = None  # of the prompt's ids
    num_thinking_tokens: int = 0
    thinking_ms: float = 0.0
    drafted_by: Mapping[str, int] = field(default_factory=dict)
    reading_by: Mapping[str, float] = field(default_factory=dict)
    untold: frozenset[str] = frozenset()

    def plus(self, step: Step) -> TurnStats:
        drafted = step.num_draft_tokens
        counts, reading = dict(self.drafted_by), dict(self.reading_by)
        if drafted:
            for name, guesses in guesses_of(step).items():
                counts[name] = counts.get(name, 0) + guesses.num_draft_tokens
        if step.reading_ms:
            reading[step.drafter] = reading.get(step.drafter, 0.0) + step.reading_ms
        return replace(
            self,
            num_output_tokens=self.num_output_tokens + step.num_output_tokens,
            num_steps=self.num_steps + 1,
            num_drafts=self.num_drafts + (1 if drafted else 0),
            num_draft_tokens=self.num_draft_tokens + drafted,
            num_accepted_tokens=self.num_accepted_tokens + step.num_accepted_tokens,
            num_checked_tokens=(self.num_checked_tokens or 0) + step.num_checked_tokens,
            num_lenient_tokens=self.num_lenient_tokens + step.num_lenient_tokens,
            decode_ms=self.decode_ms + step.round_ms,
            off=None if drafted else self.off,
            drafted_by=counts,
            reading_by=reading,
        )

    def explained(self, step: Step, reason: str) -> TurnStats:
        """Return it with the reason of its latest round, if that is one of the drafter which is
        named beside the reply: what another one did later says nothing of it."""
        return replace(self, reason=reason) if step.drafter == self.drafter else self

    def compared(
        self, plain_ms: float | None, least_ms: float | None = None, was_shared: bool = False
    ) -> TurnStats:
        """With what plain decoding would have taken, or at least; unchanged where nothing was
        drafted. was_shared: other replies were written in the same forwards."""
        if not self.num_draft_tokens:
            return self
        why = no_speedup(plain_ms, self.num_output_tokens, was_shared)
        has_gained = least_ms is not None and least_ms > self.decode_ms
        is_short = self.num_output_tokens < MIN_COMPARED_TOKENS
        if plain_ms is not None or is_short or not has_gained:
            least_ms = None
        return replace(
            self, plain_decode_ms=plain_ms, least_plain_decode_ms=least_ms, no_speedup=why
        )

    @property
    def drafter(self) -> str:
        return max(self.drafted_by, key=lambda name: self.drafted_by[name], default=OFF)

    def told(self, name: str) -> Any:
        """A field or figure by its name; None where a server did not tell it."""
        return None if name in self.untold else getattr(self, name)

    @property
    def plain_reply_ms(self) -> float | None:
        return plain_reply_ms(self.reply_ms, self.decode_ms, self.plain_decode_ms)

    @property
    def decode_speedup(self) -> float | None:
        return None if self.no_speedup else speedup(self.plain_decode_ms, self.decode_ms)

    @property
    def speedup(self) -> float | None:
        return None if self.no_speedup else speedup(self.plain_reply_ms, self.reply_ms)

    @property
    def least_decode_speedup(self) -> float | None:
        return speedup(self.least_plain_decode_ms, self.decode_ms)

    @property
    def least_speedup(self) -> float | None:
        """What `speedup` is at least, where it is not known itself but surely above 1."""
        least_ms = plain_reply_ms(self.reply_ms, self.decode_ms, self.least_plain_decode_ms)
        return speedup(least_ms, self.reply_ms)
