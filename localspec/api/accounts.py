"""What an answer says of itself: tokens counted as OpenAI does, and how it was drafted.

Contract: `usage_of` counts a prompt once, however many choices it was given. The accepted and
rejected prediction tokens are those of all drafts, whoever made them. `speculation_of` is our
extension of the interfaces: names and definitions are those of `backend.TurnStats`; unknown is
null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.api.fields import StreamOptions
from localspec.chat.service import Reply
from localspec.core.figures import figure_names
from localspec.core.turn_stats import TurnStats


class StreamUsage:
    """The usage that the events of a stream tell. num_choices: of each prompt."""

    def __init__(self, options: StreamOptions | None, num_choices: int) -> None:
        self.has_event = options is not None and bool(options.include_usage)
        self._is_in_all = options is not None and bool(options.continuous_usage_stats)
        self._num_choices = num_choices
        self._ended = list[TurnStats]()

    def so_far(self, stats: TurnStats | None = None) -> dict[str, Any]:
        """Return the field of an event beside the last. stats: of the choice under way."""
        if self._is_in_all and stats is not None:
            return {"usage": usage_of([*self._ended, stats], self._num_choices)}
        return {"usage": None} if self.has_event else {}

    def end(self, stats: TurnStats) -> None:
        """Count a choice that has ended."""
        self._ended.append(stats)

    def whole(self) -> dict[str, Any]:
        return usage_of(self._ended, self._num_choices)


def usage_of(turns: Sequence[TurnStats], num_choices: int) -> dict[str, Any]:
    """In the format of chat completions. num_choices: of each prompt; they stand together."""
    of_prompts = turns[::num_choices]
    num_prompt_tokens = sum(turn.num_prompt_tokens for turn in of_prompts)
    num_reused_tokens = sum(turn.num_reused_tokens for turn in of_prompts)
    num_output_tokens = sum(turn.num_output_tokens for turn in turns)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_reused_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(turn.num_thinking_tokens for turn in turns),
            **prediction_tokens(turns),
        },
    }


def prediction_tokens(turns: Sequence[TurnStats]) -> dict[str, int]:
    """Left out where a server did not tell them."""
    if any(turn.told("num_draft_tokens") is None for turn in turns):
        return {}
    num_accepted = sum(turn.num_accepted_tokens for turn in turns)
    num_drafted = sum(turn.num_draft_tokens for turn in turns)
    return {
        "accepted_prediction_tokens": num_accepted,
        "rejected_prediction_tokens": num_drafted - num_accepted,
    }


def speculation_of(reply: Reply, stats: TurnStats) -> dict[str, Any]:
    """How one reply was drafted; off: why nothing was. With the seed and the kind of text, by which
    it can be made again."""
    return {
        **{name: stats.told(name) for name in figure_names("api")},
        "off": None if stats.off is None else stats.off.text,
        "seed": reply.settings.sampling.seed,
        "workload": reply.settings.workload,
    }
