"""The process of one peer: JSON lines in, JSON lines out, one engine kept alive.

    python serve.py ENGINE        ENGINE: a module beside this file with a class `PeerEngine`

Contract: the first line opens the engine, the answer is {"ready": facts} or {"error": sentence};
every later line is one request with one answer, to which the process's peak memory is added.
Ends when its input ends, so that it cannot outlive the comparison. Whatever a library prints
goes to stderr: stdout carries answers only.

Not here: what a request means (the engines).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import IO, Any


def main(engine_name: str) -> None:
    answers = _answers()
    opening = json.loads(sys.stdin.readline())
    engine: Any = None

    def open_engine() -> dict[str, Any]:
        nonlocal engine
        engine = import_module(engine_name).PeerEngine(opening)
        return {"ready": engine.facts}

    if not _answer(answers, open_engine):
        return
    while line := sys.stdin.readline():
        _answer(answers, partial(_run, engine, json.loads(line)))


def _run(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    return {**engine.run(request), "peak_memory_bytes": peak_memory_bytes()}


def peak_memory_bytes() -> int | None:
    """The most this process held since its start; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _answers() -> IO[str]:
    """The stream of answers; what is printed by anybody else goes where stderr goes."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    return channel


def _answer(answers: IO[str], work: Callable[[], dict[str, Any]]) -> bool:
    try:
        answer, is_done = work(), True
    except Exception as error:  # the edge of this process: the other side shows the sentence
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        answer, is_done = {"error": f"{type(error).__name__}: {first_line}"}, False
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    return is_done


if __name__ == "__main__":
    main(sys.argv[1])
