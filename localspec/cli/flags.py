"""Flags that several commands share, and how a command ends.

Contract: the same name means the same everywhere; progress goes to stderr; a command prints its
text and, with --json, one JSON object on the last line. A LocalspecError is one sentence on stderr
and exit code 1.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from localspec.core.config import load_options
from localspec.core.errors import LocalspecError, StoreError, too_long_a_name
from localspec.core.flag_values import LARGEST_SEED
from localspec.core.interrupts import INTERRUPTED, raise_again
from localspec.core.options import LOAD_FLAGS
from localspec.core.visible import visible

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def _option(name: str) -> Any:
    """The flag of LOAD_FLAGS as typer declares it."""
    flag = LOAD_FLAGS[name]
    written = (flag.option,) if flag.kind is bool else ()  # or it would have a --no- too
    return typer.Option(
        *written, help=flag.help, metavar=flag.metavar, min=flag.least, max=flag.most
    )


HomeFlag = Annotated[Path | None, _option("home")]
SeedFlag = Annotated[int, typer.Option(min=0, max=LARGEST_SEED)]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")]


def loading(*left_out: str) -> Decorator:
    """As `loading_only`, with all flags of LOAD_FLAGS but these (a start of their names is
    enough)."""
    return loading_only(*(name for name in LOAD_FLAGS if not name.startswith(left_out)))


def loading_only(*names: str) -> Decorator:
    """A command whose parameter `options` is a LoadOptions: --help and the command line have these
    flags instead."""
    return _with_flags("options", [_parameter(name) for name in names], load_options)


def taking(parameter: str, kind: type, left_out: Sequence[str] = ()) -> Decorator:
    """A command whose parameter of this name is a dataclass: its fields are flags instead, as typer
    reads their annotations, but for those left out."""
    types = get_type_hints(kind, include_extras=True)
    kept = (each for each in fields(kind) if each.name not in left_out)
    flags = [_keyword(each.name, each.default, types[each.name]) for each in kept]
    return _with_flags(parameter, flags, lambda given: kind(**given))


def _with_flags(
    parameter: str, flags: Sequence[Parameter], make: Callable[[dict[str, Any]], Any]
) -> Decorator:
    """make: the value of the parameter from those of the flags."""

    def with_flags(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            made = make({flag.name: given.pop(flag.name) for flag in flags})
            command(**{parameter: made}, **given)

        own = signature(command, eval_str=True)
        parameters = list[Parameter]()
        for each in own.parameters.values():
            is_replaced = each.name == parameter
            parameters += flags if is_replaced else [each.replace(kind=Parameter.KEYWORD_ONLY)]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return with_flags


def _parameter(name: str) -> Parameter:
    flag, annotated = LOAD_FLAGS[name], cast("Any", Annotated)
    kind = list[str] if flag.is_repeatable else flag.kind
    if flag.kind is bool:
        return _keyword(name, False, annotated[bool, _option(name)])
    return _keyword(name, None, annotated[kind | None, _option(name)])


def _keyword(name: str, default: Any, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def finish(result: dict[str, Any], text: str, as_json: bool, is_exact: bool = False) -> None:
    """Print it. is_exact: the text is what was asked for, and hidden characters in it are kept out
    of terminals alone. Raises StoreError where the output goes to a place that is full."""
    shown = text if is_exact and not sys.stdout.isatty() else visible(text)
    parts = [shown] if text else []
    if as_json:
        parts.append(json.dumps(result))  # ASCII, which any terminal and pipe has
    try:
        print(*parts, sep="\n", end="\n" * bool(parts), flush=True)
    except BrokenPipeError:  # whoever read it has read enough
        raise
    except OSError as error:
        raise _without_output(error) from error


def _without_output(error: OSError) -> StoreError:
    """What to say where the output cannot be written; from now on it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting fails again
    return StoreError(f"The output cannot be written: {error.strerror}. Send it to another place.")


def to_stderr(*phrases: str) -> None:
    """Progress for people, a line each, apart from the result on stdout."""
    for phrase in phrases:
        print(visible(phrase), file=sys.stderr, flush=True)


def run_app(app: Callable[[], Any]) -> None:
    """Run the commands of a process; ends it with exit code 1 after a LocalspecError. Characters
    that the output lacks become question marks."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    try:
        raise_again()
        app()
    except LocalspecError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno == errno.ENOSPC and error.filename is None:  # the text of --help
            print(_without_output(error), file=sys.stderr)
            sys.exit(1)
        print(too_long_a_name(error), file=sys.stderr)
        sys.exit(1)
