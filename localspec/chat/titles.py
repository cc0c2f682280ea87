"""Titles of chats: the first words, or written by the model from the first exchange.

Contract: `Titles.task` gives a job for the worker's idle time, once for each chat that has exactly
one exchange and whose title is still its first words. The prompt begins with that exchange, so that
the engine's cache serves the next message as if nothing had been asked between. The job gives way
to any other; it is then tried again. A title that no person would take for one is not used. Titles
that a person wrote are never replaced (ConversationList.entitle).

Not here: the worker's idle time (worker).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress

from localspec.chat import branches
from localspec.chat.jobs import Task
from localspec.chat.turn import Reply, ShownMessage, prompt_messages
from localspec.core.backend import Backend, Message, Request
from localspec.core.decoding import SamplingParams
from localspec.core.errors import NotCounted
from localspec.record.rows import PAGE, title_line
from localspec.record.store import Store

TITLE_LENGTH = 48
MAX_LOOKED_AT = 2000  # Characters of a message that its title may come from.
ONLY_A_FILE = re.compile(r"File `([^`\n]{1,100})`:\n\n`{3}")  # as attachments write it
ASK = "Write a title for this conversation: two to six words, nothing else."
MAX_TITLE_TOKENS = 24
MAX_TITLE_WORDS = 8
WORD = re.compile(r"\w{4,}")
# Beginnings of an answer or a refusal in the place of a title, and names of roles.
ANSWER = re.compile(
    r"i(['’]\w+|\s+(am|can|cannot|can['’]t|could|do|don['’]t|will|would|have|think|apologi[sz]e))\b"
    r"|(sorry|sure|certainly|of course|okay|ok|yes|no|unfortunately)\s*([,.!:;–—-]|$)"
    r"|(sorry (but|for|i)|as an? (ai|assistant|language)|here\s*(['’]s|is|are)|the user|let me)\b"
    r"|(user|assistant|system|human|model|bot|ai)\s*(:|$)",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"[.!?:;\n]+")
MIN_SENTENCE_WORDS = 4  # A shorter beginning of a sentence may well be a title.
KEY = "titles"
COPY_OF, FORK_OF = "Copy of ", "Fork of "


class Titles:
    """One for each service."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tried = set[int]()
        kept = store.load_state(KEY) or {}
        self.is_on = kept.get("is_on", True) is True

    def switch(self, is_on: bool) -> None:
        """Whether the model writes titles, also at later starts."""
        self.is_on = is_on
        self._store.save_state(KEY, {"is_on": is_on})

    def task(self, latest: Reply | None) -> Task | None:
        """The job after this reply; None where no title is wanted."""
        if latest is None or not self.is_on:
            return None
        conversation = latest.pending.conversation
        stored_id = conversation.stored_id
        is_listed = conversation.source == PAGE and not conversation.is_deleted
        if stored_id is None or stored_id in self._tried or not is_listed:
            return None
        found = self._store.conversation(stored_id)
        shown = branches.messages_of(self._store, conversation)
        is_first = [one.role for one in shown] == ["user", "assistant"]
        if found is None or found.title_by != "words" or not is_first:
            return None
        if shown[1].state != "complete" or not shown[1].text.strip():
            return None
        request = Request(
            messages=(
                *prompt_messages(latest.settings.system_prompt, shown),
                Message("user", ASK),
            ),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=MAX_TITLE_TOKENS,
            drafter=latest.settings.drafter,
            thinks=False,
        )

        def write(backend: Backend, cancel: threading.Event) -> None:
            self._tried.add(stored_id)
            if not _fits(backend, request):
                return
            text = "".join(chunk.text for chunk in backend.generate(request, cancel))
            if cancel.is_set():
                self._tried.discard(stored_id)
                return
            title = title_from(text, shown)
            if title is not None:
                self._store.conversation_list.entitle(stored_id, title)

        return Task("Writing a title", write, gives_way=True)


def _fits(backend: Backend, request: Request) -> bool:
    """False where it is not known, as of some servers: nobody asked for a title."""
    room = backend.describe().context_length
    with suppress(NotCounted):
        return backend.count_tokens(request.messages) + MAX_TITLE_TOKENS <= (room or 0)
    return False


def title_from(text: str, exchange: Sequence[ShownMessage]) -> str | None:
    """Return the title in what the model wrote; None if it is none: too long, about something else,
    an answer or a sentence of the reply, or with words of the request, as a small model writes."""
    line = next((one for one in text.strip().splitlines() if one.strip()), "")
    line = re.sub(r"^\W*title\W*:\s*", "", line, flags=re.IGNORECASE)
    title = title_line(line.strip(" \t\"'`*_#“”‘’«»")).rstrip(".:")
    said = " ".join(message.text for message in exchange).casefold()
    words = set(WORD.findall(title.casefold()))
    is_about_it = any(word in said for word in words)
    is_echo = any(word not in said for word in words.intersection(WORD.findall(ASK.casefold())))
    is_short = len(title) <= TITLE_LENGTH and len(title.split()) <= MAX_TITLE_WORDS
    is_text = "<" not in title and not line.startswith("```") and not ANSWER.match(title)
    is_own = not is_echo and not _is_sentence_of(exchange[-1].text, title)
    return title if is_about_it and is_short and is_text and is_own else None


def _is_sentence_of(reply: str, title: str) -> bool:
    """Return whether the title is a sentence of the reply, or the beginning of one."""
    sentences = (" ".join(part.split()).casefold() for part in SENTENCE_END.split(reply))
    plain = SENTENCE_END.sub("", title).casefold().strip()
    is_long = len(plain.split()) >= MIN_SENTENCE_WORDS
    return any(one == plain or (is_long and one.startswith(plain)) for one in sentences)


def title_of_copy(title: str, is_whole: bool) -> str:
    """A copy of a copy is named like the copy, so that titles do not grow."""
    for begun in (COPY_OF, FORK_OF):
        title = title.removeprefix(begun)
    return f"{COPY_OF if is_whole else FORK_OF}{title}"


def title_of(text: str) -> str:
    """The title of a conversation that begins with this message."""
    if named := ONLY_A_FILE.match(text):
        return named[1][:TITLE_LENGTH]
    # What was written, not what was attached; the rest of a long text is not looked through.
    line = title_line(text.lstrip()[:MAX_LOOKED_AT].split("\n\nFile `", 1)[0])
    return line if len(line) <= TITLE_LENGTH else f"{line[: TITLE_LENGTH - 1]}…"
