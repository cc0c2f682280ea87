"""The log as a Markdown report: the conversations, then their figures, then the machines.

Contract: pure; Contents in, lines out. Messages are block quotes, so that headings or tables inside
them are not the report's own. Unknown is a dash. An export of one conversation begins with its
settings as YAML, where unknown is null. Other branches of a conversation are only counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from localspec.core.figures import LABELS, figure_names
from localspec.core.leniency import label
from localspec.core.precisions import PRECISIONS
from localspec.core.turn_stats import NO_GAIN
from localspec.core.units import DASH, gib, took
from localspec.core.workloads import kind_words
from localspec.drafters.registry import label_of, labelled
from localspec.record.contents import Contents
from localspec.record.rows import Conversation, StoredMessage, clean

SPEAKERS = {"user": "You", "assistant": "Reply", "system": "System"}
SETTINGS = (
    "turn_id", "session_id", "model", "draft", "device", "dtype", "context_length",
    "drafter_requested", "num_draft_tokens_requested", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "seed", "max_tokens", "stop", "system_prompt", "workload",
    "leniency",
)  # fmt: skip
# Columns of a turn, and their names in YAML where they differ.
FRONT_MATTER = (
    "draft", "drafter", "mean_num_draft_tokens", "num_draft_tokens_requested",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens",
    "stop", "system_prompt",
)  # fmt: skip
YAML_NAMES = {"mean_num_draft_tokens": "gamma", "num_draft_tokens_requested": "gamma_fixed"}
# The columns of a turn in the report. Words of columns that are no figures stand in WORDS.
STATISTICS = ("turn_id", "state", "finish_reason", *figure_names("report"), "error")
WORDS = {
    **LABELS,
    "turn_id": "turn", "session_id": "session", "dtype": "precision", "draft": "draft model",
    "drafter_requested": "speed", "num_draft_tokens_requested": "guesses a round, fixed",
    "workload": "kind of text", "leniency": "looser checking", "finish_reason": "how it ended",
    "started_at_utc": "started, UTC",
    "gpu": "GPU", "vram_total_bytes": "GPU memory", "ram_total_bytes": "memory",
}  # fmt: skip
ENDED = {
    "eos": "done",
    "stop": "done",
    "length": "done (max tokens)",
    "cancelled": "stopped",
    "error": "failed",
    "interrupted": "cut short",
}
SAID: Mapping[str, Callable[[str], str]] = {
    "finish_reason": lambda value: ENDED.get(value, value),
    "dtype": lambda value: PRECISIONS.get(value, value),
    "drafter": label_of,
    "drafter_requested": label_of,
    "workload": kind_words,
    "no_speedup": lambda value: NO_GAIN.get(value, value),
    "reason": labelled,
}


def heading(column: str) -> str:
    """A column of the log in words."""
    return WORDS.get(column, column.replace("_", " "))


def in_words(column: str, value: Any) -> Any:
    """Times and sizes with their unit, the names of the log as the page says them."""
    if value is None:
        return None
    if column in SAID:
        return SAID[column](value)
    if column.endswith("_ms"):
        return took(value)
    return gib(value) if column.endswith("_bytes") else value


def markdown_lines(contents: Contents) -> Iterator[str]:
    if len(contents.conversations) == 1:
        yield from _front_matter(contents)
    yield "# localspec export"
    yield ""
    turns, store = contents.turns_by_conversation(), contents.store
    for one in contents.conversations:
        branch, num_messages = store.branch(one.tip_message_id), len(store.messages(one.id))
        yield from _conversation_lines(one, turns[one.id], branch, num_messages)
    for one in contents.conversations:
        yield from _figures_lines(one, turns[one.id])
    for session in contents.sessions:
        yield from _session_lines(session)


def _front_matter(contents: Contents) -> Iterator[str]:
    """The settings of one conversation as YAML. A setting that changed has its values in order;
    gamma is the mean number of draft tokens."""
    one = contents.conversations[0]
    shown = contents.store.branch(one.tip_message_id)
    ids = {message.id for message in shown}
    turns = [turn for turn in contents.turns if turn["message_id"] in ids]
    yield "---"
    yield f"title: {_yaml(one.title)}"
    yield f"created_at_utc: {_yaml(one.created_at_utc)}"
    # A copied reply has a model but no turn.
    yield _setting("model", [message.model for message in shown if message.role == "assistant"])
    for column in FRONT_MATTER:
        values = [in_words(column, turn[column]) for turn in turns]
        yield _setting(YAML_NAMES.get(column, column), values)
    yield "---"
    yield ""


def _setting(name: str, found: Sequence[object]) -> str:
    values = list(dict.fromkeys(found))
    listed = f"[{', '.join(map(_yaml, values))}]" if len(values) > 1 else None
    return f"{name}: {listed or _yaml(values[0] if values else None)}"


def _yaml(value: object) -> str:
    """A YAML scalar: that of JSON, but for three characters that end a line in YAML."""
    text = json.dumps(clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    for end in "\x85\u2028\u2029":
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text


def _session_lines(session: Mapping[str, Any]) -> Iterator[str]:
    yield f"## Session {session['id']}: machine and versions"
    yield ""
    named = [name for name in session if name != "id"]
    yield from table(("what", "value"), ((heading(n), in_words(n, session[n])) for n in named))


def _conversation_lines(
    conversation: Conversation,
    turns: Sequence[Mapping[str, Any]],
    branch: Sequence[StoredMessage],
    num_messages: int,
) -> Iterator[str]:
    turn_of = {turn["message_id"]: turn for turn in turns}
    yield f"## Conversation {conversation.id}: {_cell(conversation.title)}"
    yield ""
    yield f"Started {conversation.created_at_utc}."
    yield ""
    for message in branch:
        yield from _message_lines(message, turn_of.get(message.id))
    if others := num_messages - len(branch):
        yield f"Messages on other branches, not shown: {others}. JSONL and the database hold them."
        yield ""


def _figures_lines(conversation: Conversation, turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not turns:
        return
    yield f"## Figures of conversation {conversation.id}"
    for title, columns in (("Settings", SETTINGS), ("Statistics", STATISTICS)):
        yield from ("", f"### {title}", "")
        yield from _turns_table(columns, turns)


def _turns_table(columns: Sequence[str], turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = ([in_words(name, turn[name]) for name in columns] for turn in turns)
    yield from table([heading(name) for name in columns], rows)


def _message_lines(message: StoredMessage, turn: Mapping[str, Any] | None) -> Iterator[str]:
    number = "" if turn is None else f", turn {turn['turn_id']}"
    state = "" if message.state == "complete" else f", {message.state}"
    yield f"### {SPEAKERS[message.role]}{number}{state}{_leniency(turn)}"
    yield ""
    if message.thinking:
        yield "Thought, which is no part of the reply:"
        yield ""
        yield from _quoted(message.thinking, "> > ")
        yield "Reply:"
        yield ""
    yield from _quoted(message.text, "> ")


def _quoted(text: str, sign: str) -> Iterator[str]:
    # A lone CR ends a line in Markdown too and would leave the quote.
    for line in clean(text).replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        yield f"{sign}{line}".rstrip()
    yield ""


def _leniency(turn: Mapping[str, Any] | None) -> str:
    if turn is None or turn["exact"] is not False:
        return ""
    return f" ({label(turn['num_lenient_tokens'] or 0, turn['num_output_tokens'] or 0)})"


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """And an empty line behind it. None is a dash."""
    yield _row(names)
    yield _row(["---"] * len(names))
    for row in rows:
        yield _row([_cell(value) for value in row])
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4f}".rstrip("0").rstrip(".")
    return " ".join(clean(str(value)).replace("\\", "\\\\").replace("|", "\\|").split())
