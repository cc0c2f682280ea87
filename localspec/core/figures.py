"""The figures of a reply: their names, their words, and where each is given.

A name is that of a property of `TurnStats` and of a column of the log. The order is that of a
report that a person reads. A new figure is one entry here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# The log and its CSV hold every figure; these are the further places.
Place = Literal["report", "command", "api"]


@dataclass(frozen=True)
class Figure:
    """label: in a person's words. places: where the figure is given besides the log."""

    name: str
    label: str
    places: tuple[Place, ...] = ()


EVERYWHERE: tuple[Place, ...] = ("report", "command", "api")

FIGURES = (
    Figure("drafter", "drafted by", EVERYWHERE),
    Figure("tokens_per_second", "tokens / s", EVERYWHERE),
    Figure("speedup", "whole reply, speed by that without drafting", EVERYWHERE),
    Figure("decode_speedup", "decoding, speed by that without drafting", ("report", "command")),
    Figure("no_speedup", "why no gain", EVERYWHERE),
    Figure("least_speedup", "whole reply, at least", EVERYWHERE),
    Figure("acceptance_rate", "right of all guesses", EVERYWHERE),
    Figure("draft_share", "guessed of the text", ("report", "command")),
    Figure("mean_accepted_length", "mean length", EVERYWHERE),
    Figure("mean_num_draft_tokens", "guesses a round", ("report", "api")),
    Figure("num_output_tokens", "tokens", ("report", "command")),
    Figure("num_prompt_tokens", "tokens read", ("report",)),
    Figure("num_reused_tokens", "of these known before", ("report",)),
    Figure("num_disk_tokens", "of these from the disk", ("report",)),
    Figure("num_steps", "checks", ("report",)),
    Figure("num_drafts", "checks of guesses", EVERYWHERE),
    Figure("num_draft_tokens", "guesses", EVERYWHERE),
    Figure("num_checked_tokens", "checked guesses", ("report",)),
    Figure("num_accepted_tokens", "right guesses", EVERYWHERE),
    Figure("num_lenient_tokens", "not exact", EVERYWHERE),
    Figure("ttft_ms", "first token", EVERYWHERE),
    Figure("prefill_ms", "reading", ("report", "command")),
    Figure("decode_ms", "decoding", ("report", "command")),
    Figure("reply_ms", "whole reply", ("report", "command")),
    Figure("plain_decode_ms", "decoding without drafting"),
    Figure("plain_reply_ms", "whole reply without drafting"),
    Figure("energy_joules", "energy of the card, joules"),
    Figure("num_thinking_tokens", "tokens of the thought"),
    Figure("thinking_ms", "thinking"),
    Figure("prompt_fingerprint", "fingerprint of the prompt"),
    Figure("continued_from", "continued from"),
    Figure("exact", "exact", EVERYWHERE),
    Figure("reason", "reason", EVERYWHERE),
    Figure("drafted_by", "guesses by drafter"),
    Figure("reading_by", "reading for guesses by drafter, ms"),
)


def figure_names(place: Place | None = None, figures: Sequence[Figure] = FIGURES) -> list[str]:
    """Return the names of the figures that are given at a place; of all without a place."""
    return [figure.name for figure in figures if place is None or place in figure.places]


LABELS = {figure.name: figure.label for figure in FIGURES}
