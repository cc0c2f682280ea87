"""What the page's own routes answer, asked without a browser."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from localspec.chat.service import ChatService
from localspec.record.export import Scope
from localspec.record.store import Store
from localspec.web.models.models_controller import controller_of
from localspec.web.routes import add_routes
from tests.kit.documents import ENDLESS
from tests.kit.fakes import FakeBackend, Script, session_info


def test_a_browser_that_leaves_ends_the_reading_of_its_file(idle_service: ChatService) -> None:
    app, answers = FastAPI(), list[dict[str, Any]]()
    add_routes(app, idle_service, controller_of(idle_service))
    messages = [{"type": "http.request", "body": ENDLESS}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(app(asked("POST", "/read", b"name=endless.docx"), receive, send))
    assert b"endless.docx cannot be read: it was stopped" in answers[-1]["body"]


def test_an_export_on_its_way_lies_beside_the_log_and_is_swept_at_the_next_start(
    tmp_path: Path,
) -> None:
    """A program that is killed while it sends one leaves it there."""
    folders = list[list[Path]]()

    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.name == "export"]

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()  # the browser waits for the answer
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        folders.append(files())

    with closing(Store.open(tmp_path / "localspec.db")) as store:
        service = ChatService(store, session_info, lambda *_: FakeBackend(Script()))
        app = FastAPI()
        add_routes(app, service, controller_of(service))
        for query in (b"format=csv&scope=all", b"format=csv&scope=conversation&conversation=x"):
            asyncio.run(app(asked("GET", "/export", query), receive, send))
        assert [len(found) for found in folders] == [1, 1, 0, 0]
        assert (tmp_path / ".localspec-exports").stat().st_mode & 0o77 == 0
        left = service.export_to_send(Scope(), "jsonl")
        kept = tmp_path / ".localspec-exports" / "other.txt"
        kept.write_text("a person's")
        assert files() == [left]
        service.start()
        assert files() == [] and kept.exists()
        service.close()


def asked(method: str, path: str, query: bytes = b"") -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": query, "headers": [], "client": ("127.0.0.1", 1), "server": None,
        "scheme": "http", "root_path": "",
    }  # fmt: skip
