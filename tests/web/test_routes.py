"""What the page's own routes answer, asked without a browser."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI

from localspec.chat.service import ChatService
from localspec.web.models.models_controller import controller_of
from localspec.web.routes import add_routes
from tests.chat.test_documents import ENDLESS


def test_a_browser_that_leaves_ends_the_reading_of_its_file(service: ChatService) -> None:
    app, answers = FastAPI(), list[dict[str, Any]]()
    add_routes(app, service, controller_of(service))
    messages = [{"type": "http.request", "body": ENDLESS}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        answers.append(message)

    asyncio.run(app(asked("POST", "/read", b"name=endless.docx"), receive, send))
    assert b"endless.docx cannot be read: it was stopped" in answers[-1]["body"]


def asked(method: str, path: str, query: bytes = b"") -> dict[str, Any]:
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": query, "headers": [], "client": ("127.0.0.1", 1), "server": None,
        "scheme": "http", "root_path": "",
    }  # fmt: skip
