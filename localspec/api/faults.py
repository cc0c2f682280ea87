"""What goes wrong, in the error formats of OpenAI and Anthropic.

Contract: every answer that is no reply is JSON with the sentence for a person, a type and, for
OpenAI's clients, the field and a code. `fault_of` gives the status that the clients tell apart.

Source: platform.openai.com/docs/guides/error-codes; docs.anthropic.com/en/api/errors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response

from localspec.core.errors import (
    ContextOverflow,
    LocalspecError,
    QueueFull,
    RequestError,
    UnexpectedFault,
)

MESSAGES_PATH = "/v1/messages"  # what lies there is Anthropic's
Scope = MutableMapping[str, Any]
CLOSED_BY_CLIENT = 499  # nobody reads it
# Clients of both makers repeat a request after 5xx, unless the answer says otherwise.
NOT_AGAIN = {"x-should-retry": "false"}
REQUEST_ID = "localspec.request_id"  # In the scope: the id that the answer carries.

# By status: OpenAI's type, Anthropic's type.
TYPES: Mapping[int, tuple[str, str]] = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
}
UNEXPECTED = ("server_error", "api_error")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """status: of HTTP. message: a sentence. param: the field that is wrong. code: a word for
    programs. headers: of the answer. for_anthropic: the sentence in words that clients of
    Anthropic's look for, "" where any will do."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    for_anthropic: str = ""

    def body(self, scope: Scope) -> dict[str, Any]:
        """In the format that the client reads."""
        for_openai, for_anthropic = TYPES.get(self.status, UNEXPECTED)
        if is_anthropics(scope):
            details = {"details": {"error_code": self.code}} if self.code else {}
            message = self.for_anthropic or self.message
            told = {"type": for_anthropic, "message": message, **details}
            return {"type": "error", "error": told, "request_id": scope.get(REQUEST_ID)}
        error = {"message": self.message, "type": for_openai, "param": self.param}
        return {"error": {**error, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        return JSONResponse(self.body(scope), self.status, dict(self.headers))


def is_anthropics(scope: Scope) -> bool:
    """Whether the client is one of Anthropic's, by the path or by the header that those send."""
    return scope["path"].startswith(MESSAGES_PATH) or "anthropic-version" in Headers(scope=scope)


class Refused(Exception):
    """A request that is answered with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refusal(message: str, param: str | None = None) -> Refused:
    return Refused(Fault(400, message, param=param))


def fault_in_stream(error: Exception) -> Fault:
    """As `fault_of`, where no server prints an unexpected fault."""
    if not isinstance(error, Refused | LocalspecError):
        log.exception("a stream failed")
    return fault_of(error)


def fault_of(error: Exception) -> Fault:
    """The answer to an error of ours, to fields that cannot be read, or to an unexpected fault."""
    if isinstance(error, Refused):
        return error.fault
    if isinstance(error, ValidationError):
        return _invalid(error)
    if isinstance(error, QueueFull):
        headers = {"retry-after": str(error.retry_after_s)}
        return Fault(429, str(error), "queue_full", headers=headers)
    if isinstance(error, ContextOverflow):
        return _overflow(error)
    if isinstance(error, RequestError):
        return Fault(400, str(error), None, error.field)
    if isinstance(error, UnexpectedFault):
        return Fault(500, str(error), "internal_error")
    if isinstance(error, LocalspecError):
        return Fault(503, str(error), "unavailable")
    sentence = f"localspec failed by an unexpected fault ({type(error).__name__})."
    return Fault(500, sentence, "internal_error")


def _overflow(error: ContextOverflow) -> Fault:
    """In the words by which clients know it: LiteLLM OpenAI's, and Claude Code Anthropic's, after
    which it shortens the conversation by itself."""
    length, num_tokens = error.context_length, error.num_prompt_tokens
    openais = f"This model's maximum context length is {length} tokens. {error}"
    anthropics = f"prompt is too long: {num_tokens} tokens > {length} maximum. {error}"
    code = "context_length_exceeded"
    return Fault(400, openais, code, error.field, for_anthropic=anthropics)


def _invalid(error: ValidationError) -> Fault:
    """Of a field of several kinds, by the kind that the value comes nearest to."""
    found = error.errors(include_url=False, include_context=False)
    nearest = max(found, key=lambda one: len(one["loc"]))
    if not nearest["loc"]:
        return Fault(400, "The body is no JSON object. Send the fields of a request.")
    is_unknown = nearest["type"] == "extra_forbidden"
    end = len(nearest["loc"]) - is_unknown  # what is not known may have any name
    known = [part for part in nearest["loc"][:end] if not _is_kind(part)]
    param = ".".join(map(str, (*known, *nearest["loc"][end:])))
    if is_unknown:
        return Fault(400, f"localspec does not know the field {param!r}.", "unknown_field", param)
    return Fault(400, f"{param}: {nearest['msg']}.", param=param)


def _is_kind(part: int | str) -> bool:
    """Whether this part of a place is pydantic's word for one of a field's kinds, such as
    list[Part] or constrained-str."""
    return isinstance(part, str) and (part == "str" or not re.fullmatch("[a-z_]+", part))
