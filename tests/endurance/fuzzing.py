"""Damage at random for data that comes from outside, and the loop that feeds it."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.errors import LocalspecError
from localspec.forward.load import load_model
from tests.kit.tally import Tally

resource = pytest.importorskip("resource", reason="needs memory limits")

FORKED = multiprocessing.get_context("fork")
LIMIT_S = 20  # of processor time, for one case
WAIT_S = 300.0  # on the clock: other programs may take most of the processor
SPARE_BYTES = 2 * 2**30  # what a case may take

Case = Callable[[random.Random], None]


def fuzz(tally: Tally, case: Case, quick: int, whole: int) -> None:
    """Run `case` with seeds 0, 1, …; it raises LocalspecError or nothing."""
    num_cases, seed = tally.size(quick, whole), 0
    started_s = time.monotonic()
    while seed < num_cases:
        seed = _run_until_it_dies(tally, case, seed, num_cases)
    tally.figures.append(f"{time.monotonic() - started_s:.0f} s")


def _run_until_it_dies(tally: Tally, case: Case, start: int, end: int) -> int:
    """The seed after the last one that was tried."""
    near, far = FORKED.Pipe()
    process = FORKED.Process(target=_run, args=(far, case, start, end), daemon=True)
    process.start()
    far.close()
    with closing(near):
        for seed in range(start, end):
            is_well = False
            with tally.case(f"{case.__name__}, seed {seed}"):
                assert near.poll(WAIT_S), "it hangs"
                said = near.recv()  # raises EOFError where the process died or was ended
                is_well = True
                assert not said, said
            if not is_well:
                break
        process.kill()
        process.join()
    return seed + 1


def _run(pipe: Connection, case: Case, start: int, end: int) -> None:
    """In the fork: answer "" or what was wrong, for each seed."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)  # libraries complain of what they refuse
    for seed in range(start, end):
        limit_s = int(time.process_time()) + LIMIT_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.RLIM_INFINITY))
        try:
            case(random.Random(seed))
            said = ""
        except LocalspecError as error:
            said = "" if str(error).rstrip().endswith((".", "?")) else f"no sentence: {error}"
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error)[:200]}"
        pipe.send(said)
    os._exit(0)


WILD = (
    0,
    -1,
    1,
    2,
    3.5,
    10**6,
    10**12,
    2**63,
    -(2**31),
    True,
    None,
    "",
    "x",
    [],
    {},
    [[]],
    "1e999",
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, removed, repeated or put elsewhere."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, size = rng.randrange(len(found) + 1), rng.randrange(1, 40)
        kind = rng.randrange(5)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 3:
            found[at:at] = rng.randbytes(size)
        else:
            other = rng.randrange(len(found) + 1)
            found[at : at + size] = found[other : other + size]
    return bytes(found)


def twisted(value: Any, rng: random.Random) -> Any:
    """The JSON value with one of its parts replaced by a wild one, or taken away."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        return {**value, key: twisted(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], twisted(value[at], rng), *value[at + 1 :]]
    return rng.choice(WILD)


def copied(folder: Path, rng: random.Random) -> Path:
    copy = folder.with_name(f"{folder.name}-{rng.randrange(10**9)}")
    shutil.copytree(folder, copy)
    return copy


def load_and_answer(folder: Path) -> None:
    """Load the folder and run one forward; a damaged folder raises ModelError instead."""
    load_model(folder, torch.float32, torch.device("cpu"), 64).model.forward([1, 2])
