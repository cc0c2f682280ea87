"""Check 17: forged requests and hostile pages of the same browser get 403, and change nothing."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.web.guard.routes import OPEN
from tests.kit.own_cookie import own_cookie
from tests.kit.servers import serve_handler
from tests.kit.waiting import until
from tests.web.browser.checks import ask, num_rows
from tests.web.browser.visits import Visit
from tests.web.guard.shut_routes import SHUT
from tests.web.site import Site

pytestmark = pytest.mark.slow

BOUNDARY = "x-boundary"
FILE = (
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="files"; filename="../../evil.txt"\r\n'
    f"\r\nevil\r\n--{BOUNDARY}--\r\n"
).encode()
MULTIPART = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
BLOB = {"content-type": "text/plain;charset=UTF-8"}
FORGED = [
    {"host": "evil.test"},
    {"origin": "null"},
    {"origin": "http://evil.test"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "null", "sec-fetch-site": "cross-site"},
]
TARGETS = [
    ("POST", "/gradio_api/upload", MULTIPART, FILE),
    ("POST", "/gradio_api/upload", BLOB, b"evil"),
    ("POST", "/gradio_api/queue/join", BLOB, b'{"data":[],"fn_index":0,"session_hash":"evil"}'),
    ("POST", "/gradio_api/queue/join", MULTIPART, FILE),
    ("POST", "/gradio_api/run/predict", BLOB, b'{"data":[],"fn_index":0}'),
    ("POST", "/gradio_api/cancel", BLOB, b"{}"),
    ("POST", "/audit?message=1", BLOB, b""),
    ("GET", "/gradio_api/queue/data?session_hash=evil", {}, b""),
    ("GET", "/export?format=csv&scope=all", {}, b""),
    ("GET", "/report", {}, b""),
    ("GET", "/live", {}, b""),
]


def stream_of(site: Site, session: str) -> str:
    """Return what Gradio's queue says of the events of a session, up to the last of them."""
    connection = http.client.HTTPConnection(site.host, site.port, timeout=30)
    with contextlib.closing(connection):
        path = f"/gradio_api/queue/data?session_hash={session}"
        connection.request("GET", path, headers={"cookie": own_cookie(site.port)})
        return connection.getresponse().read().decode()


def status_of(site: Site, method: str, path: str, headers: dict[str, str], body: bytes) -> int:
    """As a browser of this machine would send it, its cookie included."""
    connection = http.client.HTTPConnection(site.host, site.port, timeout=30)
    given = {
        "host": f"{site.host}:{site.port}",
        "cookie": own_cookie(site.port),
        "content-length": str(len(body)),
        **headers,
    }
    try:
        connection.request(method, path, body or None, given)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_check_17_forged_requests_get_403_and_change_nothing(
    site: Site, forged: dict[str, str]
) -> None:
    before = num_rows(site), len(site.backend.requests)
    for method, path, headers, body in TARGETS:
        honest = {"origin": site.origin} if method == "POST" and "origin" not in forged else {}
        found = status_of(site, method, path, {**headers, **honest, **forged}, body)
        assert found == 403, (method, path)
    assert (num_rows(site), len(site.backend.requests)) == before


def test_check_17_uploads_are_shut_even_for_our_own_page(site: Site) -> None:
    own = {"origin": site.origin, "sec-fetch-site": "same-origin"}
    for line in (one for lines in SHUT.values() for one in lines):
        method, path = line.split(" ")
        assert status_of(site, method, path, own, b"") == 403, line
    assert status_of(site, "POST", "/gradio_api/upload", {**own, **MULTIPART}, FILE) == 403


EVIL = """<!doctype html><title>evil</title><body><script>
const at = %r;
const results = window.results = {};
const go = async (name, path, options = {}) => {
  try {
    const answer = await fetch(at + path, {mode: 'no-cors', credentials: 'include', ...options});
    results[name] = answer.type;
  } catch (error) { results[name] = 'refused'; }
};
const data = new FormData();
data.append('files', new Blob(['evil']), '../../evil.txt');
const join = new Blob([JSON.stringify({data: [], fn_index: 0, session_hash: 'evil'})]);
const once = (name, element, src) => new Promise((done) => {
  element.onload = element.onerror = () => done();
  element.src = at + src;
  document.body.append(element);
  setTimeout(done, 1500);
});
(async () => {
  await go('blob', '/gradio_api/queue/join', {method: 'POST', body: join});
  await go('upload', '/gradio_api/upload', {method: 'POST', body: data});
  await go('audit', '/audit?message=1', {method: 'POST', body: ''});
  await go('export', '/export?format=csv&scope=all');
  await once('img', new Image(), '/export?format=csv');
  await once('script', document.createElement('script'), '/export?format=csv');
  await once('frame', document.createElement('iframe'), '/');
  await new Promise((done) => {
    const stream = new EventSource(at + '/gradio_api/queue/data?session_hash=evil',
                                   {withCredentials: true});
    stream.onopen = () => { results.stream = 'open'; done(); };
    stream.onerror = () => { results.stream = 'refused'; stream.close(); done(); };
  });
  await new Promise((done) => {
    const socket = new WebSocket(at.replace('http', 'ws') + '/gradio_api/queue/join');
    socket.onopen = () => { results.socket = 'open'; done(); };
    socket.onerror = () => { results.socket = 'refused'; done(); };
  });
  results.done = true;
})();
</script>"""


@pytest.fixture
def evil(site: Site) -> Iterator[int]:
    """Another program's page on this machine: the same site to a cookie, another origin to us."""
    page = (EVIL % site.origin).encode()

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            pass

    with serve_handler(Page) as port:
        yield port


def test_check_17_a_hostile_page_in_the_same_browser_gets_nothing(
    page: Visit, site: Site, evil: int
) -> None:
    ask(page, "echo mine", "echo mine")
    before = num_rows(site), len(site.backend.requests)
    other = page.page.context.new_page()
    for name in ("127.0.0.1", "localhost"):
        num_before = len(site.refusable)
        other.goto(f"http://{name}:{evil}/")
        other.wait_for_function("() => window.results.done", timeout=30_000)
        results = other.evaluate("window.results")
        assert results["stream"] == results["socket"] == "refused"
        answered = site.refusable[num_before:]
        assert len(answered) >= 8 and {status for _, status in answered} == {403}, answered
        frames = [frame for frame in other.frames if frame is not other.main_frame]
        assert all(frame.locator("#ls-message").count() == 0 for frame in frames)
    assert (num_rows(site), len(site.backend.requests)) == before
    other.close()


DISK_EVENTS = ("open", "os.listdir", "os.scandir", "shutil.copyfile")
OPENED: list[str] = []  # an audit hook cannot be taken away again; it notes only what is looked for


def watch_the_disk(part: str) -> None:
    def hook(event: str, details: tuple[Any, ...]) -> None:
        if event in DISK_EVENTS and details and part in str(details[0]):
            OPENED.append(f"{event} {details[0]}")

    sys.addaudithook(hook)


def test_no_path_that_a_page_names_reaches_the_disk(site: Site, tmp_path: Path) -> None:
    marker = tmp_path / "marker-of-this-test.txt"
    marker.write_text("private", encoding="utf-8")
    watch_the_disk("marker-of-this-test")
    own = {"origin": site.origin, "content-type": "application/json"}
    connection = http.client.HTTPConnection(site.host, site.port, timeout=30)
    cookie = {"cookie": own_cookie(site.port)}
    connection.request("GET", "/config", headers=cookie)
    config = json.loads(connection.getresponse().read())
    connection.close()
    file = {"path": str(marker), "url": f"file://{marker}", "meta": {"_type": "gradio.FileData"}}
    assert len(config["dependencies"]) > 8
    for event in config["dependencies"]:
        for value in (file, str(marker), [file], {"text": "x", "files": [file]}):
            body = {
                "data": [value] * len(event["inputs"]),
                "fn_index": event["id"],
                "session_hash": "hostile",
                "event_data": {"path": str(marker), "do": "import", "data": "!"},
                "trigger_id": None,
            }
            written = json.dumps(body).encode()
            names_file = b"meta" in written
            found = status_of(site, "POST", "/gradio_api/queue/join", own, written)
            assert (found == 403) is names_file, (found, value)
            escaped = written.replace(b"meta", b"\\u006deta").replace(b'"path"', b'"\\u0070ath"')
            found = status_of(site, "POST", "/gradio_api/run/predict", own, escaped)
            assert (found == 403) is names_file, "a key written with escapes is the same key"
    for route in OPEN:
        path = route.path.replace("{name}", "..%2f" + str(marker).replace("/", "%2f"))
        path = path.replace("{path:path}", str(marker)).replace("{session_hash}", "x")
        for query in ("", f"?deep_link={marker}&file={marker}&message={marker}&format={marker}"):
            if route.path != "/gradio_api/queue/data" and "heartbeat" not in route.path:
                status_of(site, route.method, f"{path}{query}", own, b"")
    assert "close_stream" in stream_of(site, "hostile"), "every event was worked on"
    until(lambda: site.service.current is None)
    assert OPENED == []
    marker.read_text(encoding="utf-8")
    assert OPENED, "the hook sees what is opened"
