"""Flags that several commands share, and the reading of a command line.

A command is a function. Its parameters whose types carry a `Flag` are its flags; a parameter whose
type is a dataclass takes the flags of its fields. `app.py` and all commands are read here, so a
flag means the same everywhere. Standard library only: `app.py --help` answers before any package is
installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, getdoc, signature
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin, get_type_hints

from localspec.cli.output import finish, run
from localspec.core.config import suggestion
from localspec.core.errors import ConfigError
from localspec.core.flags import Flag, Selection, option
from localspec.core.options import MOST_GB, MOST_MINUTES

# A command, or for one of an earlier version the sentence that names what does the same now.
Command = Callable[..., Any] | str

JsonFlag = Annotated[bool, Flag("One JSON object on the last line.", name="json")]
HostFlag = Annotated[
    str, Flag("Address to serve at. Beyond loopback a page asks for a password, an API for a key.")
]
PortFlag = Annotated[int, Flag("0 takes a free one.", least=0, most=65535)]
OriginFlag = Annotated[
    tuple[str, ...],
    Flag("Pages from there may use the API in a browser, with a key; repeatable.", "ORIGIN"),
]
UnloadFlag = Annotated[
    int,
    Flag(
        "Let the model go when nothing was asked for so long; 0: never.",
        "MINUTES",
        least=0,
        most=MOST_MINUTES,
    ),
]
KeptFlag = Annotated[
    float | None,
    Flag(
        "Disk for what the model has read of logged chats, so that a chat that is opened again is "
        "not read again, also after a restart; 0 keeps nothing. Default: 4, or as the page has "
        "set it.",
        "GB",
        least=0,
        most=MOST_GB,
    ),
]

LimitFlag = Annotated[int | None, Flag("Only the first N prompts.", "N")]
TEMPERATURES = Flag("Comma-separated, like 0,0.7.")
MAX_TOKENS = Flag("Tokens of a reply, at most.")


def call(commands: Mapping[str, Command], words: Sequence[str], program: str) -> Any:
    """Call the command that the words name with what they give its parameters. The name "" is the
    command of a program that has one. Exit with code 2 for words that cannot be read."""
    for length in (2, 1, 0):
        name = " ".join(words[:length])
        command = commands.get(name)
        if isinstance(command, str):
            raise ConfigError(command)
        if command is not None:
            others = _listing(commands, f"{name} ") if name else ""
            return CommandLine(command, f"{program} {name}".strip(), others).call(words[length:])
    _show_commands(commands, words, program)


def run_app(commands: Mapping[str, Command], program: str) -> None:
    """Run the command that the words after the program name."""
    run(lambda: call(commands, sys.argv[1:], program))


def _show_commands(commands: Mapping[str, Command], words: Sequence[str], program: str) -> NoReturn:
    """Print the commands of the group that the words name, or refuse an unknown command."""
    names = list(takewhile(lambda word: not word.startswith("-"), words))
    groups = {name.split()[0] for name in commands if " " in name}
    group = f"{names[0]} " if names and names[0] in groups else ""
    unknown = " ".join(names[: 2 if group else 1])
    if unknown != group.strip():
        refuse(program, f"There is no command '{unknown}'.{suggestion(unknown, commands)}")
    finish({}, f"usage: {program} {group}COMMAND ...\n\n{_listing(commands, group)}", False)
    sys.exit(0 if {"-h", "--help"} & set(words) else 2)


def _listing(commands: Mapping[str, Command], start: str) -> str:
    """Return the commands whose names begin so, a line each."""
    shown = {
        name: (getdoc(command) or "").split("\n\n")[0].replace("\n", " ")
        for name, command in commands.items()
        if name.startswith(start) and not isinstance(command, str)
    }
    width = max(map(len, shown), default=0)
    return "\n".join(f"  {name:<{width}}  {words}" for name, words in shown.items())


def refuse(program: str, message: str) -> NoReturn:
    """End the process because of a mistake in the command line."""
    ending = "" if message.endswith((".", "?")) else "."
    print(f"{message}{ending} For help: {program} --help", file=sys.stderr)
    sys.exit(2)


class CommandLine(argparse.ArgumentParser):
    """The command line of one function, or of one dataclass."""

    def __init__(self, command: Callable[..., Any], program: str, others: str = "") -> None:
        """others: the commands below this one, for the help."""
        super().__init__(
            prog=program,
            description=getdoc(command),
            epilog=others and f"further commands:\n{others}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.color = False  # Python 3.14 would colour the help; hidden characters are not printed
        self._takes_value = dict[str, bool]()  # by the flag as it is written
        self._call_with = self._add_flags(command)

    def call(self, words: Sequence[str]) -> Any:
        """Call the function with what the words give. Exit with code 2 for a mistake in them."""
        given, unknown = self.parse_known_args(list(self._with_joined_values(words)))
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                self.error(f"There is no flag {name}.{suggestion(name, self._takes_value)}")
            self.error(f"{word!r} is one word too many. Put a text between quotation marks.")
        return self._call_with(given)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        refuse(self.prog, message[:1].upper() + message[1:])

    def print_help(self, file: object = None) -> None:
        finish({}, self.format_help().rstrip(), False)

    def _add_flags(
        self, command: Callable[..., Any], selections: Sequence[Selection] = ()
    ) -> Callable[[argparse.Namespace], Any]:
        """Add the flags of the parameters. Return what calls the command with their values."""
        parts = dict[str, Callable[[argparse.Namespace], Any]]()
        types = get_type_hints(command, include_extras=True)
        for name, parameter in signature(command).parameters.items():
            kind, *notes = _annotation(types[name])
            flag = next((note for note in notes if isinstance(note, Flag)), None)
            if flag is not None and all(selects(name) for selects in selections):
                parts[name] = self._add_flag(name, kind, parameter.default, flag)
            elif isinstance(kind, type) and is_dataclass(kind):
                parts[name] = self._add_flags(kind, [*selections, *notes])
        return lambda given: command(**{name: part(given) for name, part in parts.items()})

    def _add_flag(
        self, name: str, kind: Any, default: Any, flag: Flag
    ) -> Callable[[argparse.Namespace], Any]:
        """Add one flag. Return what reads its value."""
        value_type, is_repeatable = _type_of_value(kind)
        is_needed = default is Parameter.empty
        written = name if flag.is_positional else option(flag.name or name)
        settings: dict[str, Any] = {"help": _help_of(flag, default)}
        if value_type is bool:
            settings["action"] = "store_true"
        else:
            metavar = flag.metavar or (name if flag.is_positional else flag.name or name).upper()
            settings |= {"type": _reader(value_type, flag), "metavar": metavar}
            if flag.choices:
                settings |= {"choices": flag.choices, "metavar": flag.metavar}
            if flag.is_positional and not is_needed:
                settings["nargs"] = "?"
            if is_repeatable:
                settings["action"] = "append"
            settings["default"] = None if is_needed or is_repeatable else default
        if not flag.is_positional:
            settings |= {"dest": name, "required": is_needed}
            self._takes_value[written] = value_type is not bool
        self.add_argument(written, **settings)
        if is_repeatable:
            return lambda given: tuple(getattr(given, name) or ())
        return lambda given: getattr(given, name)

    def _with_joined_values(self, words: Iterable[str]) -> Iterator[str]:
        """Yield the words, with each flag joined to its value: else argparse would take a value
        that begins with a dash for a flag."""
        waiting = iter(words)
        for word in waiting:
            value = next(waiting, None) if self._takes_value.get(word) else None
            if value is None:
                yield word
            elif value in self._takes_value:  # the value of the flag before it is missing
                yield from (word, value)
            else:
                yield f"{word}={value}"
            if word == "--":
                yield from waiting


def _annotation(kind: Any) -> tuple[Any, ...]:
    """Return the type of a parameter and what is noted beside it."""
    return get_args(kind) if get_origin(kind) is Annotated else (kind,)


def _type_of_value(kind: Any) -> tuple[Any, bool]:
    """Return the type of one value of a flag, and whether the flag is repeatable."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is tuple:
        return get_args(kind)[0], True
    return kind, False


def _help_of(flag: Flag, default: Any) -> str:
    if flag.gone is not None:
        return argparse.SUPPRESS
    is_shown = default not in (None, "", (), Parameter.empty) and default is not False
    shown = f"{flag.help} Default: {default}." if is_shown else flag.help
    return shown.strip().replace("%", "%%")


def _reader(kind: Any, flag: Flag) -> Callable[[str], Any]:
    """Return what reads a value of this type. A number lies within the bounds of the flag."""
    least, most = flag.least, flag.most

    def read_number(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from None
        if (least is not None and number < least) or (most is not None and number > most):
            bounds = f"below {least}" if most is None else f"not between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{text} is {bounds}")
        return number

    def name_successor(text: str) -> NoReturn:
        raise ConfigError(flag.gone or "")

    if flag.gone is not None:
        return name_successor
    return read_number if kind in (int, float) else Path if kind is Path else str
