"""The fields that the requests of all interfaces share, and the `Request` that they make.

Contract: a value that would have an effect which the engine does not have is refused. A field that
is not known is ignored, and the answer says so (leftovers). Fields without any effect on a reply
(`user`, `metadata`, ...) are taken. Beside the interface's own fields there are those of vLLM
(top_k, min_p, repetition_penalty, chat_template_kwargs with the switch for thinking) and ours for
drafting (drafter, num_draft_tokens, leniency, workload) and for thinking (thinking_budget).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from localspec.api.faults import refusal
from localspec.api.leftovers import KNOWN, MOST_LOOKED_AT, refuse_undoable
from localspec.chat.service import clean
from localspec.chat.turn import each_seeded
from localspec.core.backend import Message, Request, Role
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import RequestError
from localspec.core.workloads import AS_SET
from localspec.drafters.registry import REGISTRY

MOST_CHOICES = 16
MOST_LOGPROBS = 20  # as OpenAI's
ROLES: dict[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool",
}  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text")
NOTHING: tuple[object, ...] = (None, [], {})

StopText = Annotated[str, Field(min_length=1)]


class Fields(BaseModel):
    """An object of a request. A field that is not known and holds nothing counts as not sent:
    clients send an earlier reply back with all the fields that their own type of it has."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = cls.model_fields
        return {name: one for name, one in given.items() if name in known or one not in NOTHING}


class Part(BaseModel):
    """A part of a message's content; what is no text is refused in words."""

    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class TemplateSwitches(Fields):
    """What a chat template is told, by the names of the templates."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None


class StreamOptions(Fields):
    """include_usage: one more event, with the usage of the whole request; a response has it in its
    last one anyway. continuous_usage_stats: the usage so far in every event. include_obfuscation:
    there is none."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Common(Fields):
    """What every request may say. user, safety_identifier, metadata, and what asks for a cache,
    which there always is: taken, without effect here."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    drafter: str | None = None
    num_draft_tokens: int | None = None
    leniency: str | None = None
    workload: str | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    @property
    def checking(self) -> str:
        """See workloads.decide."""
        return AS_SET if self.leniency is None else self.leniency

    @property
    def most_calls(self) -> int | None:
        """Of tools, in a reply; None: as many as the model makes."""
        return None

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return 1

    def ignored(self) -> list[str]:
        """Return the names of the fields that are ignored. Raises Refused for a field that asks for
        what cannot be done."""
        refuse_undoable(self.model_extra or {}, self.num_choices)
        return list(dict.fromkeys(islice(unknown_fields(self), MOST_LOOKED_AT)))

    @property
    def continues_reply(self) -> bool:
        """Whether a reply that the messages end with is continued, instead of answered."""
        return False

    @property
    def thinks(self) -> bool | None:
        """Whether the model may think; None: as it does by itself."""
        told = self.chat_template_kwargs
        if told is None:
            return None
        return told.thinking if told.enable_thinking is None else told.enable_thinking

    def requests(self) -> list[Request]:
        """Return the requests of all choices. It may compile a schema, so it takes a while. Raises
        RequestError, Refused."""
        raise NotImplementedError

    def sampling(self) -> SamplingParams:
        """Raises RequestError."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k or 0,  # vLLM's word for none
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
        )

    def request(
        self, messages: tuple[Message, ...], max_tokens: int | None, stop: tuple[str, ...]
    ) -> Request:
        """Raises RequestError, Refused."""
        if not messages:
            raise refusal("There is no message to answer.", "messages")
        continues = self.continues_reply and messages[-1].role == "assistant"
        if continues and messages[-1].tool_calls:
            why = "so there is no text to continue. Send the answers of the tools."
            raise refusal(f"The last message calls tools, {why}", "messages")
        drafter, budget = self.drafter or AUTO, self.thinking_budget
        if budget is not None and max_tokens is not None and budget >= max_tokens:
            why = f"but must be less than the {max_tokens} tokens of the whole reply."
            raise refusal(f"thinking_budget is {budget}, {why}", "thinking_budget")
        if drafter not in (AUTO, OFF, *REGISTRY):
            known = ", ".join((AUTO, OFF, *REGISTRY))
            raise refusal(f"There is no drafter called {drafter!r}. Known: {known}.", "drafter")
        return Request(
            messages=messages,
            sampling=self.sampling(),
            max_tokens=max_tokens,
            stop=stop,
            drafter=drafter,
            num_draft_tokens=self.num_draft_tokens,
            workload=self.workload or AUTO,
            continues=continues,
            thinks=self.thinks,
            thinking_budget=budget,
            is_ceiling=True,
            ignores_end=bool(self.ignore_eos),
        )


def unknown_fields(fields: Fields, place: str = "") -> Iterator[str]:
    """Yield the names of unknown fields in an object and in its parts, which are at this place."""
    for name in fields.model_extra or ():
        if name not in KNOWN:
            yield f"{place}{name}"
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, Fields):
                yield from unknown_fields(part, f"{place}{name}.")


def choices_of(request: Request, count: int) -> list[Request]:
    """The requests of several replies: where a seed is given, each has the next one."""
    return [replace(request, sampling=one) for one in each_seeded(request.sampling, count)]


def role_of(name: str, param: str) -> Role:
    """Raises Refused."""
    if name not in ROLES:
        known = ", ".join(ROLES)
        raise refusal(f"A message has the role {name!r}, but must have one of {known}.", param)
    return ROLES[name]


def text_of(content: str | Sequence[Part] | None, param: str) -> str:
    """Raises Refused for what is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    for part in content:
        if part.type not in TEXT_PARTS or part.text is None:
            raise refusal(
                f"A message holds a part of type {part.type!r}, but the models that localspec "
                "loads read text only. Send its text.",
                param,
            )
    return clean("".join(part.text or "" for part in content))


def stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def refuse_unless(wanted: object, allowed: tuple[object, ...], param: str, why: str) -> None:
    """Raises Refused where a field asks for what the engine cannot do."""
    if wanted not in allowed:
        raise refusal(f"{param} is {wanted!r}, but {why}", param)


def require_choices(count: int, num_prompts: int = 1) -> None:
    """count: of each prompt."""
    if not 1 <= count * num_prompts <= MOST_CHOICES:
        each = f" for each of {num_prompts} prompts" if num_prompts != 1 else ""
        raise RequestError(
            f"n is {count}{each}, but the choices of a request must lie between 1 and "
            f"{MOST_CHOICES}. Choose a number in this range.",
            "n" if num_prompts == 1 else "prompt",
        )
