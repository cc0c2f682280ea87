"""The types of the log, and their conversion to rows and back.

Contract: pure. A row holds only what SQLite TEXT, INTEGER and REAL hold safely. Texts round-trip
exactly: SQLite TEXT cannot hold lone surrogates and many tools stop at NUL, so such a message has
U+FFFD in `text`, and the exact text as a JSON string in `text_exact`; any other column only gets
the U+FFFD.

Not here: SQL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from localspec.core.backend import Role
from localspec.core.decoding import Step
from localspec.core.errors import RequestError
from localspec.core.figures import figure_names
from localspec.core.files import parsed
from localspec.core.turn_stats import TurnStats
from localspec.core.visible import one_line

MessageState = Literal["draft", "complete", "stopped", "error", "interrupted"]
MOST_OTHERS = 15  # combinations whose learnt state is kept beside the one that is saved
MAX_TITLE_LENGTH = 200
EARLIEST_TIME = datetime(1970, 1, 1, tzinfo=UTC)  # No chat with a program of this kind is older.
# Numbers above this are times in milliseconds: as seconds they would lie after the year 5000.
MAX_SECONDS = 100_000_000_000
PAGE, API = "page", "api"  # where a conversation was held
STATE_AFTER: Mapping[str, MessageState] = {
    "cancelled": "stopped",
    "error": "error",
    "interrupted": "interrupted",
}
STEP_COLUMNS = (
    "drafter", "num_draft_tokens", "num_accepted_tokens", "num_output_tokens", "draft_ms",
    "verify_ms", "context_length", "is_probe", "signal", "num_lenient_tokens", "plain_ms",
    "num_checked_tokens", "num_filled_tokens", "filler",
)  # fmt: skip
LEFT_OUT_OF_MESSAGES = ("text_exact", "deleted_at_utc", "children_ids")
LEFT_OUT_OF_TURNS = ("id", "token_ids", "provenance", "drafted", "is_copy")


@dataclass(frozen=True)
class SessionInfo:
    """The machine and the versions of one start of the program; None where not known."""

    app_version: str | None = None
    device: str | None = None
    gpu: str | None = None
    driver: str | None = None
    vram_total_bytes: int | None = None
    ram_total_bytes: int | None = None
    torch: str | None = None
    transformers: str | None = None
    bitsandbytes: str | None = None
    python: str | None = None
    platform: str | None = None


@dataclass(frozen=True)
class TurnSettings:
    """Everything needed to request the same turn again; None where not known or not set."""

    model: str | None = None
    draft: str | None = None
    device: str | None = None
    dtype: str | None = None
    drafter_requested: str | None = None
    num_draft_tokens_requested: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None
    context_length: int | None = None
    workload: str | None = None
    leniency: str | None = None  # the rule as JSON; None: exact
    target_fingerprint: str | None = None  # of the model's files
    kernels: str | None = None
    num_left_out: int | None = None  # oldest messages that the prompt was made without
    stop: str | None = None  # stop strings as a JSON list; None: none
    thinks: int | None = None  # 1: told to, 0: told not to
    thinking_budget: int | None = None
    is_raw: int | None = None  # 1: the prompt was read without a chat format
    grammar: str | None = None  # what the reply was held to; None: any text

    def without_texts(self) -> TurnSettings:
        """Where texts are not to be logged."""
        return replace(self, system_prompt=None, stop=None, grammar=None)


@dataclass(frozen=True)
class StoredMessage:
    """One node of a conversation's tree. parent_id: None for a first message. model: that wrote it;
    is_edited: a person rewrote the reply. thinking: what the model thought before it."""

    id: int
    conversation_id: int
    parent_id: int | None
    role: Role
    text: str
    state: MessageState
    created_at_utc: str
    is_logged: bool = True  # False: its text was not to be written
    model: str | None = None
    is_edited: bool = False
    thinking: str = ""


@dataclass(frozen=True)
class Conversation:
    """One conversation. tip_message_id: the end of the branch last in use, None when empty.
    system_prompt: of its latest turn, None before the first. title_by: who wrote the title: the
    first words, the model or a person; when_full: ask, roll or stop; None where not known.
    settings: as the page keeps them. source: where it was held."""

    id: int
    title: str
    created_at_utc: str
    tip_message_id: int | None
    is_pinned: bool = False
    system_prompt: str | None = None
    folder_id: int | None = None
    title_by: str | None = None
    when_full: str | None = None
    settings: str | None = None
    source: str = PAGE


@dataclass(frozen=True)
class RecentGain:
    """gain: of num_replies whole replies of the model together, times plain decoding."""

    model: str
    gain: float
    num_replies: int


@dataclass(frozen=True)
class ContinuedReply:
    """The reply that another one continues, and so begins with."""

    message_id: int
    text: str
    thinking: str = ""


@dataclass(frozen=True)
class Turn:
    """A running turn, and the assistant message that holds its reply."""

    turn_id: int
    message_id: int


@dataclass(frozen=True)
class TurnEnd:
    """How a turn ended. text, thinking: of the whole reply. token_ids, provenance: of its new part.
    drafted: what its rounds proposed, packed (record.drafted)."""

    text: str
    token_ids: Sequence[int]
    provenance: Sequence[str]
    stats: TurnStats | None
    steps: Sequence[Step]
    finish_reason: str
    error: str | None = None
    drafted: bytes | None = None
    thinking: str = ""


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def logged_time(at: datetime) -> str:
    """Return the time as the log holds it: ISO 8601 in UTC, no earlier than 1970 and no later than
    now. A time without an offset is taken as UTC."""
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    bounded = min(max(at, EARLIEST_TIME), datetime.now(UTC))
    return bounded.astimezone(UTC).isoformat(timespec="milliseconds")


def time_from(value: object) -> str:
    """Return the logged time of a text in ISO 8601, or of seconds or milliseconds since 1970.
    Raise ValueError for anything else."""
    if isinstance(value, str):
        return logged_time(datetime.fromisoformat(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("it is no time")
    seconds = value / 1000 if value > MAX_SECONDS else value
    return logged_time(datetime.fromtimestamp(min(max(seconds, 0), MAX_SECONDS), UTC))


def clean(text: str) -> str:
    """The text as any SQLite tool can read it: lone surrogates and NUL become U+FFFD."""
    text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


def title_line(text: str) -> str:
    """A title as one line of text without hidden characters."""
    return one_line(text)[:MAX_TITLE_LENGTH]


def visible_line(text: str, what: str) -> str:
    """A title or name as one line. Raises RequestError where nothing of it can be seen."""
    line = title_line(text)
    if not any(sign.isprintable() and not sign.isspace() for sign in line):
        raise RequestError(f"A {what} needs a visible character. The old {what} stays.")
    return line


def text_columns(text: str) -> dict[str, str | None]:
    cleaned = clean(text)
    return {"text": cleaned, "text_exact": None if cleaned == text else json.dumps(text)}


def bind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The values of a row in order, safe to hand to SQLite."""
    return tuple(clean(value) if isinstance(value, str) else value for value in row.values())


def message_from(row: Mapping[str, Any]) -> StoredMessage:
    fields = {name: value for name, value in row.items() if name not in LEFT_OUT_OF_MESSAGES}
    flags = {"is_logged": bool(row["is_logged"]), "is_edited": bool(row["is_edited"])}
    texts = {"text": text_of(row), "thinking": row["thinking"] or ""}
    return StoredMessage(**{**fields, **flags, **texts})


def text_of(message: Mapping[str, Any]) -> str:
    """As it was before it was made safe for SQLite."""
    exact = json_column(message["text_exact"])
    return exact if isinstance(exact, str) else str(message["text"])


def conversation_from(row: Mapping[str, Any]) -> Conversation:
    fields = {name: value for name, value in row.items() if name != "deleted_at_utc"}
    return Conversation(**{**fields, "is_pinned": bool(row["is_pinned"])})


def turn_from(row: dict[str, Any]) -> dict[str, Any]:
    """The same row, changed into the flat one that statistics, exports and comparisons use.
    drafted_by stays JSON: to read it takes as long as the rest of a row, and few readers need it
    (`counts`)."""
    if row["exact"] is not None:
        row["exact"] = bool(row["exact"])
    return row


def counts(text: str | None) -> dict[str, int] | None:
    """Numbers by name, as drafted_by has them; None for what cannot be read as such."""
    try:
        return {name: int(count) for name, count in parsed(text or "").items()}
    except (ValueError, TypeError, AttributeError, OverflowError):
        return None


def stats_row(stats: TurnStats | None) -> dict[str, Any]:
    """The columns of the statistics; all NULL where there are none."""
    if stats is None:
        return dict.fromkeys(figure_names())
    row = {name: stats.told(name) for name in figure_names()}
    exact = None if row["exact"] is None else int(stats.exact)
    made_by = None if row["drafter"] is None else json.dumps(dict(stats.drafted_by))
    reading_by = None if row["drafter"] is None else json.dumps(rounded(stats.reading_by))
    return {**row, "exact": exact, "drafted_by": made_by, "reading_by": reading_by}


def rounded(times_ms: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 2) for name, ms in times_ms.items()}


def step_row(turn_id: int, n: int, step: Step) -> dict[str, Any]:
    row = {name: getattr(step, name) for name in STEP_COLUMNS}
    signal = None if step.signal is None else json.dumps(step.signal, default=str)
    return {"turn_id": turn_id, "n": n, **row, "is_probe": int(step.is_probe), "signal": signal}


def json_column(text: str | None) -> Any:
    """The value of a column that holds JSON; None where it is empty or damaged."""
    try:
        return None if text is None else parsed(text)
    except ValueError:
        return None


def finite_json_column(text: str | None) -> Any:
    """Return the value of a column that holds JSON; None if it is empty, damaged or has a number
    that is not finite."""
    value = json_column(text)
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value


def state_from(text: str) -> dict[str, Any]:
    """A kept state: an object of finite numbers. Raises ValueError for anything else."""
    found = parsed(text)
    json.dumps(found, allow_nan=False)  # raises where a number is not finite
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found
