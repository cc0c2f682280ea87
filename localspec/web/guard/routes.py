"""Every path that this server answers.

Contract: what is not in OPEN is refused, so a route that a new Gradio or a new file of ours brings
stays shut until it is listed here; a test compares the list with what Gradio really mounts. A part
in braces stands for one plain name: no slash, no leading dot, nothing that could lead out of a
folder. Uploads are shut: a file to attach is read in memory, and its text is sent with the message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

HEALTH_PATH = "/healthz"
LOGIN_PATH = "/login"
IMPORT_PATH = "/import"
READ_PATH = "/read"
# A pasted megabyte, attachments and the JSON around them; uploads do not exist.
MESSAGE_BYTES = 16 * 2**20
FILE_BYTES = 64_000_000  # as chat/importing/file takes at most, which says so in words
SMALL_BYTES = 64 * 2**10
# Of files whose name holds a hash of their content: the page of the next start asks for none.
FOR_GOOD = "private, max-age=31536000, immutable"
NAME = r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,127}"


@dataclass(frozen=True)
class Route:
    """A path that is answered. max_bytes: of a request's body. query: the parameters that are
    passed on; None: all. is_file: the body is a file's content, never taken for anything of
    Gradio's. cache: whether a browser may keep an answer without a fault, None: as the answer
    itself says."""

    method: str
    path: str
    why: str
    max_bytes: int = 0
    query: frozenset[str] | None = None
    is_file: bool = False
    cache: str | None = "no-store"

    def takes(self, path: str) -> bool:
        return re.fullmatch(_pattern(self.path), path) is not None


def _pattern(path: str) -> str:
    parts = re.split(r"\{[^}]*\}", path)
    return NAME.join(re.escape(part) for part in parts)


OPEN = (
    # ours
    Route("GET", HEALTH_PATH, "says that the server is up, without a key"),
    Route("GET", "/live", "the figures of the line over the chat"),
    Route("GET", "/export", "what was logged, as a file"),
    Route("GET", "/tokens", "where each token of a reply came from"),
    Route("GET", "/audit", "how a replay of a reply stands"),
    Route("POST", "/audit", "begins one; it only compares", SMALL_BYTES),
    Route("DELETE", "/audit", "stops one", SMALL_BYTES),
    Route("GET", "/report", "figures and plots, as a file without any text of a message"),
    Route("POST", IMPORT_PATH, "conversations out of a file", FILE_BYTES, is_file=True),
    Route("POST", READ_PATH, "the text of a file to attach", FILE_BYTES, is_file=True),
    Route("GET", "/localspec/{name}", "our script, style and icon", cache=None),
    Route("GET", "/models", "what the Models tab shows"),
    Route("POST", "/models", "what a button of that tab asks", SMALL_BYTES),
    # Gradio's. Its page also knows ?deep_link=, which names a folder on the disk.
    Route("GET", "/", "the page", query=frozenset({"c", "__theme"})),
    Route("GET", "/config", "the page's parts, read again after a lost connection"),
    Route("GET", "/theme.css", "colours"),
    Route("GET", "/favicon.ico", "asked for by browsers themselves"),
    Route("GET", "/assets/{path:path}", "Gradio's scripts and styles, plain names", cache=FOR_GOOD),
    Route("GET", "/static/js/{path:path}", "a script that Gradio's page names", cache=None),
    Route("GET", "/gradio_api/app_id", "whether the server was restarted"),
    Route("GET", "/gradio_api/heartbeat/{session_hash}", "tells when a page is closed"),
    Route("GET", "/gradio_api/queue/data", "the event stream"),
    Route("POST", "/gradio_api/queue/join", "an event of the page", MESSAGE_BYTES),
    Route("POST", "/gradio_api/run/{api_name}", "an event beside the queue", MESSAGE_BYTES),
    Route("POST", "/gradio_api/cancel", "the page gave up on an event", SMALL_BYTES),
    Route("POST", "/gradio_api/reset", "the same, of an iterator", SMALL_BYTES),
)


def route_of(method: str, path: str) -> Route | None:
    """The open route of a request, None where there is none."""
    for route in OPEN:
        if route.method == method and route.takes(path):
            return route
    return None
