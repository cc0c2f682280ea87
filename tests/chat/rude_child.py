"""A child that does what its question names, for the tests of localspec.chat.limited_child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from localspec.chat.limited_child import answer_questions


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the question itself after what it asks for."""
    if question["do"] == "print":
        print("a library's chatter")
    elif question["do"] == "stand still":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif question["do"] == "spin":
        while True:
            pass
    elif question["do"] == "grow":
        held = []
        while True:
            held.append(bytes(2**20))
    elif question["do"] == "end":
        os._exit(3)
    elif question["do"] == "start another":
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return {"pid": other.pid}
    elif question["do"] == "sleep":
        time.sleep(600)
    return question


if __name__ == "__main__":
    answer_questions(answer)
