"""How the page and the interfaces for other programs open their engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import app
from localspec.chat.service import ChatService
from localspec.core.config import settings_for
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.loading.service import opened_service
from localspec.record.store import Store
from localspec.remote.child import ChildBackend
from localspec.remote.wire import Opening
from localspec.web import server
from tests.kit import waiting
from tests.kit.command_line import invoke
from tests.kit.samples import begin, finish


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


def test_the_engine_counts_what_stands_in_the_log_when_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was deleted, or never logged, does not reach it."""
    settings = settings_for(tmp_path)
    asked = list[Sequence[str]]()

    def opened(opening: Opening, report: object) -> ChildBackend:
        asked.append(opening.keywords["replies"])
        raise ModelError("enough is known")

    monkeypatch.setattr(ChildBackend, "open", opened)
    with closing(Store.open(settings.database)) as store:
        for text in ("kept", "deleted"):
            finish(store, begin(store), text)
        store.conversation_list.delete(store.conversations()[-1].id)
        store.logs_text = False
        finish(store, begin(store), "private")
    with opened_service(LoadOptions(home=tmp_path), None, beside_page=False) as service:
        service.start()
        waiting.until(lambda: bool(asked))
        service.close()
    assert asked == [("kept",)]
