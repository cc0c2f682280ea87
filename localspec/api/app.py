"""The server of the interfaces and of /metrics: paths, and errors in the interface's own format.

Contract: an application of Starlette that reads a body whole, answers one request and knows nothing
of keys, hosts and origins: those are checked before it (web.guard.programs). A request that names a
model which is not loaded is refused; one that names none is answered by what is loaded. During the
first load a request waits, for which names are right is known after it.

Not here: what a body may hold and how an answer looks (chat_completions and its neighbours).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from localspec import __version__
from localspec.api import chat_completions, completions, messages, responses, tokenize
from localspec.api.faults import Fault, Refused, Scope, fault_of, is_anthropics, refusal
from localspec.api.fields import Common
from localspec.api.labels import IGNORED
from localspec.api.leftovers import IgnoredLog
from localspec.api.metrics import Metrics
from localspec.api.replies import Asked, ask, streamed, whole_or_gone
from localspec.chat.programs import ProgramService
from localspec.core.backend import Description
from localspec.core.errors import LocalspecError

LOOK_S = 0.05
M = TypeVar("M", bound=Common)


def make_api(service: ProgramService) -> Starlette:
    """The application."""
    interfaces = _Interfaces(service)
    return Starlette(
        routes=[
            Route("/metrics", interfaces.metrics),
            Route("/health", interfaces.health),
            Route("/version", interfaces.version),
            Route("/tokenize", interfaces.tokenize, methods=["POST"]),
            Route("/v1/models", interfaces.models),
            Route("/v1/models/{name:path}", interfaces.model),
            Route("/v1/chat/completions", interfaces.chat, methods=["POST"]),
            Route("/v1/completions", interfaces.complete, methods=["POST"]),
            Route("/v1/responses", interfaces.respond, methods=["POST"]),
            Route("/v1/messages", interfaces.message, methods=["POST"]),
            Route("/v1/messages/count_tokens", interfaces.count, methods=["POST"]),
        ],
        exception_handlers={
            error: _answer_fault
            for error in (Refused, LocalspecError, ValidationError, HTTPException, Exception)
        },
    )


class _Interfaces:
    """What is answered at each path."""

    def __init__(self, service: ProgramService) -> None:
        self._service = service
        self._lifecycle = service.service.lifecycle
        self._started = int(time.time())
        self._metrics = Metrics(service.service)
        self._ignored_log = IgnoredLog()

    async def metrics(self, http: HttpRequest) -> Response:
        text = await run_in_threadpool(self._metrics.text)
        return PlainTextResponse(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(self, http: HttpRequest) -> Response:
        """200 while requests are answered, also while they wait for a load, as vLLM has it."""
        return Response(status_code=503 if self._lifecycle.phase == "failed" else 200)

    async def version(self, http: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def tokenize(self, http: HttpRequest) -> Response:
        fields = await self._read(http, tokenize.TokenizeFields)
        await self._answering(fields.model)
        requests = await run_in_threadpool(fields.requests)
        tokens = await run_in_threadpool(self._service.prompt_tokens, *requests)
        known = self._lifecycle.known
        length = None if known is None else known.context_length
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def models(self, http: HttpRequest) -> Response:
        known = await self._known()
        found = [] if known is None else [_shown(known, self._started, http.scope)]
        if not is_anthropics(http.scope):
            return JSONResponse({"object": "list", "data": found})
        ends = dict.fromkeys(("first_id", "last_id"), found[0]["id"] if found else None)
        return JSONResponse({"data": found, "has_more": False, **ends})

    async def model(self, http: HttpRequest) -> Response:
        known = await self._known()
        self._require_model(http.path_params["name"])
        if known is None:
            sentence = f"No model is loaded now: {self._lifecycle.phrase}"
            raise Refused(Fault(503, sentence, "unavailable"))
        return JSONResponse(_shown(known, self._started, http.scope))

    async def chat(self, http: HttpRequest) -> Response:
        fields = await self._read(http, chat_completions.ChatFields)
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        head = await self._head(fields, "chatcmpl", kind)
        answer = partial(chat_completions.answer, head=head)
        events = partial(chat_completions.events, head=head, usage=fields.stream_usage)
        return await self._replied(http, fields, answer, events)

    async def complete(self, http: HttpRequest) -> Response:
        fields = await self._read(http, completions.CompletionFields)
        head, num = await self._head(fields, "cmpl", "text_completion"), fields.num_choices
        answer = partial(completions.answer, head=head, num_choices=num)
        events = partial(completions.events, head=head, usage=fields.stream_usage)
        return await self._replied(http, fields, answer, events)

    async def respond(self, http: HttpRequest) -> Response:
        fields = await self._read(http, responses.ResponseFields)
        response = responses.Response(fields, await self._answering(fields.model))
        answer = partial(responses.answer, response=response)
        events = partial(responses.events, response=response)
        return await self._replied(http, fields, answer, events)

    async def message(self, http: HttpRequest) -> Response:
        fields = await self._read(http, messages.MessagesFields)
        model = await self._answering(fields.model)
        head = messages.MessageHead(model, fields.stop_sequences, fields.max_tokens)
        answer = partial(messages.answer, head=head)
        events = partial(messages.events, head=head)
        return await self._replied(http, fields, answer, events)

    async def count(self, http: HttpRequest) -> Response:
        fields = await self._read(http, messages.CountFields)
        await self._answering(fields.model)
        (request,) = await run_in_threadpool(fields.requests)
        counted = await run_in_threadpool(self._service.count_tokens, request)
        return JSONResponse({"input_tokens": counted})

    async def _read(self, http: HttpRequest, kind: type[M]) -> M:
        """The body. Raises ValidationError, Refused."""
        try:
            # An answer may repeat a part of it, so what is no JSON must not come in.
            body = from_json(await http.body(), allow_inf_nan=False)
        except ValueError as error:
            raise refusal(f"Invalid JSON: {error}.") from error
        fields = kind.model_validate(body)
        http.scope[IGNORED] += (ignored := fields.ignored())
        self._ignored_log.name(http.url.path, ignored)
        fields.drafter = fields.drafter or self._service.service.drafter
        return fields

    async def _replied(
        self,
        http: HttpRequest,
        fields: Common,
        answer: Callable[[Asked], Coroutine[Any, Any, dict[str, Any]]],
        events: Callable[[Asked], AsyncGenerator[bytes | None]],
    ) -> Response:
        """The replies to these requests, whole or as a stream. Raises LocalspecError, Refused."""
        requests = await run_in_threadpool(fields.requests)  # it may compile a schema
        asked = await ask(self._service, requests, fields.checking, fields.most_calls)
        if fields.stream:
            return streamed(asked, http, events(asked))
        return JSONResponse(await whole_or_gone(http, asked, answer(asked)))

    async def _head(self, fields: Common, prefix: str, kind: str) -> chat_completions.Head:
        """Raises Refused for a model that is not loaded."""
        name, known = await self._answering(fields.model), self._lifecycle.known
        fingerprint = None if known is None else known.fingerprint
        return chat_completions.Head(prefix, kind, name, fingerprint)

    async def _answering(self, name: str | None) -> str:
        """As `_require_model`, once it is known what is loaded."""
        await self._known()
        return self._require_model(name)

    async def _known(self) -> Description | None:
        """What is loaded, after the first load."""
        lifecycle = self._lifecycle
        while lifecycle.known is None and lifecycle.phase in ("loading", "restarting"):
            await asyncio.sleep(LOOK_S)
        return lifecycle.known

    def _require_model(self, name: str | None) -> str:
        """The name of the model that answers. Raises Refused."""
        known = self._lifecycle.known
        if known is None:  # the reply says why
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
    else:
        fault = fault_of(error)  # The server prints where an unexpected fault was raised.
    return fault.response(http.scope)
