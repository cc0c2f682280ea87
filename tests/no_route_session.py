"""A whole session with the real app over HTTP: `python -m tests.no_route_session HOME [--alone]`.

Contract: starts the app's own parts with the demo pair in a process, opens the page with its
token, asks for a short reply, reads what was logged and prints one JSON object. --alone: brings
loopback up first, in a network namespace that has nothing else.
"""

from __future__ import annotations

import http.client
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.parse
from typing import Any

WAIT_S = 120.0
MAX_TOKENS = 16
START = "import app, sys; app.start(app.parse_arguments(sys.argv[1:]))"


def bring_loopback_up() -> None:
    import fcntl

    set_flags, is_up_and_running = 0x8914, 0x1 | 0x40
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh", b"lo", is_up_and_running))


def has_route() -> bool:
    """Whether any address but this machine's own can be reached. Nothing is sent to find out."""
    with open("/proc/net/route", encoding="ascii") as table:
        named = [line.split()[0] for line in table][1:]  # the first line is a heading
    with open("/proc/net/ipv6_route", encoding="ascii") as table:
        named += [line.split()[-1] for line in table]
    return any(device != "lo" for device in named)


class Page:
    """The page as a browser of this machine asks for it."""

    def __init__(self, address: str) -> None:
        self._url = urllib.parse.urlparse(address)
        answer, _ = self._ask("GET", f"/?{self._url.query}")
        self._cookie = str(answer.getheader("set-cookie")).split(";")[0]

    def _ask(
        self, method: str, path: str, body: str | None = None, **headers: str
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port, timeout=60)
        connection.request(method, path, body, {"host": self._url.netloc, **headers})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer, text

    def get(self, path: str) -> str:
        answer, text = self._ask("GET", path, cookie=self._cookie)
        assert answer.status == 200, (path, answer.status, text[:300])
        return text.decode()

    def send(self, text: str) -> None:
        """As the Send button does it."""
        config = json.loads(self.get("/config"))
        parts = {one["id"]: one["props"] for one in config["components"]}
        event = next(one for one in config["dependencies"] if _is_send(one, parts))
        asked = [parts[each] for each in event["inputs"]]
        form = next(part["value"] for part in asked if part.get("elem_id") == "ls-form-box")
        short = {**json.loads(form), "max_tokens": str(MAX_TOKENS)}
        own = {"ls-message": text, "ls-form-box": json.dumps(short)}
        data = [own.get(part.get("elem_id"), part.get("value")) for part in asked]
        body = {"data": data, "fn_index": event["id"], "session_hash": "s"}
        headers = {"origin": f"http://{self._url.netloc}", "content-type": "application/json"}
        answer, said = self._ask(
            "POST", "/gradio_api/queue/join", json.dumps(body), cookie=self._cookie, **headers
        )
        assert answer.status == 200, said


def _is_send(event: dict[str, Any], parts: dict[int, dict[str, Any]]) -> bool:
    is_submit = any(target[1] == "submit" for target in event["targets"])
    return is_submit and any(parts[i].get("elem_id") == "ls-message" for i in event["inputs"])


def until(what: str, is_true: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"{what} did not come"
        time.sleep(0.2)


def session(address: str, is_alone: bool) -> dict[str, Any]:
    page = Page(address)
    phases = ("ready", "calibrating")
    until("the model", lambda: json.loads(page.get("/live"))["phase"] in phases)
    page.send("hello there, who are you?")
    log = "/export?format=jsonl&scope=all"
    until("the reply", lambda: '"finish_reason": "' in page.get(log))  # null until it has ended
    for path in ("/", "/models", "/report", "/export?format=sqlite&scope=all"):
        connection = page._ask("GET", path, cookie=page._cookie)
        assert connection[0].status == 200, path
    return {"answered": True, "is_alone": is_alone}


def main(home: str, *flags: str) -> None:
    is_alone = "--alone" in flags
    if is_alone:
        bring_loopback_up()
        assert not has_route(), "this namespace has a route"
    command = [sys.executable, "-c", START, "--no-browser", "--port", "0", "--home", home]
    command += ["--context", "512"]  # what costs are at longer ones is not measured then
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            print(json.dumps(session(line[line.index("http://") :].strip(), is_alone)), flush=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
