"""Which messages of a program's request are in the log already.

A program sends its whole conversation with each request. `place` finds the longest beginning of it
that turns of this process have logged, and makes the turn that follows there with the messages
after it alone, so that the log grows with what is new. A history that was changed becomes a branch,
another reply to the same messages a reply beside the first.

Contract: one thread at a time. A request without earlier messages begins a conversation, however
alike to another it is. So does one whose beginning was logged by an earlier process, or before
the newest MOST_TURNS turns. `place` remembers nothing: `add` does, once the turn was queued.

Not here: writing turns (journal).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.backend import Message, Request, Role
from localspec.chat.journal import OpenConversation, PendingTurn
from localspec.chat.titles import title_of

MOST_TURNS = 1024


@dataclass(frozen=True)
class Place:
    """A turn to be queued. key: of all that was said up to its reply."""

    turn: PendingTurn
    key: bytes


class LoggedHistory:
    """source: of the conversations, for the log."""

    def __init__(self, source: str, most_turns: int = MOST_TURNS) -> None:
        self._source = source
        self._most_turns = most_turns
        self._turns: deque[tuple[bytes, _Answered]] = deque()
        self._by_key: dict[bytes, list[_Answered]] = defaultdict(list)

    def place(self, request: Request) -> Place:
        """The log keeps a system prompt with the turn."""
        is_system_apart = request.system_prompt != "" and len(request.messages) > 1
        messages = request.messages[int(is_system_apart) :]
        keys = _keys(request.system_prompt if is_system_apart else "", messages)
        turn = self._following(messages, keys)
        if turn is None:
            title = title_of(asked_in(messages))
            turn = _turn(OpenConversation(0, title, source=self._source), messages)
        return Place(turn, keys[-1])

    def add(self, place: Place) -> None:
        """A later request may follow this turn."""
        answered = _Answered(place.turn)
        self._turns.append((place.key, answered))
        self._by_key[place.key].append(answered)
        if len(self._turns) > self._most_turns:
            key, oldest = self._turns.popleft()
            self._by_key[key].remove(oldest)
            if not self._by_key[key]:
                del self._by_key[key]

    def _following(self, messages: Sequence[Message], keys: Sequence[bytes]) -> PendingTurn | None:
        if len(messages) == 1:
            return None
        for end in reversed(range(len(messages))):
            known = [one for one in self._by_key.get(keys[end], ()) if one.is_logged]
            rest = messages[end + 1 :]
            if known and not rest:
                return known[-1].again(messages[end])
            for one in reversed(known):
                if one.replied(rest[0]) and len(rest) > 1:
                    return one.after_reply(rest[1:])
            if known:
                return known[-1].after_message(rest)
        return None


class _Answered:
    """A turn that a later one may follow. What the log needs no more is let go."""

    def __init__(self, turn: PendingTurn) -> None:
        self._conversation = turn.conversation
        self._turn: PendingTurn | None = turn
        self._prompt_id = turn.prompt_id
        self._reply_id: int | None = None
        self._reply_text: str | None = None

    @property
    def is_logged(self) -> bool:
        """Whether the message that it answers is in the log. Looks at the turn."""
        turn = self._turn
        if turn is not None:
            self._prompt_id = turn.prompt_id
            self._reply_text = None if turn.end is None else turn.reply_text
            if turn.is_stored:
                self._reply_id, self._turn = turn.tip_id, None
        return self._prompt_id is not None

    def replied(self, message: Message) -> bool:
        """Whether this is its reply. Calls of tools are no text for a program."""
        text = self._reply_text
        if text is None or message.role != "assistant":
            return False
        if message.tool_calls:
            return all(call.name in text for call in message.tool_calls)
        return message.content.strip() == text.strip()

    def again(self, message: Message) -> PendingTurn:
        asked = _as_logged(message)
        turn = PendingTurn(self._conversation, asked.content, role=asked.role)
        turn.prompt_id = self._prompt_id
        return turn

    def after_reply(self, messages: Sequence[Message]) -> PendingTurn:
        turn = _turn(self._conversation, messages)
        turn.after, turn.parent_id = self._turn, self._reply_id
        return turn

    def after_message(self, messages: Sequence[Message]) -> PendingTurn:
        turn = _turn(self._conversation, messages)
        turn.parent_id = self._prompt_id
        return turn


def _turn(conversation: OpenConversation, messages: Sequence[Message]) -> PendingTurn:
    """Answers the last of these messages; the others are stored before it."""
    *history, asked = map(_as_logged, messages)
    return PendingTurn(conversation, asked.content, role=asked.role, history=tuple(history))


def _as_logged(message: Message) -> Message:
    """The log has no tools: their answers are the person's, calls are text."""
    role: Role = "user" if message.role == "tool" else message.role
    calls = [f"{call.name}({call.arguments})" for call in message.tool_calls]
    return Message(role, "\n".join(text for text in (message.content, *calls) if text))


def asked_in(messages: Sequence[Message]) -> str:
    """The person's newest message."""
    asked = (message.content for message in reversed(messages) if message.role == "user")
    return next(asked, "")


def _keys(system_prompt: str, messages: Sequence[Message]) -> list[bytes]:
    """One for each message, of all that was said up to it."""
    key, keys = hashlib.sha256(system_prompt.encode("utf-8", "surrogatepass")).digest(), []
    for message in map(_as_logged, messages):
        text = message.content.encode("utf-8", "surrogatepass")
        key = hashlib.sha256(b"%s %s %s" % (key, message.role.encode(), text)).digest()
        keys.append(key)
    return keys
