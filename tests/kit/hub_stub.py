"""A model hub on this machine: enough of its protocol for huggingface_hub 2.4.0 to fetch from.

Contract: serves folders at one commit each, as the real hub does: weights by a redirect to another
host, which knows nothing of the hub and beside which Xet is offered, small files by one inside the
hub. `requests` holds what was asked for, as "METHOD path"; `refusal`
and `fault` make it fail in the ways a hub fails. A fault befalls weights only, but "portal", which
is a network's own page in place of everything. `client_of` points the client of this process
at it, offline as the page leaves it.

Source: what huggingface_hub's hf_api.py (model_info, list_repo_tree), file_download.py and
utils/_http.py (X-Error-Code) ask for and read.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.kit.servers import serve_handler

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIECE = 16 * 1024
CUT_AT = 0.6  # the share of a weight file that a cut connection lets through
# closed, reset: the connection ends at CUT_AT. stalled: no byte comes after it. long: more bytes
# are announced than come. short: fewer are announced, and those come. wrong: one byte differs.
# page: a page of HTML in place of the weights. portal: in place of everything. endless: more bytes
# come than were listed, and their number is not announced.
Fault = Literal["closed", "reset", "stalled", "long", "short", "wrong", "page", "portal", "endless"]
SMALL = "/api/resolve-cache/models/"  # where the hub keeps small files, by model
NO_PROXY = "127.0.0.1,localhost"
PAGE = b"<!DOCTYPE html><html><body>Sign in to use this network</body></html>"


@dataclass(frozen=True)
class Refusal:
    """How the hub says no. code: its X-Error-Code. only_files: the listing is still public."""

    status: int
    code: str
    only_files: bool = False
    retry_after: str | None = None


@dataclass
class HubStub:
    """State that the tests set and read."""

    models: Mapping[str, Path]
    endpoint: str = ""
    requests: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    searches: list[dict[str, str]] = field(default_factory=list)
    refusal: Refusal | None = None
    fault: Fault | None = None
    num_faults: int | None = None  # None: whenever weights are asked for
    fails_at: int | None = None  # the number of one request that is not answered at all
    pace_s: float = 0.0  # a pause after every 16 KiB of weights
    closing: threading.Event = field(default_factory=threading.Event)
    tokens: list[str] = field(default_factory=list)  # those that came along, by place
    # Of a path, headers and body of an answer of the test's own; without a length, so that the body
    # may have no end.
    answers: dict[str, tuple[dict[str, str], Iterable[bytes]]] = field(default_factory=dict)

    @property
    def cdn(self) -> str:
        """Where weights lie: this server, by another name."""
        return self.endpoint.replace("127.0.0.1", "localhost")

    def asked_for(self, name: str) -> bool:
        return any(name in request for request in self.requests)

    def takes_a_fault(self) -> bool:
        if self.fault is None or self.num_faults == 0:
            return False
        self.num_faults = None if self.num_faults is None else self.num_faults - 1
        return True


@contextmanager
def serve_hub(models: Mapping[str, Path]) -> Iterator[HubStub]:
    """The hub with `models` (folders by id), down again on leaving."""
    stub = HubStub(models)
    with serve_handler(_Handler, stub=stub) as port:
        stub.endpoint = f"http://127.0.0.1:{port}"
        try:
            yield stub
        finally:
            stub.closing.set()


@contextmanager
def client_of(endpoint: str, cache: Path, is_offline: bool = True) -> Iterator[None]:
    """huggingface_hub of this process with this endpoint and cache, and no pauses. Its sessions
    read no certificates, which takes longer than a test: the hub has none."""
    import httpx2
    from huggingface_hub import constants, file_download, set_client_factory
    from huggingface_hub.utils import _http

    def without_certificates() -> httpx2.Client:
        hooks: Any = {"request": [_http.hf_request_event_hook]}
        return httpx2.Client(event_hooks=hooks, follow_redirects=True, timeout=None, verify=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", NO_PROXY)
        patch.delenv("HF_TOKEN", raising=False)
        patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
        patch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache / "harnesses.json"))
        patch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
        patch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # or small files are lost whole
        patch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None))
        real = _http.default_client_factory
        patch.setattr(_http, "default_client_factory", without_certificates)
        set_client_factory(without_certificates)
        try:
            yield
        finally:
            set_client_factory(real)


class _Handler(BaseHTTPRequestHandler):
    stub: HubStub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed among the tests' results."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.stub.requests.append(f"{self.command} {path}")
        if len(self.stub.requests) == self.stub.fails_at:
            self.close_connection = True
            return None
        if "authorization" in self.headers:
            self.stub.tokens.append(path)
        if path in self.stub.answers:
            headers, parts = self.stub.answers[path]
            return self._endless(headers, parts)
        if self.stub.fault == "portal":
            return self._send(200, {"Content-Type": "text/html"}, PAGE)
        if path == "/api/models":
            return self._listing(self._search_results())
        for model_id, folder in self.stub.models.items():
            if path == f"/api/models/{model_id}/revision/main":
                return self._listing({"id": model_id, "sha": COMMIT, "siblings": []})
            if path == f"/api/models/{model_id}/tree/{COMMIT}":
                return self._listing(_tree(folder))
            for place in (f"/{model_id}/resolve", f"{SMALL}{model_id}", f"/cdn/{model_id}"):
                file = folder / path.removeprefix(f"{place}/{COMMIT}/")
                if path.startswith(f"{place}/{COMMIT}/") and file.is_file():
                    return self._file(model_id, folder, file, place)
        self._refuse(Refusal(404, "RepoNotFound"))

    def _search_results(self) -> list[dict[str, object]]:
        asked = parse_qs(urlsplit(self.path).query)
        self.stub.searches.append({name: values[0] for name, values in asked.items()})
        words = asked.get("search", [""])[0].lower()
        return [_result(each, self.stub.models[each]) for each in self.stub.models if words in each]

    def _listing(self, answer: object) -> None:
        refusal = self.stub.refusal
        if refusal is not None and not refusal.only_files:
            return self._refuse(refusal)
        self._send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _file(self, model_id: str, folder: Path, file: Path, place: str) -> None:
        if self.stub.refusal is not None:
            return self._refuse(self.stub.refusal)
        raw, path = file.read_bytes(), f"{model_id}/{COMMIT}/{file.relative_to(folder).as_posix()}"
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(file)}"', "Accept-Ranges": "bytes"}
        if place.startswith("/cdn/"):
            return self._content(raw, {"ETag": '"another"', "Accept-Ranges": "bytes"}, True)
        if place.startswith(SMALL):
            return self._content(
                raw, headers | {"Content-Type": "text/plain; charset=utf-8"}, False
            )
        if file.suffix != ".safetensors":
            return self._send(307, headers | {"Location": f"{SMALL}{path}?etag=x"}, b"Redirect")
        token = f"{self.stub.endpoint}/api/models/{model_id}/xet-read-token/{COMMIT}"
        headers |= {
            "X-Linked-ETag": f'"{_etag(file)}"',
            "X-Linked-Size": str(len(raw)),
            "X-Xet-Hash": _etag(file),
            "Link": f'<{token}>; rel="xet-auth"',
            "ETag": '"of the redirect"',
            "Location": f"{self.stub.cdn}/cdn/{path}?signature=x",
        }
        self._send(302, headers, b"Redirect")

    def _content(self, raw: bytes, headers: dict[str, str], is_weights: bool) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        if asked:
            self.stub.ranges.append(asked)
            headers["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
        is_faulty = is_weights and self.command == "GET" and self.stub.takes_a_fault()
        fault = self.stub.fault if is_faulty else None
        if fault == "page":
            return self._send(200, {"Content-Type": "text/html"}, PAGE)
        if fault == "endless":
            return self._endless(headers, repeat(raw))
        if fault == "wrong":
            raw = raw[:-1] + bytes([raw[-1] ^ 1])
        cut = max(start, int(len(raw) * CUT_AT))
        end = len(raw) if fault in (None, "wrong", "long") else cut
        announced = {"short": end, "long": len(raw) + 4096}.get(str(fault), len(raw)) - start
        headers["Content-Length"] = str(announced)
        self._send(206 if asked else 200, headers, raw[start:end], self.stub.pace_s * is_weights)
        if fault in ("closed", "reset", "long"):
            self._hang_up()
        elif fault == "stalled":
            self.wfile.flush()
            self.stub.closing.wait(60)
            self.close_connection = True

    def _endless(self, headers: Mapping[str, str], parts: Iterable[bytes]) -> None:
        self.close_connection = True
        self.send_response(200)
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):
            for part in parts:
                self.wfile.write(part)

    def _hang_up(self) -> None:
        self.wfile.flush()
        if self.stub.fault == "reset":  # closing a socket that lingers for nothing resets it
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        self.close_connection = True

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Code": refusal.code}
        if refusal.retry_after is not None:
            headers["Retry-After"] = refusal.retry_after
        self._send(refusal.status, headers, b"")

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, pace_s: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        with suppress(ConnectionError):  # a client that was killed
            for start in range(0, len(body), PIECE):
                self.wfile.write(body[start : start + PIECE])
                if pace_s and self.stub.closing.wait(pace_s):
                    return


def _result(model_id: str, folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text())
    num_values = (folder / "model.safetensors").stat().st_size // 4
    return {
        "id": model_id,
        "gated": False,
        "config": {"model_type": config["model_type"]},
        "safetensors": {"parameters": {"F32": num_values}, "total": num_values},
    }


def _tree(folder: Path) -> list[dict[str, object]]:
    return [_entry(folder, file) for file in sorted(folder.rglob("*")) if file.is_file()]


def _entry(folder: Path, file: Path) -> dict[str, object]:
    size = file.stat().st_size
    entry: dict[str, object] = {"type": "file", "path": file.relative_to(folder).as_posix()}
    entry |= {"size": size, "oid": _git_name(file)}
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": _etag(file), "size": size, "pointerSize": 134}
        entry["xetHash"] = _etag(file)
    return entry


def _etag(file: Path) -> str:
    """SHA-256 of what lies beside git, git's own name for the rest."""
    if file.suffix != ".safetensors":
        return _git_name(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git_name(file: Path) -> str:
    raw = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
