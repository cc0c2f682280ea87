"""A second start on a home folder opens the page that runs there, or says why it cannot."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

import app
from localspec.core.errors import SetupError
from localspec.record.opening import sole_use
from localspec.record.running import announced, read_running
from localspec.web import running_page as module_under_test
from localspec.web.guard.page_key import page_key
from localspec.web.guard.security import ticket_purpose
from localspec.web.running_page import running_page
from tests.kit.servers import serve_handler
from tests.kit.waiting import until

TOKEN = "token-of-the-running-launch"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def running(home: Path, *, has_page: bool = True) -> Iterator[str]:
    """A process that serves the folder, as far as a second start sees it; gives its address."""
    with serve_handler(Answer) as port:
        end = f"/?token={TOKEN}" if has_page else "/v1"
        address = f"http://127.0.0.1:{port}{end}"
        with sole_use(home / "localspec.db"), announced(home, address, has_page=has_page):
            yield address


def second_start(home: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    """What the browser of a second start opens."""
    opened: list[str] = []
    monkeypatch.setattr(app, "ensure_environment", lambda *_: None)
    monkeypatch.setattr(app, "has_screen", lambda: True)
    monkeypatch.setattr("webbrowser.open", opened.append)
    app.main(["--home", str(home), "--port", "0", *flags])
    return opened


def test_a_second_start_opens_the_running_page_by_a_ticket_and_says_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path) as address:
        (opened,) = second_start(tmp_path, monkeypatch)
        assert capsys.readouterr().out == f"localspec → {address}\n"
        start, _, ticket = opened.partition("?token=")
        assert start == address.partition("?")[0] and TOKEN not in opened
        assert page_key(tmp_path).is_signed(ticket, ticket_purpose(TOKEN), 60.0)
        assert second_start(tmp_path, monkeypatch, "--no-browser") == []
    assert read_running(tmp_path) is None, "the end of the process takes its address away"


def test_a_second_start_names_a_process_that_has_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, has_page=False) as address, pytest.raises(SystemExit) as ended:
        second_start(tmp_path, monkeypatch)
    assert "without a page" in str(ended.value) and address in str(ended.value)


def test_a_process_that_does_not_answer_is_named_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "WAIT_S", 0.2)
    with pytest.raises(SetupError, match=r"already running on .* does not answer"):
        running_page(tmp_path)
    (tmp_path / "running.json").write_text('{"address": 1}', encoding="utf-8")
    with pytest.raises(SetupError, match="does not answer"):
        running_page(tmp_path)


def test_a_second_start_waits_for_the_first_to_serve(tmp_path: Path) -> None:
    answers: list[str] = []
    waits = threading.Thread(target=lambda: answers.append(running_page(tmp_path)[0]))
    waits.start()
    with running(tmp_path) as address:
        until(lambda: answers == [address])
        waits.join()


def test_what_a_killed_process_left_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = '{"address": "http://127.0.0.1:9/?token=t", "has_page": true, "pid": 1}'
    (tmp_path / "running.json").write_text(left, encoding="utf-8")
    (tmp_path / "localspec.lock").touch()
    served: list[object] = []
    monkeypatch.setattr("localspec.web.server.serve", lambda *of: served.append(of))
    assert second_start(tmp_path, monkeypatch) == [] and len(served) == 1
