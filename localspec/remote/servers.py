"""What servers with OpenAI's interface there are, and what one of them says of itself.

Contract: `look_at` asks a running server for its models and its program, and raises ConfigError
with the remedy where there is none. How programs differ is data (`ServerKind`); one that is not
known has OpenAI's interface and nothing else. No key is in an error, a log or a description.

Sources: the servers' own documentation and code (vLLM 0.32.0, SGLang 0.5.23, llama.cpp's server).

Not here: replies (server), what counters tell (counters).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localspec.core.backend import Message
from localspec.core.errors import ConfigError, LocalspecError, NotCounted
from localspec.core.options import RemoteServer
from localspec.core.units import clean

if TYPE_CHECKING:
    from localspec.remote.connection import Connection

LOOK_S = 5.0
COUNT_S = 3.0  # a page waits for the answer
MAX_NAMED = 8  # models in a sentence
MOST_MODELS = 1000  # that are offered
LONGEST_NAME = 256  # characters of a model's name, or of a version
LONGEST_SENTENCE = 300  # characters of a server's own words
LARGEST_COUNT = 2**31 - 1  # of tokens
READ_THE_USAGE = "Send the messages and read the usage of the reply."
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class DraftPaths:
    """Where the events of a stream tell what was drafted for the reply, as dotted paths; "" for a
    count that they do not tell."""

    num_drafts: str
    num_draft_tokens: str
    num_accepted_tokens: str


@dataclass(frozen=True)
class ServerKind:
    """What one program has beyond OpenAI's interface.

    owned_by: how its models name their owner. version: path and field that tell its version.
    context: field of a model that tells its context length. sampling: its names for
    top_k, min_p and repetition_penalty, none where it has none. no_top_k: its value for "not used".
    fields: of every request. continuing: fields by which the last message is continued, None where
    it cannot be. counts_tokens: whether /tokenize takes a conversation. can_switch_thinking: by the
    chat template's arguments. counts_as_it_goes: whether every event can hold the number of tokens
    so far. takes_drafter: whether a request may name the drafter, or none. drafts: in its streams.
    counters: prefix of its counters in /metrics.
    """

    name: str
    owned_by: str
    version: tuple[str, str] = ("", "")
    context: str = "max_model_len"
    sampling: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    no_top_k: int = -1
    fields: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    continuing: Mapping[str, Any] | None = None
    counts_tokens: bool = False
    can_switch_thinking: bool = False
    counts_as_it_goes: bool = False
    takes_drafter: bool = False
    drafts: DraftPaths | None = None
    counters: str = ""


SAME_NAMES = {name: name for name in ("top_k", "min_p", "repetition_penalty")}
AS_IT_STANDS = {"continue_final_message": True, "add_generation_prompt": False}

OTHER = ServerKind("OpenAI-compatible server", "")
KINDS = (
    ServerKind(
        "vLLM",
        "vllm",
        ("/version", "version"),
        sampling=SAME_NAMES,
        continuing=AS_IT_STANDS,
        counts_tokens=True,
        can_switch_thinking=True,
        counts_as_it_goes=True,
        counters="vllm",
    ),
    ServerKind(
        "SGLang",
        "sglang",
        ("/server_info", "version"),
        sampling=SAME_NAMES,
        fields={"return_spec_tokens_details": True},
        continuing={"continue_final_message": True},
        counts_tokens=True,
        can_switch_thinking=True,
        counts_as_it_goes=True,
        drafts=DraftPaths(
            "sglext.spec_tokens_details.spec_verify_ct",
            "sglext.spec_tokens_details.spec_num_proposed_drafts",
            "sglext.spec_tokens_details.spec_num_correct_drafts",
        ),
    ),
    ServerKind(
        "llama.cpp",
        "llamacpp",
        ("/props", "build_info"),
        context="meta.n_ctx",
        sampling={**SAME_NAMES, "repetition_penalty": "repeat_penalty"},
        can_switch_thinking=True,
        drafts=DraftPaths("", "timings.draft_n", "timings.draft_n_accepted"),
    ),
    ServerKind(
        "localspec",
        "localspec",
        sampling=SAME_NAMES,
        no_top_k=0,
        can_switch_thinking=True,
        takes_drafter=True,
        drafts=DraftPaths(
            "choices.speculation.num_drafts",
            "choices.speculation.num_draft_tokens",
            "choices.speculation.num_accepted_tokens",
        ),
    ),
)


@dataclass(frozen=True)
class Found:
    """A running server. url: without /v1. model: the one to ask. context_length: None where it does
    not tell it."""

    kind: ServerKind
    url: str
    model: str
    models: tuple[str, ...]
    context_length: int | None
    version: str | None

    @property
    def name(self) -> str:
        return f"{self.kind.name} {self.version}" if self.version else self.kind.name

    @property
    def limits(self) -> tuple[str, ...]:
        """What cannot be asked of it."""
        kind = self.kind
        told = [
            "It does not tell which drafters it has, so none can be chosen here."
            if kind.takes_drafter
            else "It decides by itself whether and how it drafts, for all requests alike, so a way "
            "of drafting cannot be chosen here, nor plain decoding beside it.",
            "It does not say which tokens were drafted, so there is no view of tokens and no "
            "replay.",
        ]
        if not kind.sampling:
            told.append("It takes no top-k, min-p and repetition penalty.")
        if not kind.counts_tokens:
            told.append("It does not count tokens, so how full the context is is not shown.")
        if kind.continuing is None:
            told.append("It cannot continue a reply.")
        if not kind.drafts and not kind.counters:
            told.append("It does not tell how many guesses were right.")
        return tuple(told)


def look_at(server: RemoteServer, connection: Connection) -> Found:
    """What the server is and offers. Raises ConfigError."""
    url = server.address
    models = _models(url, connection)
    wanted = server.model or str(models[0]["id"])
    entry = next((one for one in models if one["id"] == wanted), None)
    names = tuple(str(one["id"]) for one in models[:MOST_MODELS])
    if entry is None:
        raise ConfigError(
            f"The server at {url} has no model {wanted!r}. It offers: "
            f"{', '.join(names[:MAX_NAMED])}. Name one of them."
        )
    kind = next((one for one in KINDS if one.owned_by == entry.get("owned_by")), OTHER)
    context = at_path(entry, kind.context)
    return Found(
        kind,
        url,
        wanted,
        names,
        count_in(context),
        _version(kind, connection),
    )


def _models(url: str, connection: Connection) -> list[dict[str, Any]]:
    try:
        answer = connection.ask("GET", "/v1/models", LOOK_S)
    except LocalspecError as error:
        raise ConfigError(str(error)) from error
    if answer.status in (401, 403):
        raise ConfigError(refused_key(url))
    if answer.location:
        raise ConfigError(moved(url, answer.location))
    try:
        models = [one for one in answer.json()["data"] if is_name(one.get("id"))]
    except (ValueError, KeyError, TypeError, AttributeError):
        models = []
    if not models:
        raise ConfigError(
            f"{url}/v1/models answers with {answer.status} and no list of models, so this is "
            "no server with OpenAI's interface, or it serves no model yet. Check the address."
        )
    return models


def _version(kind: ServerKind, connection: Connection) -> str | None:
    path, name = kind.version
    try:
        version = connection.ask("GET", path, LOOK_S).json().get(name) if path else None
    except (LocalspecError, ValueError, AttributeError):
        return None
    return version if is_name(version) else None


def num_tokens(found: Found, connection: Connection, messages: tuple[Message, ...]) -> int:
    """Of a conversation as a prompt. Raises NotCounted with the reason."""
    name = "This server" if found.kind is OTHER else found.kind.name
    if not found.kind.counts_tokens:
        raise NotCounted(f"{name} does not count tokens. {READ_THE_USAGE}")
    is_begun = messages[-1].role == "assistant"
    fields: dict[str, Any] = {"model": found.model, "messages": as_json(messages)}
    fields |= dict(found.kind.continuing or {}) if is_begun else {"add_generation_prompt": True}
    try:
        answer = connection.ask("POST", "/tokenize", COUNT_S, fields)
    except LocalspecError as error:
        raise NotCounted(f"The tokens were not counted. {error}") from error
    try:
        body = answer.json()
    except ValueError:
        body = answer.text
    count = count_in(body.get("count")) if isinstance(body, Mapping) else None
    if count is None:
        raise NotCounted(
            f"{name} did not count the tokens. It answered with {answer.status}: "
            f"{sentence_in(body)}. {READ_THE_USAGE}"
        )
    return count


def as_json(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [{"role": one.role, "content": one.content} for one in messages]


def at_path(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none. Of a list the first."""

    def inside(value: Any, name: str) -> Any:
        value = value[0] if isinstance(value, list) and value else value
        return value.get(name) if isinstance(value, Mapping) else None

    return reduce(inside, path.split("."), data) if path else None


def is_name(value: Any) -> bool:
    """Whether a server's word for a model or a version can be shown."""
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= LONGEST_NAME


def count_in(value: Any) -> int | None:
    """The value where it can be a count of tokens, else None."""
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else None


def moved(url: str, location: str) -> str:
    """Return a sentence on a server that names another address."""
    return (
        f"The server at {url} sends everybody on to {location[:LONGEST_NAME]!r}. That was not "
        "followed. If you trust it, give that address instead."
    )


def refused_key(url: str) -> str:
    return (
        f"The server at {url} refused the key, or wants one. Set LOCALSPEC_REMOTE_KEY, name a file "
        "with --remote-key-file, or write the key on the Models tab."
    )


def sentence_in(body: Any) -> str:
    """The server's own words for an error, from the body of its answer."""
    inner = body.get("error", body) if isinstance(body, Mapping) else body
    said = inner.get("message") if isinstance(inner, Mapping) else inner
    words = clean(said if isinstance(said, str) else json.dumps(said))
    return " ".join(words.split())[:LONGEST_SENTENCE]
