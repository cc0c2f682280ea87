"""Which messages of a program's request are in the log already.

A program sends its whole conversation with each request. `place` finds the longest beginning of it
that was logged, and makes the turn that follows there with the messages after it alone, so that the
log grows with what is new. A history that was changed becomes a branch, another reply to the same
messages a reply beside the first.

Contract: one thread at a time. A request without earlier messages begins a conversation, however
alike to another it is. So does one whose beginning was logged before the newest MOST_TURNS turns,
or without its texts by an earlier process. A turn can be followed once its message is in the log.
What earlier processes logged is read with the first request.

Not here: writing turns (journal).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localspec.backend import Message, Request, Role
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.titles import title_of
from localspec.errors import StoreError
from localspec.record.rows import Conversation, StoredMessage
from localspec.record.store import Store

MOST_TURNS = 1024


class LoggedHistory:
    """source: of the conversations, for the log. store: None where it holds none."""

    def __init__(self, source: str, store: Store | None, most_turns: int = MOST_TURNS) -> None:
        self._source = source
        self._unread = store
        self._most_turns = most_turns
        self._turns: deque[tuple[bytes, _Answered]] = deque()
        self._by_key: dict[bytes, list[_Answered]] = defaultdict(list)

    def place(self, request: Request) -> PendingTurn:
        """The turn to be queued. The log keeps a system prompt with it."""
        is_system_apart = request.system_prompt != "" and len(request.messages) > 1
        messages = request.messages[int(is_system_apart) :]
        self._read()
        keys, known = self._walked(request.system_prompt if is_system_apart else "", messages)
        turn = _following(messages, known)
        if turn is None:
            title = title_of(asked_in(messages))
            turn = _turn(OpenConversation(0, title, source=self._source), messages)
        self._remember(keys[-1], _Answered(turn.conversation, turn))
        return turn

    def _remember(self, key: bytes, answered: _Answered) -> None:
        self._turns.append((key, answered))
        self._by_key[key].append(answered)
        if len(self._turns) > self._most_turns:
            key, oldest = self._turns.popleft()
            self._by_key[key].remove(oldest)
            if not self._by_key[key]:
                del self._by_key[key]

    def _walked(
        self, system_prompt: str, messages: Sequence[Message]
    ) -> tuple[list[bytes], list[list[_Answered]]]:
        """For each message the key of all that was said up to it, and the turns that answer it. A
        reply counts as the log has it, however the program sends it."""
        key, keys = _first_key(system_prompt), list[bytes]()
        known, answering = list[list[_Answered]](), list[_Answered]()
        for message in messages:
            logged = _as_logged(message)
            texts = (one.reply_text for one in answering if one.replied(message))
            key = _next_key(key, logged.role, next(texts, None) or logged.content)
            answering = [one for one in self._by_key.get(key, ()) if one.is_logged]
            keys.append(key)
            known.append(answering)
        return keys, known

    def _read(self) -> None:
        """Remember what earlier processes logged. Where the log cannot be read now, the next
        request tries again."""
        if self._unread is None:
            return
        with suppress(StoreError):
            earlier = _logged(self._unread, self._source, self._most_turns)
            self._unread = None
            for key, answered in earlier:
                self._remember(key, answered)


def _following(
    messages: Sequence[Message], known: Sequence[Sequence[_Answered]]
) -> PendingTurn | None:
    """known: of each message, the turns that answer it."""
    if len(messages) == 1:
        return None
    for end in reversed(range(len(messages))):
        rest = messages[end + 1 :]
        if known[end] and not rest:
            return known[end][-1].again(messages[end])
        for one in reversed(known[end]):
            if one.replied(rest[0]) and len(rest) > 1:
                return one.after_reply(rest[1:])
        if known[end]:
            return known[end][-1].after_message(rest)
    return None


def _logged(store: Store, source: str, most_turns: int) -> list[tuple[bytes, _Answered]]:
    """The replies of the newest conversations of this source by their keys, oldest first."""
    found = deque[tuple[bytes, _Answered]]()
    for conversation in reversed(store.conversations()):
        if conversation.source == source and len(found) < most_turns:
            found.extendleft(reversed(_replies(conversation, store.messages(conversation.id))))
    return list(found)


def _replies(
    conversation: Conversation, messages: Sequence[StoredMessage]
) -> list[tuple[bytes, _Answered]]:
    """A message whose text was not logged, and what follows it, is left out."""
    keys: dict[int | None, bytes] = {None: _first_key(conversation.system_prompt or "")}
    opened = OpenConversation(
        conversation.id, conversation.title, conversation.id, source=conversation.source
    )
    found = list[tuple[bytes, _Answered]]()
    for message in messages:
        before = keys.get(message.parent_id)
        if before is not None and message.is_logged:
            keys[message.id] = _next_key(before, message.role, message.text)
            if message.role == "assistant":
                answered = _Answered(opened, None, message.parent_id, message.id, message.text)
                found.append((before, answered))
    return found


@dataclass(eq=False)
class _Answered:
    """A turn that a later one may follow. turn: None once the log needs it no more. prompt_id,
    reply_id: of the messages in the log. reply_text: None until it has ended."""

    conversation: OpenConversation
    turn: PendingTurn | None = None
    prompt_id: int | None = None
    reply_id: int | None = None
    reply_text: str | None = None

    @property
    def is_logged(self) -> bool:
        """Whether the message that it answers is in the log. Looks at the turn."""
        turn = self.turn
        if turn is not None:
            self.prompt_id = turn.prompt_id
            self.reply_text = None if turn.end is None else turn.reply_text
            if turn.is_stored:
                self.reply_id, self.turn = turn.tip_id, None
        return self.prompt_id is not None

    def replied(self, message: Message) -> bool:
        """Whether this is its reply. Calls of tools are no text for a program."""
        text = self.reply_text
        if text is None or message.role != "assistant":
            return False
        if message.tool_calls:
            return all(call.name in text for call in message.tool_calls)
        return message.content.strip() == text.strip()

    def again(self, message: Message) -> PendingTurn:
        return _turn(self.conversation, [message], prompt_id=self.prompt_id)

    def after_reply(self, messages: Sequence[Message]) -> PendingTurn:
        return _turn(self.conversation, messages, after=self.turn, parent_id=self.reply_id)

    def after_message(self, messages: Sequence[Message]) -> PendingTurn:
        return _turn(self.conversation, messages, parent_id=self.prompt_id)


def _turn(conversation: OpenConversation, messages: Sequence[Message], **place: Any) -> PendingTurn:
    """Answers the last of these messages; the others are stored before it. place: where, by the
    fields of PendingTurn."""
    *history, asked = map(_as_logged, messages)
    return PendingTurn(
        conversation, asked.content, role=asked.role, history=tuple(history), **place
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


def _first_key(system_prompt: str) -> bytes:
    return hashlib.sha256(system_prompt.encode("utf-8", "surrogatepass")).digest()


def _next_key(key: bytes, role: Role, text: str) -> bytes:
    """Of all that was said up to a message; key: of what was said before it."""
    said = text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"%s %s %s" % (key, role.encode(), said)).digest()
