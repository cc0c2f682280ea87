"""How the page and the interfaces for other programs open their engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import app
from localspec.chat.service import ChatService
from localspec.core.errors import ModelError
from localspec.remote.child import ChildBackend
from localspec.remote.wire import Opening
from localspec.web import server
from tests.kit import waiting
from tests.kit.command_line import invoke


@pytest.mark.parametrize(
    ("start", "leaves_a_core"),
    [
        (lambda home: app.start(app.parse_arguments(["--no-browser", "--home", home])), True),
        (lambda home: invoke("serve", "--home", home), False),
    ],
    ids=["page", "serve"],
)
def test_only_a_page_takes_a_core_from_the_model(
    start: Callable[[str], object],
    leaves_a_core: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[bool]()

    def opened(opening: Opening, report: object) -> ChildBackend:
        asked.append(opening.keywords["beside_page"])
        raise ModelError("enough is known")

    def until_opened(service: ChatService, *_: Any) -> None:
        service.start()
        waiting.until(lambda: bool(asked))
        service.close()

    monkeypatch.setattr(ChildBackend, "open", opened)
    monkeypatch.setattr(server, "serve", until_opened)
    monkeypatch.setattr(server, "serve_interfaces", until_opened)
    start(str(tmp_path))
    assert asked == [leaves_a_core]
