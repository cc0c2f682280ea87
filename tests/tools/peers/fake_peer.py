"""A peer's process for tests: speaks the protocol of workers/serve without any engine.

    python fake_peer.py BEHAVIOUR

It counts upwards from the last prompt token, one token a request's `max_tokens`. Behaviours other
than "well" go wrong in one way each, at the first request or, with "-at-start", before it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any


def main(behaviour: str) -> None:
    opening = json.loads(sys.stdin.readline())
    misbehave(behaviour, "-at-start")
    say({"ready": {"version": "1", "opening": opening, "pid": os.getpid()}})
    num_requests = 0
    for line in sys.stdin:
        num_requests += 1
        if num_requests == 1:
            misbehave(behaviour, "")
        if behaviour == "refuses" and num_requests == 1:
            say({"error": "ValueError: no such thing"})
            continue
        say(answer(json.loads(line)))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    first = request["prompt"][-1] + 1
    tokens = list(range(first, first + request["max_tokens"]))
    ends = [index for index, token in enumerate(tokens) if token in request["end_ids"]]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    return {
        "tokens": tokens,
        "token_times_ms": [2.0 * (index + 1) for index in range(len(tokens))],
        "is_first_in_prefill": False,
        "num_drafts": 3,
        "num_draft_tokens": 6,
        "num_accepted_tokens": 4,
        "peak_memory_bytes": 1000,
    }


def misbehave(behaviour: str, when: str) -> None:
    if behaviour == f"dies{when}":
        print("cannot go on", file=sys.stderr)
        os._exit(3)
    if behaviour == f"hangs{when}":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
        time.sleep(60)
    if behaviour == f"babbles{when}":
        print("loading 10 %", flush=True)
        sys.stdin.read()


def say(answered: dict[str, Any]) -> None:
    print(json.dumps(answered), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
