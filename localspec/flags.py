"""Flags that several commands share, how lists in them are read, and how a command ends.

Contract: the same name means the same everywhere; progress goes to stderr; a command prints its
text and, with --json, one JSON object on the last line. A LocalspecError is one sentence on stderr
and exit code 1.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from localspec.config import remote_server
from localspec.core import SamplingParams
from localspec.errors import ConfigError, LocalspecError, StoreError
from localspec.options import MOST_PARALLEL, LoadOptions

ProfileFlag = Annotated[str | None, typer.Option(help="A model family of profiles/models.")]
ModelFlag = Annotated[str | None, typer.Option(help="Target: a folder or a hub id.")]
DraftFlag = Annotated[str | None, typer.Option(help="Draft model: a folder or a hub id.")]
HeadsFlag = Annotated[list[str] | None, typer.Option(help="Folder of a trained head; repeatable.")]
DrafterFlag = Annotated[str | None, typer.Option(help="auto, off or a drafter's name.")]
ContextFlag = Annotated[int | None, typer.Option(help="Tokens of context to make room for.")]
DtypeFlag = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16, 8-bit or 4-bit; 4-bit-head: the output head in 4 bits "
        "too, which changes the output more."
    ),
]
KernelsFlag = Annotated[
    str | None,
    typer.Option(
        help="same-bits, the default: a reply is the same token for token whatever drafts, on a "
        "processor. "
        "fastest: one row at a time may round differently from several."
    ),
]
DeviceFlag = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:N as doctor counts the GPUs, or mps. None: the best here."),
]
DraftDeviceFlag = Annotated[
    str | None,
    typer.Option(
        help="The same for the draft model. None: beside the target, or on another GPU where it "
        "does not fit there."
    ),
]
ParallelFlag = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MOST_PARALLEL,
        help="Replies that are written at the same time, at most; others wait. Each takes memory "
        "for a context of its own. None: as many as fit, up to 4, on a processor; 1 on a card.",
    ),
]
SeedFlag = Annotated[int, typer.Option(min=0, max=2**62)]
HomeFlag = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the log and of what was learnt. None: the usual one where a log is read, "
        "else a cold start."
    ),
]
RemoteFlag = Annotated[
    str | None,
    typer.Option(
        help="Address of a server with OpenAI's interface (vLLM, SGLang, ...) that answers instead "
        "of an engine here; --model is then one of its models. Its key: LOCALSPEC_REMOTE_KEY."
    ),
]
RemoteKeyFileFlag = Annotated[
    Path | None, typer.Option(help="File with the key of the --remote server.")
]
RemoteKeyOpenlyFlag = Annotated[
    bool,
    typer.Option(
        "--remote-key-unencrypted",
        help="Send the key also over a connection to another machine that is not encrypted.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]
LOAD_FLAGS: Mapping[str, Any] = {  # of the fields of LoadOptions, as --help orders them
    "profile": ProfileFlag,
    "model": ModelFlag,
    "draft": DraftFlag,
    "heads": HeadsFlag,
    "drafter": DrafterFlag,
    "context": ContextFlag,
    "dtype": DtypeFlag,
    "kernels": KernelsFlag,
    "parallel": ParallelFlag,
    "device": DeviceFlag,
    "draft_device": DraftDeviceFlag,
    "remote": RemoteFlag,
    "remote_key_file": RemoteKeyFileFlag,
    "remote_key_openly": RemoteKeyOpenlyFlag,
    "home": HomeFlag,
}


def loading(*left_out: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameter `options` is a LoadOptions: --help and the command line have a flag
    for each of its fields instead, but for those left out (a start of their names is enough)."""
    names = [name for name in LOAD_FLAGS if not name.startswith(left_out)]
    flags = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=False if name == "remote_key_openly" else None,
            annotation=LOAD_FLAGS[name],
        )
        for name in names
    ]

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            options = _options_of(**{name: given.pop(name) for name in names})
            command(options=options, **given)

        own = signature(command, eval_str=True)
        parameters = list[Parameter]()
        for each in own.parameters.values():
            is_replaced = each.name == "options"
            parameters += flags if is_replaced else [each.replace(kind=Parameter.KEYWORD_ONLY)]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return with_flags


def _options_of(
    heads: Sequence[str] | None,
    remote: str | None = None,
    remote_key_file: Path | None = None,
    remote_key_openly: bool = False,
    **named: Any,
) -> LoadOptions:
    server = remote_server(remote, named["model"], remote_key_file, remote_key_openly)
    return LoadOptions(**named, heads=tuple(heads or ()), remote=server)


def finish(result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print it. Raises StoreError where the output goes to a place that is full."""
    parts = [text] if text else []
    if as_json:
        parts.append(json.dumps(result, ensure_ascii=False))
    try:
        print(*parts, sep="\n", end="\n" * bool(parts), flush=True)
    except BrokenPipeError:  # whoever read it has read enough
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting fails again
        raise StoreError(
            f"The output cannot be written: {error.strerror}. Send it to another place."
        ) from error


def to_stderr(phrase: str) -> None:
    """Progress for people, apart from the result on stdout."""
    print(phrase, file=sys.stderr, flush=True)


def run_app(app: Callable[[], Any]) -> None:
    """Run the commands of a process; ends it with exit code 1 after a LocalspecError."""
    try:
        app()
    except LocalspecError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        start = str(error.filename or "")[:40]
        print(f"{start}… is too long for the name of a file. Shorten it.", file=sys.stderr)
        sys.exit(1)


def listed(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated flag."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def listed_numbers(text: str) -> tuple[float, ...]:
    """The numbers of a comma-separated flag. Raises ConfigError."""
    try:
        return tuple(float(part) for part in listed(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of numbers. Write them like 0,0.7.") from error


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raises ConfigError, RequestError unless one can sample at all of them, each once."""
    if not temperatures or len(set(temperatures)) != len(temperatures):
        raise ConfigError("--temperatures needs one or more numbers, each once, like 0,0.7.")
    for temperature in temperatures:
        SamplingParams(temperature=temperature)  # says what is out of range
