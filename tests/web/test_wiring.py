"""What the page holds when it opens."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from localspec.web.talk.form import Form, defaults, form_html
from tests.kit.fakes import FakeBackend, session_info


@pytest.fixture(scope="module")
def built_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Of a service for which a drafter was asked."""
    from localspec.web.wiring import build_page

    store = Store.open(tmp_path_factory.mktemp("page") / "localspec.db")
    yield build_page(ChatService(store, session_info, lambda report: FakeBackend(), "ngram"))
    store.close()


@pytest.mark.slow
def test_the_page_starts_with_the_drafter_that_was_asked_for(
    built_page: Any, idle_service: ChatService
) -> None:
    found = next(block for block in built_page.blocks.values() if block.elem_id == "ls-form-box")
    assert Form.read(found.value) == Form(drafter="ngram")
    for drafter in ("auto", "off", "ngram"):
        assert f'name="drafter" value="{drafter}"' in found.html_template
    assert defaults(idle_service, None) == Form(drafter="auto"), "nothing was asked for"


def test_every_setting_has_one_field_of_its_name(idle_service: ChatService) -> None:
    html = form_html(idle_service)
    names = Counter(re.findall(r'<(?:input|select|textarea)[^>]* name="(\w+)"', html))
    assert set(names) == {field.name for field in fields(Form)}
    assert {name for name, count in names.items() if count > 1} == {"drafter"}


def test_the_queue_makes_no_table_of_its_events(built_page: Any) -> None:
    """Gradio made one after every event, which took longer than most of ours."""
    queue = built_page._queue
    queue.events_recorded = 1000
    event = {"function": "send", "status": "success", "process_time": 0.1}
    assert queue.compute_analytics_summary([event]) == {"functions": {}}


def test_no_component_shows_the_progress_of_an_event(built_page: Any) -> None:
    """Gradio copied all that those hold at each step of any event, a long chat at every word."""
    events = built_page.get_config_file()["dependencies"]
    told = [event["show_progress_on"] for event in events if event["backend_fn"]]
    closing = [event for event in events if ("unload" in str(event["targets"]))]
    assert told.count([]) == len(told) - len(closing) > 20
