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
from urllib.parse import urlsplit

from localspec.backend import Message
from localspec.errors import ConfigError, first_line
from localspec.options import RemoteServer, is_loopback
from localspec.proxies import require_usable_proxies

if TYPE_CHECKING:
    import httpx2

LOOK_S = 5.0
COUNT_S = 3.0  # a page waits for the answer
MAX_NAMED = 8  # models in a sentence
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
    so far. drafts: in its streams. counters: prefix of its counters in /metrics.
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
            "It decides by itself whether and how it drafts, for all requests alike, so a way of "
            "drafting cannot be chosen here, nor plain decoding beside it.",
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


def client_of(server: RemoteServer) -> httpx2.Client:
    """For short questions, with the key. Raises ConfigError for a proxy that cannot be used."""
    import httpx2

    url = server.address
    if uses_proxies(url):
        require_usable_proxies()
    return httpx2.Client(
        base_url=url,
        headers={"authorization": f"Bearer {server.key}"} if server.key else {},
        timeout=LOOK_S,
        trust_env=uses_proxies(url),
    )


def uses_proxies(url: str) -> bool:
    """A proxy of the environment is not asked for what runs on this machine."""
    return not is_loopback(urlsplit(url).hostname or "")


def look_at(server: RemoteServer, client: httpx2.Client) -> Found:
    """What the server is and offers. Raises ConfigError."""
    url = server.address
    models = _models(url, client)
    wanted = server.model or str(models[0]["id"])
    entry = next((one for one in models if one["id"] == wanted), None)
    names = tuple(str(one["id"]) for one in models)
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
        context if isinstance(context, int) else None,
        _version(kind, client),
    )


def _models(url: str, client: httpx2.Client) -> list[dict[str, Any]]:
    import httpx2

    try:
        answer = client.get("/v1/models")
    except httpx2.HTTPError as error:
        raise ConfigError(gone(url, error)) from error
    if answer.status_code in (401, 403):
        raise ConfigError(refused_key(url))
    try:
        models = [one for one in answer.json()["data"] if isinstance(one.get("id"), str)]
    except (ValueError, KeyError, TypeError, AttributeError):
        models = []
    if not models:
        raise ConfigError(
            f"{url}/v1/models answers with {answer.status_code} and no list of models, so this is "
            "no server with OpenAI's interface, or it serves no model yet. Check the address."
        )
    return models


def _version(kind: ServerKind, client: httpx2.Client) -> str | None:
    import httpx2

    path, name = kind.version
    try:
        found = client.get(path).json().get(name) if path else None
    except (httpx2.HTTPError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def num_tokens(found: Found, client: httpx2.Client, messages: tuple[Message, ...]) -> int | None:
    """Of a conversation as a prompt; None where the server does not tell it."""
    import httpx2

    if not found.kind.counts_tokens:
        return None
    is_begun = messages[-1].role == "assistant"
    fields: dict[str, Any] = {"model": found.model, "messages": as_json(messages)}
    fields |= dict(found.kind.continuing or {}) if is_begun else {"add_generation_prompt": True}
    try:
        count = client.post("/tokenize", json=fields, timeout=COUNT_S).json().get("count")
    except (httpx2.HTTPError, ValueError, AttributeError):
        return None
    return count if isinstance(count, int) else None


def as_json(messages: tuple[Message, ...]) -> list[dict[str, Any]]:
    return [{"role": one.role, "content": one.content} for one in messages]


def at_path(data: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None where there is none. Of a list the first."""

    def inside(value: Any, name: str) -> Any:
        value = value[0] if isinstance(value, list) and value else value
        return value.get(name) if isinstance(value, Mapping) else None

    return reduce(inside, path.split("."), data) if path else None


def gone(url: str, error: Exception) -> str:
    """A sentence on a server that cannot be reached."""
    said = first_line(error)
    if "CERTIFICATE" in said.upper():
        return f"The certificate of {url} is not trusted here: {said}. Install it on this machine."
    return (
        f"The server at {url} does not answer ({said}). Check that it runs and that the address is "
        "right, then try again."
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
    return " ".join((said if isinstance(said, str) else json.dumps(said)).split())[:300]
