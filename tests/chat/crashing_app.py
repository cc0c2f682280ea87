"""An app for tests to kill: forks one for each line on its input, so that none has to start anew.

Contract: a line is the path of a log. The fork answers one message there, in about a second, and
prints, a line each: its process id, "kept" once the message is said to be kept, "shown", a moment
on the monotonic clock and the length of the reply at that moment, "logged" and the length that
stands in the log from then on, "done" at the end. A line is written whole or not at all, also where
Python does not buffer its output.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from localspec.chat.service import ChatService, ReplySettings
from localspec.record.store import Store
from tests.kit.fakes import FakeBackend, Script, session_info

SCRIPT = Script(round_s=0.02, context_length=10**6)  # room for a conversation of many turns


def say(text: str) -> None:
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


class LoudStore(Store):
    """Says what it has logged of a growing reply."""

    def checkpoint_reply(self, message_id: int, text: str, thinking: str = "") -> None:
        super().checkpoint_reply(message_id, text, thinking)
        say(f"logged {len(text)}")


def app(path: Path) -> None:
    store = LoudStore.open(path)
    service = ChatService(store, session_info, lambda report: FakeBackend(SCRIPT))
    service.start()
    while service.status().phase != "ready":
        time.sleep(0.001)
    stored = store.conversations()
    say(str(os.getpid()))
    reply = service.submit(
        stored[0].id if stored else None, f"Are you there, {os.getpid()}?", ReplySettings()
    )
    assert reply is not None
    say("kept")
    while not reply.done.wait(0.02):
        say(f"shown {time.monotonic()} {len(reply.view.text)}")
    service.close()
    say("done")


if __name__ == "__main__":
    for line in sys.stdin:
        if os.fork() == 0:
            app(Path(line.strip()))
            os._exit(0)
        os.wait()
        say("over")
