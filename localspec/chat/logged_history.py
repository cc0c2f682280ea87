"""Which messages of a program's request are in the log already.

A program sends its whole conversation with each request. `place` finds the longest beginning of it
that was logged, and makes the turn that follows there with the messages after it alone, so that the
log grows with what is new. A history that was changed becomes a branch, another reply to the same
messages a reply beside the first.

Contract: a request without earlier messages begins a conversation, however alike to another it is.
So does one that is not among the newest conversations (record.message_tree), or the MOST_ALIKE
newest that begin alike, or was logged without its texts by an earlier process. What is to be found
must have been written.

Not here: writing turns (journal).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from localspec.backend import Message, Request, Role
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.titles import title_of
from localspec.errors import StoreError
from localspec.record.rows import StoredMessage
from localspec.record.store import Store

MOST_ALIKE = 64  # conversations that begin with one text


def place(store: Store, source: str, request: Request) -> PendingTurn:
    """The turn to be queued. source: of the conversation. The log keeps a system prompt with the
    turn."""
    is_system_apart = request.system_prompt != "" and len(request.messages) > 1
    messages = request.messages[int(is_system_apart) :]
    system_prompt = request.system_prompt if is_system_apart else ""
    found = list[StoredMessage]()
    if len(messages) > 1:
        with suppress(StoreError):  # what cannot be found now is logged once more
            found = _logged(store, source, system_prompt, messages)
    if not found:
        title = title_of(asked_in(messages))
        return _turn(OpenConversation(0, title, source=source), messages)
    last, stored_id = found[-1], found[-1].conversation_id
    conversation = OpenConversation(stored_id, "", stored_id, source=source)
    rest = messages[len(found) :]
    if not rest:
        return _turn(conversation, messages[-1:], prompt_id=last.id)
    return _turn(conversation, rest, parent_id=last.id)


def _logged(
    store: Store, source: str, system_prompt: str, messages: Sequence[Message]
) -> list[StoredMessage]:
    """The longest logged beginning of these messages, of equals the newest."""
    best = list[StoredMessage]()
    firsts = store.message_tree.beginnings(source, _as_logged(messages[0]).content)
    for stored_id in dict.fromkeys([first.conversation_id for first in firsts][:MOST_ALIKE]):
        found = store.conversation(stored_id)
        if found is not None and (found.system_prompt or "") == system_prompt:
            best = max(best, _path(store.messages(stored_id), messages), key=len)
        if len(best) >= len(messages) - 1:  # all that was said before: the usual case
            break
    return best


def _path(stored: Sequence[StoredMessage], messages: Sequence[Message]) -> list[StoredMessage]:
    """The longest path from a first message on that these messages say."""
    below, by_id = (
        defaultdict[int | None, list[StoredMessage]](list),
        {one.id: one for one in stored},
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
