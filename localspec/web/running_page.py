"""The page of the process that already serves a home folder, for a second start on it."""

from __future__ import annotations

import http.client
import time
from pathlib import Path
from urllib.parse import urlsplit

from localspec.core.errors import SetupError
from localspec.record.running import Running, read_running
from localspec.web.guard.page_key import page_key
from localspec.web.guard.security import ticket_purpose

# Seconds in which a process that has just been started says its address and answers there.
WAIT_S = 15.0
LOOK_S = 0.1
ANSWER_S = 2.0


def running_page(folder: Path) -> tuple[str, str]:
    """Return the address of the running page, and one with a ticket for a browser. Raise SetupError
    if the process has no page or does not answer."""
    end_s = time.monotonic() + WAIT_S
    while (running := _answering(folder)) is None:
        if time.monotonic() > end_s:
            last = read_running(folder)
            which = f" (process {last.pid})" if last is not None else ""
            raise SetupError(
                f"localspec is already running on {folder}{which}, but it does not answer. End it, "
                "or start this one with another --home."
            )
        time.sleep(LOOK_S)
    if not running.has_page:
        raise SetupError(
            f"localspec is already running on {folder} without a page, at {running.address}. End "
            "it, or start this one with another --home."
        )
    address, _, token = running.address.partition("token=")
    return running.address, f"{address}token={page_key(folder).signed(ticket_purpose(token))}"


def _answering(folder: Path) -> Running | None:
    """Return the process that said its address, if something answers there. No proxy is asked."""
    running = read_running(folder)
    if running is None:
        return None
    place = urlsplit(running.address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/healthz")
        connection.getresponse()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return running
