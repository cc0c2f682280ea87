"""Start localspec: `python app.py` makes its environment if needed, serves the page, opens it.

Contract: the syntax is plain enough for an old Python to parse, so that it can say what it lacks;
flags are read before anything is installed; this process never loads torch: the engine runs in
one of its own, started once the page is up.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "localspec needs Python 3.11 or newer, but this is Python %d.%d. Install a newer one "
        "and start with it, for example: python3.12 app.py" % sys.version_info[:2]
    )

from localspec.core.interrupts import INTERRUPTED, end_at_once, raise_again

if __name__ == "__main__":
    end_at_once()

import argparse
import getpass
import os
import threading
import webbrowser
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from localspec.core.bootstrap import check_port, ensure_environment, is_complete, prefer_large_pages
from localspec.core.errors import AlreadyRunning, LocalspecError, SetupError, too_long_a_name
from localspec.core.options import KERNELS, LOAD_FLAGS, MOST_MINUTES, Flag
from localspec.drafters.registry import REGISTRY

PASSWORD_VARIABLE = "LOCALSPEC_PASSWORD"
# Seconds that a second start waits for the browser to be started before it ends.
BROWSER_S = 10.0
EXPOSED = (
    "--host {host} lets other machines open localspec. Whoever has the password can read and "
    "delete every conversation and use this machine's models. The connection is not encrypted: "
    "whoever listens on the network can read along, password included. Do this only in a network "
    "you trust; elsewhere leave --host out and use a tunnel: "
    "ssh -L {port}:127.0.0.1:{port} this-machine"
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The flags. Exits at once with a usage line for --help and for mistakes."""
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Chat in the browser with exact speculative decoding.",
        allow_abbrev=False,
    )
    for flag in LOAD_FLAGS.values():
        parser.add_argument(flag.option, help=flag.help, **_as_argument(flag))
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at; beyond loopback with a password (%(default)s)",
    )
    parser.add_argument(
        "--port",
        default=7860,
        type=_whole(0, 65535),
        help="0 takes a free one (%(default)s)",
    )
    parser.add_argument(
        "--unload-after",
        default=60,
        type=_whole(0, MOST_MINUTES),
        metavar="MINUTES",
        help="let the model go when nothing was asked for so long; 0: never (%(default)s)",
    )
    parser.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="pages from there may use the API in a browser, with a key; repeatable",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--no-log-text",
        action="store_true",
        help="write no text of this run to the log; statistics are kept",
    )
    text.add_argument(
        "--log-text",
        action="store_true",
        help="write texts to the log again, from now on, where that was switched off",
    )
    parser.add_argument("--no-browser", action="store_true", help="do not open the browser")
    return parser.parse_args(argv)


def start(arguments: argparse.Namespace) -> None:
    """Open the log and serve the page, with the model loading behind it, until the end. Raises
    AlreadyRunning where another process serves it."""
    from localspec.core.config import load_options  # packages exist only from here on
    from localspec.loading.service import opened_service
    from localspec.web.server import serve

    given = vars(arguments)
    options = load_options({name: given[name] for name in LOAD_FLAGS})

    unload_after_s = 60.0 * arguments.unload_after or None
    with opened_service(options, unload_after_s, beside_page=True) as service:
        check_port(arguments.host, arguments.port)
        password = password_for(arguments.host, arguments.port, os.environ)
        if arguments.no_log_text:
            service.store.logs_text = False
        if arguments.log_text:
            service.store.keep_text(True)
        serve(
            service,
            arguments.host,
            arguments.port,
            lambda address, once: announce(address, once if opens_browser(arguments) else None),
            password,
            arguments.allow_origin,
        )


def open_running(arguments: argparse.Namespace) -> None:
    """Show the page that already runs on this home folder. Raises SetupError where it has none."""
    from localspec.core.config import settings_for
    from localspec.web.running_page import running_page

    address, once = running_page(settings_for(arguments.home).home)
    print(
        "localspec is already running on this folder, so this start opens its page. Flags of this "
        "start have no effect; to use them, end the running one first.",
        file=sys.stderr,
        flush=True,
    )
    announce(address, once if opens_browser(arguments) else None, waits=True)


def opens_browser(arguments: argparse.Namespace) -> bool:
    return not arguments.no_browser and has_screen()


def password_for(host: str, port: int, environment: MutableMapping[str, str]) -> str | None:
    """The password for other machines: from LOCALSPEC_PASSWORD, which is then removed from the
    environment, or typed in. None where only this machine is served, or nobody can be asked."""
    from localspec.core.options import is_loopback

    given = environment.pop(PASSWORD_VARIABLE, None)
    if is_loopback(host):
        return None
    print(EXPOSED.format(host=host, port=port), file=sys.stderr, flush=True)
    if given is not None or not sys.stdin.isatty():
        return given
    raise_again()  # or the terminal would go on hiding what is typed
    return getpass.getpass("Password for other machines: ")


def announce(address: str, once: str | None, waits: bool = False) -> None:
    """Print the address, and open the browser with another one that is good once. Raises SetupError
    where nobody would know the address. waits: until the browser was started."""
    try:
        print(f"localspec → {address}", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or exiting fails again
        if once is None:
            raise SetupError(
                f"The address cannot be printed: {error.strerror}. Send the output to another "
                "place."
            ) from error
    if once is not None:  # some browsers block the caller until they are closed
        opening = threading.Thread(target=webbrowser.open, args=(once,), daemon=True)
        opening.start()
        if waits:
            opening.join(BROWSER_S)


def has_screen() -> bool:
    """Without a screen a text browser would take over the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _as_argument(flag: Flag) -> dict[str, Any]:
    """How argparse reads it."""
    choices = {"drafter": ("auto", "off", *REGISTRY), "kernels": KERNELS}
    if flag.kind is bool:
        return {"action": "store_true"}
    if flag.is_repeatable:
        return {"action": "append", "metavar": flag.metavar}
    if flag.name in choices:
        return {"choices": choices[flag.name]}
    kind = _whole(flag.least or 0, flag.most) if flag.kind is int else flag.kind
    return {"type": kind, "metavar": flag.metavar}


def _whole(least: int, most: int | None) -> Callable[[str], int]:
    """Reads a flag's whole number within bounds."""
    refusal = f"not above {least - 1}" if most is None else f"not between {least} and {most}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"{text} is {refusal}")
        return number

    return read


def main(argv: list[str]) -> None:
    """Parse, set up, start. Exits with one sentence when that cannot be done."""
    arguments = parse_arguments(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a Windows pipe may lack the arrow
    try:
        if not is_complete("requirements.txt"):  # a set-up of minutes comes first
            check_port(arguments.host, arguments.port)
        raise_again()  # pip, or the process in the environment, ends first
        ensure_environment("requirements.txt", [str(Path(__file__).resolve()), *argv])
        end_at_once()
        prefer_large_pages()
        try:
            start(arguments)
        except AlreadyRunning:
            open_running(arguments)
    except LocalspecError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        sys.exit(too_long_a_name(error))


if __name__ == "__main__":
    main(sys.argv[1:])
