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

import getpass
import os
import threading
import webbrowser
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from localspec.cli.flags import (
    HostFlag,
    KeptFlag,
    OriginFlag,
    PortFlag,
    UnloadFlag,
    call,
    refuse,
)
from localspec.core.bootstrap import check_port, ensure_environment, is_complete, prefer_large_pages
from localspec.core.config import suggestion
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import AlreadyRunning, LocalspecError, SetupError, too_long_a_name
from localspec.core.flags import Flag
from localspec.core.options import LoadOptions, RemoteFlags
from localspec.drafters.registry import REGISTRY

PROGRAM = "python app.py"
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


@dataclass(frozen=True)
class PageFlags:
    """Chat in the browser with exact speculative decoding."""

    options: LoadOptions
    remote: RemoteFlags
    host: HostFlag = "127.0.0.1"
    port: PortFlag = 7860
    unload_after: UnloadFlag = 60
    keep_chats: KeptFlag = None
    allow_origin: OriginFlag = ()
    no_log_text: Annotated[
        bool, Flag("Write no text of this run to the log; statistics are kept.")
    ] = False
    log_text: Annotated[
        bool, Flag("Write texts to the log again, from now on, where that was switched off.")
    ] = False
    no_browser: Annotated[bool, Flag("Do not open the browser.")] = False


def parse_arguments(argv: list[str]) -> PageFlags:
    """Return the flags. Exit at once for --help and for mistakes."""
    flags: PageFlags = call({"": PageFlags}, argv, PROGRAM)
    drafter, known = flags.options.drafter, (AUTO, OFF, *REGISTRY)
    if drafter is not None and drafter not in known:
        nearest = suggestion(drafter, known)
        refuse(PROGRAM, f"There is no drafter {drafter!r}.{nearest} Known: {', '.join(known)}.")
    if flags.log_text and flags.no_log_text:
        refuse(PROGRAM, "--log-text and --no-log-text contradict each other. Leave one out.")
    return flags


def start(flags: PageFlags) -> None:
    """Open the log and serve the page, with the model loading behind it, until the end. Raises
    AlreadyRunning where another process serves it."""
    from localspec.core.config import with_server
    from localspec.loading.service import opened_service  # packages exist only from here on
    from localspec.web.server import serve

    options = with_server(flags.options, flags.remote)
    unload_after_s = 60.0 * flags.unload_after or None
    with opened_service(options, unload_after_s, beside_page=True) as service:
        check_port(flags.host, flags.port)
        password = password_for(flags.host, flags.port, os.environ)
        if flags.no_log_text:
            service.store.logs_text = False
        if flags.log_text:
            service.store.keep_text(True)
        if flags.keep_chats is not None:
            service.kept_chats.limit(flags.keep_chats, is_lasting=False)
        serve(
            service,
            flags.host,
            flags.port,
            lambda address, once: announce(address, once if opens_browser(flags) else None),
            password,
            flags.allow_origin,
        )


def open_running(flags: PageFlags) -> None:
    """Show the page that already runs on this home folder. Raises SetupError where it has none."""
    from localspec.core.config import settings_for
    from localspec.web.running_page import running_page

    address, once = running_page(settings_for(flags.options.home).home)
    print(
        "localspec is already running on this folder, so this start opens its page. Flags of this "
        "start have no effect; to use them, end the running one first.",
        file=sys.stderr,
        flush=True,
    )
    announce(address, once if opens_browser(flags) else None, waits=True)


def opens_browser(flags: PageFlags) -> bool:
    return not flags.no_browser and has_screen()


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


def main(argv: list[str]) -> None:
    """Parse, set up, start. Exits with one sentence when that cannot be done."""
    flags = parse_arguments(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a Windows pipe may lack the arrow
    try:
        if not is_complete("requirements.txt"):  # a set-up of minutes comes first
            check_port(flags.host, flags.port)
        raise_again()  # pip, or the process in the environment, ends first
        ensure_environment("requirements.txt", [str(Path(__file__).resolve()), *argv])
        end_at_once()
        prefer_large_pages()
        try:
            start(flags)
        except AlreadyRunning:
            open_running(flags)
    except LocalspecError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        sys.exit(too_long_a_name(error))


if __name__ == "__main__":
    main(sys.argv[1:])
