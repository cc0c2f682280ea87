"""Replies for other programs, which send a whole conversation each time.

Contract: `answer` queues a reply among those of the pages, with the same engine, settings and
exactness. At most `most_waiting` of all replies may wait. Each conversation is logged under the
source of programs and is in no page's list.

`place` finds the longest beginning of a request's conversation that was logged, and makes the turn
that follows there with the messages after it alone, so that the log grows with what is new. A
history that was changed becomes a branch, another reply to the same messages a reply beside the
first. A request without earlier messages begins a conversation, however alike to another it is. So
does one that is not among the newest conversations (record.message_tree), or the MOST_ALIKE newest
that begin alike, or was logged without its texts by an earlier process. What is to be found must
have been written.

Not here: the interfaces by which programs ask (api), writing turns (journal).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.service import ChatService
from localspec.chat.titles import title_of
from localspec.chat.turn import Reply, ReplySettings, decided, shared
from localspec.core.backend import Message, Request, Role
from localspec.core.errors import EngineLost, QueueFull, RequestError, StoreError
from localspec.core.workloads import AS_SET
from localspec.record.rows import API, StoredMessage
from localspec.record.store import Store

MOST_WAITING = 32
MOST_ALIKE = 64  # conversations that begin with one text


class ProgramService:
    def __init__(self, service: ChatService, most_waiting: int = MOST_WAITING) -> None:
        self.service = service
        self._most_waiting = most_waiting
        self._asking = threading.Lock()

    def answer(self, request: Request, checking: str = AS_SET) -> Reply:
        """Queue the reply. request: its workload may be AUTO; a seed is drawn where it has none.
        checking: see workloads.decide.

        Raises QueueFull, and ContextOverflow or RequestError with nothing stored; while the model
        loads, or does not answer, the request is checked when its turn begins.
        """
        with self._asking:  # of two that ask at once, the first may take the last place
            num_waiting = self.service.worker.num_waiting
            if num_waiting >= self._most_waiting:
                num_slots = self.service.lifecycle.num_slots
                raise QueueFull(num_waiting, self._usual_seconds(), num_slots)
            wanted = ReplySettings(
                **shared(request), system_prompt=request.system_prompt, checking=checking
            )
            settings = decided(wanted, self.service.workloads, asked_in(request.messages))
            request = replace(request, **shared(settings))
            with suppress(EngineLost):  # the next engine checks it
                self.service.check(request)
            self.service.flush()  # a reply that has just ended is found in the log
            reply = Reply(place(self.service.store, request), settings, request)
            self.service.journal.add(reply.pending)
            self.service.worker.queue(reply)
            return reply

    def count_tokens(self, request: Request) -> int:
        """Of its prompt. Raises LocalspecError, also while no model is loaded."""
        backend, _ = self.service.lifecycle.require()
        return backend.count_tokens(request.messages, request.tools)

    def prompt_tokens(self, request: Request) -> tuple[int, ...]:
        """Of its prompt. Raises LocalspecError, also while no model is loaded."""
        backend, _ = self.service.lifecycle.require()
        tokens = backend.prompt_tokens(request)
        if tokens is None:
            raise RequestError("The server that answers here does not tell the tokens of a text.")
        return tokens

    def _usual_seconds(self) -> float:
        """How long a reply takes, by the one that ended last."""
        latest = self.service.latest
        stats = None if latest is None else latest.view.stats  # without the time in the queue
        reply_ms = None if stats is None else stats.told("reply_ms")
        return 1.0 if reply_ms is None else reply_ms / 1000


# which messages of a request are in the log already


def place(store: Store, request: Request) -> PendingTurn:
    """The turn to be queued. The log keeps a system prompt with the turn."""
    is_system_apart = request.system_prompt != "" and len(request.messages) > 1
    messages = request.messages[int(is_system_apart) :]
    system_prompt = request.system_prompt if is_system_apart else ""
    found = list[StoredMessage]()
    if len(messages) > 1:
        with suppress(StoreError):  # what cannot be found now is logged once more
            found = _logged(store, system_prompt, messages)
    if not found:
        title = title_of(asked_in(messages))
        return _turn(OpenConversation(0, title, source=API), messages)
    last, stored_id = found[-1], found[-1].conversation_id
    conversation = OpenConversation(stored_id, "", stored_id, source=API)
    rest = messages[len(found) :]
    if not rest:
        return _turn(conversation, messages[-1:], prompt_id=last.id)
    return _turn(conversation, rest, parent_id=last.id)


def _logged(store: Store, system_prompt: str, messages: Sequence[Message]) -> list[StoredMessage]:
    """The longest logged beginning of these messages, of equals the newest."""
    best = list[StoredMessage]()
    firsts = store.message_tree.beginnings(API, _as_logged(messages[0]).content)
    for stored_id in dict.fromkeys([first.conversation_id for first in firsts][:MOST_ALIKE]):
        found = store.conversation(stored_id)
        if found is not None and (found.system_prompt or "") == system_prompt:
            best = max(best, _path(store.messages(stored_id), messages), key=len)
        if len(best) >= len(messages) - 1:  # all that was said before: the usual case
            break
    return best


def _path(stored: Sequence[StoredMessage], messages: Sequence[Message]) -> list[StoredMessage]:
    """The longest path from a first message on that these messages say."""
    by_id, below = (
        {one.id: one for one in stored},
        defaultdict[int | None, list[StoredMessage]](list),
    )
    for one in stored:
        below[one.parent_id].append(one)
    level, next_level = list[StoredMessage](), below[None]
    for message in messages:
        next_level = [one for one in next_level if _is_said(one, message)]
        if not next_level:
            break
        level, next_level = next_level, [child for one in next_level for child in below[one.id]]
    path = level[-1:]
    while path and path[0].parent_id is not None:
        path.insert(0, by_id[path[0].parent_id])
    return path


def _is_said(stored: StoredMessage, message: Message) -> bool:
    """Whether the log has this message so. Calls of tools are no text for a program; a text that
    was not logged is empty."""
    logged = _as_logged(message)
    if stored.role != logged.role or stored.state == "draft":
        return False
    if not stored.is_logged and not stored.text:
        return False
    if message.tool_calls:
        return all(call.name in stored.text for call in message.tool_calls)
    if message.role == "assistant":
        return stored.text.strip() == message.content.strip()
    return stored.text == logged.content


def _turn(
    conversation: OpenConversation,
    messages: Sequence[Message],
    parent_id: int | None = None,
    prompt_id: int | None = None,
) -> PendingTurn:
    """Answers the last of these messages; the others are stored before it."""
    *history, asked = map(_as_logged, messages)
    return PendingTurn(
        conversation,
        asked.content,
        parent_id,
        prompt_id=prompt_id,
        role=asked.role,
        history=tuple(history),
    )


def _as_logged(message: Message) -> Message:
    """The log has no tools: their answers are the person's, calls are text."""
    role: Role = "user" if message.role == "tool" else message.role
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return Message(role, "\n".join(text for text in (message.content, *calls) if text))


def asked_in(messages: Sequence[Message]) -> str:
    """The person's newest message."""
    asked = (message.content for message in reversed(messages) if message.role == "user")
    return next(asked, "")
