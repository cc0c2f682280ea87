"""Checks 15, 16 and 18: memory that runs out, a killed server, and a download that breaks off."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.core.backend import Backend, Chunk, Request
from localspec.core.options import LoadOptions
from localspec.record.store import Store
from tests.kit.fakes import REPLY, FakeBackend, Script, session_info
from tests.kit.own_cookie import TOKEN
from tests.kit.waiting import until
from tests.web.browser.checks import READY, bubbles, status_of, wait_for_reply
from tests.web.browser.tabs import new_tab
from tests.web.browser.visits import LISTENS, WAIT_MS, Visit
from tests.web.models_site import TARGET, models_site
from tests.web.site import Site, serve_page

pytestmark = pytest.mark.slow

KEPT = "Memory ran out. What was written is kept."
DROPPED = "The draft model is given up; n-grams still draft."


@dataclass
class Hungry(FakeBackend):
    """Memory runs out at round `at_round` of a reply. drafts: what is left to give up; without
    any it runs out until the context is at most `enough`."""

    at_round: int | None = None
    drafts: int = 0
    enough: int = 2048

    def generate(self, request: Request, cancel: threading.Event) -> Iterator[Chunk]:
        chunks = super().generate(request, cancel)
        return chunks if self.at_round is None else self._short(chunks, self.at_round)

    def _short(self, chunks: Iterator[Chunk], at_round: int) -> Iterator[Chunk]:
        for number, chunk in enumerate(chunks):
            if number == at_round and self.script.context_length > self.enough:
                is_relieved, self.drafts = self.drafts > 0, self.drafts - 1
                said = f"{KEPT} {DROPPED}" if is_relieved else KEPT
                stats = chunk.stats
                yield Chunk(
                    "done", stats, finish_reason="error", error=said, is_relieved=is_relieved
                )
                return
            yield chunk


@dataclass
class Place:
    """A served service whose backend is hungry; a newer one is opened for every context."""

    service: ChatService
    store: Store
    visit: Visit
    backend: Hungry


@pytest.fixture(scope="module")
def hungry_place(tmp_path_factory: pytest.TempPathFactory, context: Any) -> Iterator[Place]:
    store = Store.open(tmp_path_factory.mktemp("hungry") / "localspec.db")
    made = Place(None, store, None, Hungry())  # type: ignore[arg-type]

    def opener_for(options: LoadOptions) -> Callable[[Callable[[str], None]], Backend]:
        def open_backend(report: Callable[[str], None]) -> Backend:
            context = options.context or 4096
            script = Script(prefill_s=0.0, round_s=0.001, context_length=context)
            made.backend = Hungry(script, at_round=made.backend.at_round)
            return made.backend

        return open_backend

    first = LoadOptions(context=4096)
    made.service = ChatService(
        store, session_info, opener_for(first), options=first, opener_for=opener_for
    )
    with serve_page(made.service) as port:
        site = Site("127.0.0.1", port, made.service, store, made.backend)
        made.visit = Visit(new_tab(context), site)
        made.visit.open("&c=new")
        yield made
        made.visit.page.close()
    made.service.close()
    store.close()


def test_check_15_memory_that_runs_out_at_any_step_keeps_what_was_written(
    hungry_place: Place,
) -> None:
    service = hungry_place.service
    for at_round in range(1, 21):
        hungry_place.backend.at_round, hungry_place.backend.drafts = at_round, 1
        reply = service.submit(None, f"runs out at round {at_round}", ReplySettings())
        assert reply is not None and reply.done.wait(30) and service.flush()
        row = hungry_place.store.turn_rows()[-1]
        kept = hungry_place.store.branch(row["message_id"])[-1].text
        assert row["finish_reason"] == "error" and REPLY.startswith(kept)
        assert (kept != "") is (at_round > 1)
        hungry_place.backend.at_round = None
        reply = service.submit(reply.handle, "and the next turn", ReplySettings())
        assert reply is not None and reply.done.wait(30) and service.flush()
        assert hungry_place.store.turn_rows()[-1]["state"] == "complete"


@pytest.mark.parametrize("at_round", [1, 8])
def test_check_15_the_page_shows_what_was_kept_and_goes_on(
    hungry_place: Place, at_round: int
) -> None:
    page = hungry_place.visit
    page.new_chat()
    hungry_place.backend.at_round, hungry_place.backend.drafts = at_round, 1
    page.send(f"runs out at round {at_round}")
    page.wait_for(DROPPED, "#ls-chat .ls-error")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    assert hungry_place.service.flush()
    row = hungry_place.store.turn_rows()[-1]
    kept = hungry_place.store.branch(row["message_id"])[-1].text
    assert kept[:20].replace("*", "") in page.text("#ls-chat")
    hungry_place.backend.at_round = None
    num_before = page.page.locator("#ls-chat .bot .ls-footer").count()
    page.send("and the next turn")
    wait_for_reply(page, num_before)


def test_check_15_then_the_context_is_shortened_and_the_turn_after_works(
    hungry_place: Place,
) -> None:
    page = hungry_place.visit
    page.new_chat()
    hungry_place.backend.at_round, hungry_place.backend.drafts = 4, 0
    page.send("nothing is left to give up")
    page.wait_for("context of 2048 instead of 4096", "#ls-chat .ls-error")
    page.wait_for("context of 2048", "#ls-notices")
    page.page.wait_for_function(READY, timeout=WAIT_MS)
    hungry_place.backend.at_round = None
    num_before = page.page.locator("#ls-chat .bot .ls-footer").count()
    page.send("and now?")
    wait_for_reply(page, num_before)
    assert hungry_place.service.options == LoadOptions(context=2048)


BOX = "document.querySelector('#ls-message textarea')"
NOTES: Any = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"a note"}


def start(root: Path, home: Path, port: int, round_s: float) -> tuple[subprocess.Popen[str], str]:
    """The fake's server in a process of its own, and the address that it printed."""
    flags = {"--load-s": 0, "--home": home, "--port": port, "--round-s": round_s}
    words = [str(word) for pair in flags.items() for word in pair]
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.fakes", *words],
        cwd=root,
        env=os.environ | {"http_proxy": "http://127.0.0.1:9"},  # a proxy must not matter
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def stored_texts(home: Path) -> str:
    """Everything that is written down so far."""
    with contextlib.closing(sqlite3.connect(home / "localspec.db")) as database:
        return "\n".join(text for (text,) in database.execute("SELECT text FROM message"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_check_16_a_killed_server_comes_back_with_everything_and_an_interrupt_ends_it(
    context: Any, tmp_path: Path, root: Path, reserved_port: int
) -> None:
    port = reserved_port
    server, url = start(root, tmp_path, port, round_s=0.15)
    page = Visit(new_tab(context), Site("127.0.0.1", port, None, None, None))  # type: ignore[arg-type]
    try:
        origin = url.split("/?")[0]
        page.page.goto(url)
        cookie = next(
            f"{one['name']}={one['value']}" for one in context.cookies() if str(port) in one["name"]
        )
        live = f"{origin}/live"
        found = [status_of(f"{origin}/healthz"), status_of(live), status_of(live, cookie)]
        assert [status for status, _ in found] == [200, 401, 200]
        page.page.wait_for_function(LISTENS)
        page.send("are you there?")
        until(lambda: "keeps the ones it agrees with" in stored_texts(tmp_path))  # a checkpoint
        page.page.evaluate("window.isOfTheFirst = true")
        page.page.set_input_files("#ls-attach-file", files=[NOTES])
        page.wait_for("6 tokens", "#ls-chips")
        page.page.fill("#ls-message textarea", "not sent yet")
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        page.wait_for("localspec has stopped. Start it again, then reload.", "#ls-notices")
        with contextlib.closing(sqlite3.connect(tmp_path / "localspec.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert server.stdout is not None
        server.stdout.close()
        server, again = start(root, tmp_path, port, round_s=0.01)
        assert again != url and status_of(live, cookie)[0] == 200, "its browser is known again"
        page.page.wait_for_function("() => window.isOfTheFirst === undefined", timeout=WAIT_MS)
        page.wait_for("are you there?")
        page.wait_for("interrupted")
        assert bubbles(page, "user") == ["are you there?"]
        page.page.wait_for_function(f"() => {BOX}.value === 'not sent yet'", timeout=WAIT_MS)
        page.wait_for("6 tokens", "#ls-chips")
        assert "Speculative decoding lets" in bubbles(page)[0]
        page.page.wait_for_function(LISTENS)
        page.page.wait_for_function(READY, timeout=WAIT_MS)
        num_before = page.page.locator("#ls-chat .bot .ls-footer").count()
        page.send("and now?")
        wait_for_reply(page, num_before)
        context.clear_cookies(name=f"localspec_{port}")
        page.wait_for("Open the new link from its window.", "#ls-notices")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=60) is not None
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
        page.page.close()


DOWNLOAD = f'#ls-models [data-download="{TARGET}"]'


def models_page(context: Any, port: int) -> Any:
    page = new_tab(context)
    page.goto(f"http://127.0.0.1:{port}/?token={TOKEN}")
    page.get_by_role("tab", name="Models").first.click()
    button = page.locator(f'#ls-models button[data-act="download"][data-id="{TARGET}"]').first
    button.wait_for(state="attached")
    if not button.is_visible():
        page.locator('#ls-models [data-key="others"] > summary').click()
    button.click()
    return page


def test_check_18_a_download_cut_at_60_percent_goes_on_by_range(
    context: Any, tmp_path: Path
) -> None:
    with models_site(tmp_path, Script()) as models, serve_page(models.service) as port:
        models.hub.fault = "short"
        page = models_page(context, port)
        row = page.locator(DOWNLOAD).first
        go_on = row.get_by_role("button", name=re.compile(r"^Continue"))
        go_on.wait_for()
        assert re.search(r"[\d.]+ of 2(\.\d)? MB|60 %|server", row.inner_text())
        models.hub.fault = None
        models.hub.ranges.clear()
        go_on.click()
        row.get_by_text("every file checked").wait_for()
        starts = [int(asked.removeprefix("bytes=").split("-")[0]) for asked in models.hub.ranges]
        assert starts and max(starts) > 1_000_000, "what had arrived was not fetched again"
        assert min(starts) > 0, "each file that was cut goes on where it was"
        page.close()


def test_check_18_a_full_disk_is_said_before_anything_is_fetched(
    context: Any, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(cache)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be made here: mounting is not permitted")
    try:
        with models_site(tmp_path, Script()) as models, serve_page(models.service) as port:
            page = models_page(context, port)
            row = page.locator(DOWNLOAD).first
            row.get_by_text(re.compile(r"[\d.]+ .*B more are needed, and")).wait_for()
            weights = [one for one in models.hub.requests if "model.safetensors" in one]
            assert not [one for one in weights if one.startswith("GET")], "nothing was fetched"
            page.close()
    finally:
        subprocess.run(["umount", "-l", str(cache)], check=True)
