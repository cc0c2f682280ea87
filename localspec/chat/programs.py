"""Replies for other programs, which send a whole conversation each time.

Contract: `answer` queues a reply among those of the pages, with the same engine, settings and
exactness. At most `most_waiting` of all replies may wait. Each conversation is logged under the
source of the program and is in no page's list. `stop` ends a reply within one round.

Not here: the interfaces by which programs ask (api).
"""

from __future__ import annotations

import threading
from dataclasses import replace

from localspec.backend import Description, Message, Request, Role
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.service import ChatService
from localspec.chat.turn import Reply, ReplySettings, decided, title_of
from localspec.errors import QueueFull
from localspec.record.rows import API
from localspec.workloads import AS_SET

MOST_WAITING = 32


class ProgramService:
    """Over the service of the pages."""

    def __init__(self, service: ChatService, most_waiting: int = MOST_WAITING) -> None:
        self.service = service
        self._most_waiting = most_waiting
        self._asking = threading.Lock()

    @property
    def loaded(self) -> Description | None:
        """None while no model is loaded."""
        return self.service.lifecycle.loaded

    def answer(self, request: Request, checking: str = AS_SET, source: str = API) -> Reply:
        """Queue the reply. request: its workload may be AUTO; a seed is drawn where it has none.
        checking: see workloads.decide.

        Raises QueueFull, and ContextOverflow or RequestError with nothing stored; while the model
        loads, or does not answer, the request is checked when its turn begins.
        """
        with self._asking:  # of two that ask at once, the first may take the last place
            num_waiting = self.service.worker.num_waiting
            if num_waiting >= self._most_waiting:
                raise QueueFull(num_waiting, self._usual_seconds())
            settings = decided(
                _settings_of(request, checking), self.service.workloads, _asked_in(request)
            )
            request = replace(
                request,
                sampling=settings.sampling,
                workload=settings.workload,
                first_num_draft_tokens=settings.first_num_draft_tokens,
            )
            return self.service.queue(Reply(_turn_of(request, source), settings, request), request)

    def count_tokens(self, messages: tuple[Message, ...]) -> int:
        """Of a conversation as a prompt. Raises LocalspecError, also while no model is loaded."""
        backend, _ = self.service.lifecycle.require()
        return backend.count_tokens(messages)

    def stop(self, reply: Reply) -> None:
        """End it within one round, or take it out of the queue."""
        self.service.stop(reply)

    def _usual_seconds(self) -> float:
        """How long a reply takes, by the one that ended last."""
        latest = self.service.latest
        return 1.0 if latest is None else latest.view.seconds


def _settings_of(request: Request, checking: str) -> ReplySettings:
    """As the log keeps them."""
    return ReplySettings(
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        drafter=request.drafter,
        num_draft_tokens=request.num_draft_tokens,
        system_prompt=request.system_prompt,
        workload=request.workload,
        checking=checking,
        stop=request.stop,
        thinks=request.thinks,
        thinking_budget=request.thinking_budget,
    )


def _asked_in(request: Request) -> str:
    """The person's newest message."""
    asked = (message.content for message in reversed(request.messages) if message.role == "user")
    return next(asked, "")


def _as_logged(message: Message) -> Message:
    """The log has no tools: their answers are the person's, calls are text."""
    role: Role = "user" if message.role == "tool" else message.role
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return Message(role, "\n".join(text for text in (message.content, *calls) if text))


def _turn_of(request: Request, source: str) -> PendingTurn:
    """The turn, with all messages before the last as its history; the log keeps a system prompt
    with the turn."""
    is_system_apart = request.system_prompt != "" and len(request.messages) > 1
    *history, asked = map(_as_logged, request.messages[int(is_system_apart) :])
    conversation = OpenConversation(0, title_of(_asked_in(request)), source=source)
    return PendingTurn(conversation, asked.content, role=asked.role, history=tuple(history))
