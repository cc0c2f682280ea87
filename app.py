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

import argparse
import getpass
import os
import platform
import signal
import threading
import webbrowser
from collections.abc import Callable, MutableMapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from localspec import __version__
from localspec.bootstrap import check_port, ensure_environment, prefer_large_pages
from localspec.core import AUTO
from localspec.drafters.registry import REGISTRY
from localspec.errors import LocalspecError
from localspec.options import KERNELS, SAME_BITS, LoadOptions

if TYPE_CHECKING:
    from localspec.backend import Backend, Description
    from localspec.chat.backend_lifecycle import Opener
    from localspec.options import Offer
    from localspec.record.store import SessionInfo

MOST_MINUTES = 1_000_000  # two years
PASSWORD_VARIABLE = "LOCALSPEC_PASSWORD"
EXPOSED = (
    "--host {host} lets other machines open localspec. Whoever has the password can read and "
    "delete every conversation and use this machine's models. The connection is not encrypted: "
    "whoever listens on the network can read along, password included. Do this only in a network "
    "you trust; elsewhere leave --host out and use a tunnel: "
    "ssh -L {port}:127.0.0.1:{port} this-machine"
)
ENGINE = "localspec.load:open_local_backend"  # by name: it brings torch, this must not


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The flags. Exits at once with a usage line for --help and for mistakes."""
    parser = argparse.ArgumentParser(
        prog="app.py",
        description="Chat in the browser with exact speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--profile", help="a profile of profiles/, by name")
    parser.add_argument("--model", metavar="DIR_OR_ID", help="the target: a folder or a hub id")
    parser.add_argument("--draft", metavar="DIR_OR_ID", help="the draft model, likewise")
    parser.add_argument(
        "--heads", metavar="DIR", action="append", default=[], help="a trained head; repeatable"
    )
    parser.add_argument("--drafter", choices=["auto", "off", *REGISTRY], help="who may draft")
    parser.add_argument(
        "--context", type=_whole(1, None, "not above 0"), metavar="TOKENS", help="context length"
    )
    parser.add_argument("--dtype", help="precision of the target, for example bfloat16")
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        default=SAME_BITS,
        help="fastest: replies with and without drafting equal within rounding only (%(default)s)",
    )
    parser.add_argument("--home", metavar="DIR", type=Path, help="folder of the log")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve at; beyond loopback with a password (%(default)s)",
    )
    parser.add_argument(
        "--port",
        default=7860,
        type=_whole(0, 65535, "not between 0 and 65535"),
        help="0 takes a free one (%(default)s)",
    )
    parser.add_argument(
        "--unload-after",
        default=60,
        type=_whole(0, MOST_MINUTES, f"not between 0 and {MOST_MINUTES}"),
        metavar="MINUTES",
        help="let the model go when nothing was asked for so long; 0: never (%(default)s)",
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
    """Open the log and serve the page, with the model loading behind it, until the end."""
    from localspec.chat.service import ChatService  # packages exist only from here on
    from localspec.config import load_profiles, settings_for
    from localspec.machine.catalogue import smaller_offer
    from localspec.record.opening import sole_use
    from localspec.record.store import STATE_KEY, Store
    from localspec.remote.child import ChildBackend
    from localspec.remote.wire import Opening
    from localspec.web.server import serve
    from localspec.workloads import load_workloads, workload_folders

    password = password_for(arguments.host, arguments.port, os.environ)
    names = ("profile", "model", "draft", "drafter", "context", "dtype", "home", "kernels")
    named = {name: vars(arguments)[name] for name in names}
    options = LoadOptions(**named, heads=tuple(arguments.heads))
    settings = settings_for(arguments.home)
    workloads = load_workloads(workload_folders(settings))

    def opener_for(options: LoadOptions) -> "Opener":
        def open_backend(report: Callable[[str], None]) -> "Backend":
            keywords = {
                "options": options,
                "state": store.load_state(STATE_KEY),
                "past": store.conversation_list.earlier_texts(),
                "beside_page": True,
            }
            return ChildBackend.open(Opening(ENGINE, keywords), report)

        return open_backend

    def smaller(options: LoadOptions, loaded: "Description") -> "Offer | None":
        profiles = load_profiles(settings.profile_folders)
        return smaller_offer(options, loaded.target, loaded.dtype, profiles)

    def on_ready(address: str, once: str) -> None:
        announce(address, once if not arguments.no_browser and has_screen() else None)

    with sole_use(settings.database), closing(Store.open(settings.database)) as store:
        if arguments.no_log_text:
            store.logs_text = False
        if arguments.log_text:
            store.keep_text(True)
        drafter = arguments.drafter or AUTO
        service = ChatService(
            store,
            session_info,
            opener_for(options),
            drafter,
            workloads,
            options=options,
            opener_for=opener_for,
            unload_after_s=60.0 * arguments.unload_after or None,
            smaller=smaller,
        )
        serve(service, arguments.host, arguments.port, on_ready, password)


def password_for(host: str, port: int, environment: MutableMapping[str, str]) -> str | None:
    """The password for other machines: from LOCALSPEC_PASSWORD, which is then removed from the
    environment, or typed in. None where only this machine is served, or nobody can be asked."""
    from localspec.web.guard.security import is_loopback

    given = environment.pop(PASSWORD_VARIABLE, None)
    if is_loopback(host):
        return None
    print(EXPOSED.format(host=host, port=port), file=sys.stderr, flush=True)
    if given is not None or not sys.stdin.isatty():
        return given
    return getpass.getpass("Password for other machines: ")


def announce(address: str, once: str | None) -> None:
    """Print the address, and open the browser with another one that is good once."""
    print(f"localspec → {address}", flush=True)
    if once is not None:  # some browsers block the caller until they are closed
        threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()


def session_info() -> "SessionInfo":
    """The machine and the versions, for the log."""
    from localspec.machine.doctor import version_of
    from localspec.machine.hardware import probe
    from localspec.record.store import SessionInfo

    found = probe()
    return SessionInfo(
        app_version=__version__,
        device=found.device,
        gpu=found.gpu.name if found.gpu else None,
        driver=found.gpu.driver if found.gpu else None,
        vram_total_bytes=found.gpu.total_bytes if found.gpu else None,
        ram_total_bytes=found.host.ram_total_bytes,
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        bitsandbytes=version_of("bitsandbytes"),
        python=platform.python_version(),
        platform=platform.platform(),
    )


def has_screen() -> bool:
    """Without a screen a text browser would take over the terminal."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _whole(least: int, most: int | None, refusal: str) -> Callable[[str], int]:
    """Reads a flag's whole number within bounds."""

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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else nothing is written at the end
    try:
        check_port(arguments.host, arguments.port)
        ensure_environment("requirements.txt", [str(Path(__file__).resolve()), *argv])
        prefer_large_pages()
        start(arguments)
    except LocalspecError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:  # the usual way to end it
        sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
