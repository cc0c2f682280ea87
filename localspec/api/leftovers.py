"""The fields of a request that localspec does not act on: some are refused, the others ignored.

A field that would change the answer and cannot be done is refused, unless its value asks for
nothing. Every other field that localspec does not know is ignored, as vLLM does; the answer names
it in a header, and the log names it once.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from localspec.api.faults import refusal

HEADER = "x-localspec-ignored"
MOST_NAMED = 16  # Fields that the header names.
MOST_REMEMBERED = 256  # Fields that the log names while the program runs, each once.
MOST_LOOKED_AT = 256  # Unknown fields of one request; a hostile body may have a million.

BY_SCHEMA = "replies are held to a form by response_format or a strict tool."
BY_SAMPLING = "localspec samples by temperature, top_k, top_p, min_p and the penalties alone."
OF_REPLY = "localspec returns the text of the reply and its logprobs alone."
KEEPS_NOTHING = "localspec keeps no responses. Send the whole conversation."
RUNS_NOTHING = "localspec runs no tools of its own."

# Fields that change the answer and cannot be done: the values that ask for nothing, and the reason.
UNDOABLE: Mapping[str, tuple[tuple[object, ...], str]] = {
    "logit_bias": ((), "localspec has no such bias."),
    "suffix": (("",), "its models continue texts only."),
    "echo": ((False,), "localspec returns new text only."),
    "best_of": ((1,), "all choices are returned."),
    "min_tokens": ((0,), "a reply ends where the model ends it. Send ignore_eos, or leave it out."),
    "stop_token_ids": ((), "texts end a reply here. Send them as stop."),
    "include_stop_str_in_output": ((False,), "a reply ends before its stop text."),
    "skip_special_tokens": ((True,), "control tokens are no text of a reply."),
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "logits_processors", "samplers"), ((), BY_SAMPLING)
    ),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), ((1,), BY_SAMPLING)),
    **dict.fromkeys(
        ("use_beam_search", "early_stopping", "mirostat", "dry_multiplier", "xtc_probability"),
        ((0,), BY_SAMPLING),
    ),
    "repeat_penalty": ((1,), "its name here is repetition_penalty."),
    "n_predict": ((-1,), "its name here is max_tokens."),
    **dict.fromkeys(
        (
            "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
            "json_schema", "grammar", "regex", "ebnf",
        ),
        ((), BY_SCHEMA),
    ),
    **dict.fromkeys(("prompt_logprobs", "n_probs"), ((0,), OF_REPLY)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), ((False,), OF_REPLY)),
    **dict.fromkeys(("truncation", "truncate_prompt_tokens"), (("disabled",), "nothing is cut.")),
    "chat_template": ((), "the model's own chat format is used."),
    "documents": ((), "localspec reads the messages alone."),
    "functions": ((), "functions are sent as tools."),
    "function_call": (("auto", "none"), "functions are sent as tools."),
    "audio": ((), "localspec writes text."),
    **dict.fromkeys(("web_search_options", "mcp_servers", "container"), ((), RUNS_NOTHING)),
    **dict.fromkeys(("previous_response_id", "conversation", "prompt"), ((), KEEPS_NOTHING)),
    "background": ((False,), KEEPS_NOTHING),
    "top_logprobs": ((0,), "chat completions have them."),
}  # fmt: skip

# Fields without any effect on a reply, of the request and of its parts: nothing is lost with them.
HARMLESS = frozenset(
    {
        "cache_prompt", "cache_salt", "cache_control", "id_slot", "prompt_cache_options",
        "context_management", "client_metadata", "diagnostics", "inference_geo", "speed",
        "store", "verbosity", "effort", "task_budget", "max_tool_calls", "priority", "request_id",
        "spaces_between_special_tokens", "id", "status", "phase", "annotations", "signature",
        "reasoning_details",
    }
)  # fmt: skip

KNOWN = HARMLESS | UNDOABLE.keys()

log = logging.getLogger(__name__)


def refuse_undoable(fields: Mapping[str, Any], num_choices: int = 1) -> None:
    """Raise Refused for a field that asks for what cannot be done. num_choices: of each prompt."""
    for name in UNDOABLE.keys() & fields.keys():
        value, (allowed, why) = fields[name], UNDOABLE[name]
        if value not in allowed and not (name == "best_of" and value == num_choices):
            raise refusal(f"{name} is {value!r:.80}, but {why}", name)


class IgnoredLog:
    """Names ignored fields in the log, each once."""

    def __init__(self) -> None:
        self._named = set[str]()
        self._naming = threading.Lock()

    def name(self, path: str, fields: Iterable[str]) -> None:
        with self._naming:
            new = [name for name in map(printable, fields) if name not in self._named]
            room = MOST_REMEMBERED - len(self._named)
            self._named.update(new[: max(0, room)])
        if new and room > 0:
            log.warning("Ignored, since localspec does not know it: %s (%s)", ", ".join(new), path)


def header_of(fields: Iterable[str]) -> str:
    """Return the value of the header that names the ignored fields."""
    names = list(map(printable, islice(fields, MOST_NAMED + 1)))
    return ", ".join(names if len(names) <= MOST_NAMED else [*names[:-1], "and-others"])


def printable(name: str) -> str:
    """Return a stranger's field name as it can stand in a header and in a terminal."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:64]
