"""The server of the interfaces and of /metrics: paths, and errors in the interface's own format.

Contract: an application of Starlette that reads a body whole, answers one request and knows nothing
of keys, hosts and origins: those are checked before it (web.guard.programs). A request that names a
model which is not loaded is refused; one that names none is answered by what is loaded.

Not here: what a body may hold and how an answer looks (chat_completions and its neighbours).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from localspec.api import chat_completions, completions, messages, responses
from localspec.api.faults import Fault, Refused, Scope, fault_of, is_anthropics, refusal
from localspec.api.fields import Common
from localspec.api.metrics import Metrics
from localspec.api.replies import Asked, ask, streamed, whole_or_gone
from localspec.backend import Description, Request
from localspec.chat.programs import ProgramService
from localspec.errors import LocalspecError

M = TypeVar("M", bound=BaseModel)


def make_api(service: ProgramService) -> Starlette:
    """The application."""
    started, metrics = int(time.time()), Metrics(service)

    async def models(http: HttpRequest) -> Response:
        known = service.known
        found = [] if known is None else [_shown(known, started, http.scope)]
        if not is_anthropics(http.scope):
            return JSONResponse({"object": "list", "data": found})
        ends = dict.fromkeys(("first_id", "last_id"), found[0]["id"] if found else None)
        return JSONResponse({"data": found, "has_more": False, **ends})

    async def model(http: HttpRequest) -> Response:
        _require_model(service, http.path_params["name"])
        if service.known is None:
            why = service.service.lifecycle.phrase
            raise Refused(Fault(503, f"No model is loaded now: {why}", "unavailable"))
        return JSONResponse(_shown(service.known, started, http.scope))

    async def chat(http: HttpRequest) -> Response:
        fields = await _read(http, chat_completions.ChatFields)
        head = _head(service, fields, "chatcmpl", "chat.completion")
        answer = partial(chat_completions.answer, head=head)
        events = partial(chat_completions.events, head=head, has_usage_event=fields.has_usage_event)
        return await _replied(service, http, fields, fields.requests(), answer, events)

    async def complete(http: HttpRequest) -> Response:
        fields = await _read(http, completions.CompletionFields)
        head = _head(service, fields, "cmpl", "text_completion")
        num, has_usage_event = fields.num_choices, fields.has_usage_event
        answer = partial(completions.answer, head=head, num_choices=num)
        events = partial(
            completions.events, head=head, num_choices=num, has_usage_event=has_usage_event
        )
        return await _replied(service, http, fields, fields.requests(), answer, events)

    async def respond(http: HttpRequest) -> Response:
        fields = await _read(http, responses.ResponseFields)
        response = responses.Response(fields, _require_model(service, fields.model))
        answer = partial(responses.answer, response=response)
        events = partial(responses.events, response=response)
        return await _replied(service, http, fields, fields.requests(), answer, events)

    async def message(http: HttpRequest) -> Response:
        fields = await _read(http, messages.MessagesFields)
        name = _require_model(service, fields.model)
        head = messages.MessageHead(name, fields.stop_sequences)
        answer = partial(messages.answer, head=head)
        events = partial(messages.events, head=head)
        return await _replied(service, http, fields, fields.requests(), answer, events)

    async def count(http: HttpRequest) -> Response:
        fields = await _read(http, messages.CountFields)
        _require_model(service, fields.model)
        counted = await run_in_threadpool(service.count_tokens, *fields.requests())
        return JSONResponse({"input_tokens": counted})

    async def show_metrics(http: HttpRequest) -> Response:
        text = await run_in_threadpool(metrics.text)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/responses", respond, methods=["POST"]),
            Route("/v1/messages", message, methods=["POST"]),
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
        ],
        exception_handlers={
            error: _answer_fault
            for error in (Refused, LocalspecError, ValidationError, HTTPException, Exception)
        },
    )


async def _read(http: HttpRequest, fields: type[M]) -> M:
    """The body. Raises ValidationError, Refused."""
    try:
        # An answer may repeat a part of it, so what is no JSON must not come in.
        body = from_json(await http.body(), allow_inf_nan=False)
    except ValueError as error:
        raise refusal(f"Invalid JSON: {error}.") from error
    return fields.model_validate(body)


async def _replied(
    service: ProgramService,
    http: HttpRequest,
    fields: Common,
    requests: Sequence[Request],
    answer: Callable[[Asked], Coroutine[Any, Any, dict[str, Any]]],
    events: Callable[[Asked], AsyncGenerator[bytes | None]],
) -> Response:
    """The replies to these requests, whole or as a stream. Raises LocalspecError, Refused."""
    asked = await ask(service, requests, fields.checking, fields.most_calls)
    if fields.stream:
        return streamed(asked, http, events(asked))
    return JSONResponse(await whole_or_gone(http, asked, answer(asked)))


def _head(service: ProgramService, fields: Common, prefix: str, kind: str) -> chat_completions.Head:
    """Raises Refused for a model that is not loaded."""
    name, known = _require_model(service, fields.model), service.known
    if fields.stream and kind == "chat.completion":
        kind = "chat.completion.chunk"
    return chat_completions.Head(prefix, kind, name, None if known is None else known.fingerprint)


def _require_model(service: ProgramService, name: str | None) -> str:
    """The name of the model that answers. Raises Refused."""
    known = service.known
    if known is None:  # the first load is under way
        return name or "localspec"
    if name not in (None, known.target):
        sentence = f"There is no model {name!r} here, but {known.target!r}. Name that, or none."
        raise Refused(Fault(404, sentence, "model_not_found", "model"))
    return known.target


def _shown(model: Description, started: int, scope: Scope) -> dict[str, Any]:
    """In Anthropic's form, or in vLLM's of OpenAI's. started: when the server was."""
    name, length = model.target, model.context_length
    if is_anthropics(scope):
        since = datetime.fromtimestamp(started, UTC).isoformat()
        told = {"type": "model", "id": name, "display_name": name, "created_at": since}
        return {**told, "lifecycle": "active", "max_input_tokens": length, "max_tokens": length}
    fields = {"id": name, "object": "model", "created": started, "owned_by": "localspec"}
    return {**fields, "root": name, "max_model_len": length}


async def _answer_fault(http: HttpRequest, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path, or not by this method
        known = ", ".join(f"{min(one.methods)} {one.path}" for one in http.app.routes)
        sentence = f"{error.detail}: {http.method} {http.url.path}. What there is: {known}."
        fault = Fault(error.status_code, sentence, headers=error.headers or {})
    elif isinstance(error, Refused | LocalspecError | ValidationError):
        fault = fault_of(error)
    else:
        sentence = f"localspec failed by an unexpected fault ({type(error).__name__})."
        fault = Fault(500, sentence)  # the server prints where it was raised
    return fault.response(http.scope)
