"""The command cluster: how vLLM or SGLang is started for a model, and starting it on this machine.

Contract: as in cli. Without --start nothing runs: the command is printed, with a sentence for each
choice. With --start it runs until Ctrl-C, which ends it and all its processes; what it prints goes
through. γ is what was learnt here for this target, where something was.

Not here: the choices (machine.cluster). Heavy imports are inside the functions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_args

from localspec.cli.flags import JsonFlag
from localspec.cli.output import finish, to_stderr
from localspec.core.errors import ConfigError, SetupError
from localspec.core.flags import Flag, only
from localspec.core.options import NO_DRAFT, LoadOptions, RemoteServer
from localspec.core.precisions import FULL_BYTES, PRECISIONS
from localspec.machine.cluster import (
    ClusterCommand,
    Method,
    Program,
    Wanted,
    command_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from localspec.core.speculation import Measurement
    from localspec.machine.hardware import Hardware
    from localspec.machine.model import Model

DEFAULT_LENGTHS = {"draft_model": 3, "eagle": 3, "eagle3": 3, "ngram": 5, "off": 0}
LOOK_S = 0.5
END_S = 20.0  # for it to free the memory of its cards


@dataclass(frozen=True)
class ClusterFlags:
    """How the model is served."""

    program: Annotated[Program, Flag("What serves it.", choices=get_args(Program))] = "vllm"
    method: Annotated[
        Method | None,
        Flag("Default: draft_model with --draft, else ngram.", choices=get_args(Method)),
    ] = None
    num_draft_tokens: Annotated[
        int | None, Flag("γ. Default: as learnt here.", least=1, most=64)
    ] = None
    sequences: Annotated[int, Flag("Replies at full context at the same time.", least=1)] = 1
    dtype: Annotated[
        str | None, Flag("bf16, fp16 or fp32. Default: what the device computes in.")
    ] = None
    host: Annotated[str, Flag("Address that the program serves at.")] = "127.0.0.1"
    port: Annotated[int, Flag(least=1, most=65535)] = 8000
    python: Annotated[str, Flag("Python of the environment that has vLLM or SGLang.")] = "python"


def cluster(
    flags: ClusterFlags,
    options: Annotated[LoadOptions, only("model", "draft", "context", "home")],
    start: Annotated[bool, Flag("Run it here until Ctrl-C.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write the command that serves a model with vLLM or SGLang, or run it."""
    from localspec.machine.hardware import probe

    hardware = probe()
    wanted, why = _wanted(flags, options, hardware)
    made = command_for(wanted, hardware.gpus)
    if start:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        run(made)
        return
    notes = (why, *made.notes) if wanted.method != "off" else made.notes
    finish(_as_dict(made, notes), "\n".join([made.line, "", *notes, _next_step(made)]), as_json)


def _wanted(flags: ClusterFlags, options: LoadOptions, hardware: Hardware) -> tuple[Wanted, str]:
    """Return what is to be served and how, and why its draft length. Raise ConfigError."""
    from localspec.controller.controller import measurements
    from localspec.core.config import settings_for
    from localspec.machine.memory import full_precision
    from localspec.machine.plans import DEFAULT_CONTEXT
    from localspec.machine.profiles import load_profiles
    from localspec.machine.sources import find_model
    from localspec.record.log_file import learnt_states

    model, context = options.model, options.context or DEFAULT_CONTEXT
    draft = None if options.draft == NO_DRAFT else options.draft
    if model is None:
        raise ConfigError("cluster needs a model: name a folder or a hub id with --model.")
    if PRECISIONS.get(flags.dtype or "bf16") not in FULL_BYTES:
        raise ConfigError(f"--dtype {flags.dtype!r} is none of bf16, fp16 and fp32.")
    method: Method = flags.method or ("draft_model" if draft else "ngram")
    profiles = load_profiles(settings_for(options.home).profile_folders)
    target = find_model(model, profiles)
    learnt = measurements(learnt_states(options.home), context)
    length, why = _length_of(target, method, flags.num_draft_tokens, learnt)
    return Wanted(
        program=flags.program,
        target=target,
        method=method,
        num_draft_tokens=length,
        context_length=min(context, target.shape.context_length),
        precision=full_precision(flags.dtype, hardware),
        drafter=None if draft is None else find_model(draft, profiles),
        num_sequences=flags.sequences,
        host=flags.host,
        port=flags.port,
        python=flags.python,
    ), why


def _length_of(
    target: Model, method: str, asked: int | None, learnt: Sequence[Measurement]
) -> tuple[int, str]:
    """γ, and why."""
    if asked is not None:
        return asked, f"γ is {asked}, as asked."
    for one in learnt:
        found = one.expected_speedup(method)
        if one.target == target.name and found is not None:
            return found.num_draft_tokens, (
                f"γ is {found.num_draft_tokens}: by what was learnt here that is {found.value:.2f} "
                "times plain decoding for one reply. With many at the same time a shorter one, or "
                "none, is faster: python -m localspec bench --remote measures it."
            )
    length = DEFAULT_LENGTHS[method]
    return length, (
        f"γ is {length}, a usual length: nothing was learnt here yet of {target.name} with "
        f"{method}."
    )


def _as_dict(made: ClusterCommand, notes: Sequence[str]) -> dict[str, object]:
    layout = made.layout
    return {
        "command": list(made.arguments),
        "environment": made.environment,
        "url": made.url,
        "gpus": [gpu.name for gpu in layout.gpus],
        "tensor_parallel": layout.tensor_parallel,
        "pipeline_parallel": layout.pipeline_parallel,
        "draft_tensor_parallel": layout.draft_tensor_parallel,
        "memory_share": layout.memory_share,
        "notes": list(notes),
    }


def _next_step(made: ClusterCommand) -> str:
    return f"Then chat with it: python app.py --remote {made.url}"


def run(made: ClusterCommand) -> None:
    """Start it, say when it answers, and end it with this process. Raises SetupError."""
    to_stderr(made.line)
    try:
        server = subprocess.Popen(
            made.arguments, env={**os.environ, **made.environment}, start_new_session=True
        )
    except OSError as error:
        raise SetupError(
            f"{made.arguments[0]} cannot be started: {error.strerror}. Name the Python of the "
            "environment that has the program with --python."
        ) from error
    try:
        _wait_until_it_answers(made, server)
        to_stderr(f"{made.url} answers. {_next_step(made)}")
        code = server.wait()
        raise SetupError(f"The server ended by itself with exit code {code}. See what it printed.")
    except KeyboardInterrupt:  # the usual way to end it
        to_stderr("Ending the server ...")
    finally:
        end(server)


def _wait_until_it_answers(made: ClusterCommand, server: subprocess.Popen[bytes]) -> None:
    """Raises SetupError where it ends before."""
    from localspec.remote.connection import Connection
    from localspec.remote.servers import look_at

    asked = RemoteServer(made.url)
    with Connection(asked) as connection:
        while server.poll() is None:
            with suppress(ConfigError):
                look_at(asked, connection)
                return
            time.sleep(LOOK_S)
    raise SetupError(
        f"The server ended with exit code {server.returncode} before it answered. What it printed "
        "says why; --python must name the environment that has it."
    )


def end(server: subprocess.Popen[bytes]) -> None:
    """With all its processes, gently first."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        if server.poll() is None:
            if sys.platform == "win32":
                server.terminate()
            else:
                os.killpg(server.pid, number)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                continue
