"""What the page holds when it opens."""

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from localspec.web.talk.form import Form, form_html
from tests.fakes import FakeBackend, session_info


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["auto", "off", "ngram"])
def test_the_page_starts_with_the_drafter_that_was_asked_for(tmp_path: Path, drafter: str) -> None:
    from localspec.web.wiring import build_page

    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(store, session_info, lambda report: FakeBackend(), drafter)
    blocks = build_page(service).blocks.values()
    found = next(block for block in blocks if block.elem_id == "ls-form-box")
    store.close()
    assert Form.read(found.value) == Form(drafter=drafter)
    assert f'name="drafter" value="{drafter}"' in found.html_template


def test_every_setting_has_one_field_of_its_name(service: ChatService) -> None:
    html = form_html(service)
    names = Counter(re.findall(r'<(?:input|select|textarea)[^>]* name="(\w+)"', html))
    assert set(names) == {field.name for field in fields(Form)}
    assert {name for name, count in names.items() if count > 1} == {"drafter"}


def test_the_queue_makes_no_table_of_its_events(service: ChatService) -> None:
    """Gradio made one after every event, which took longer than most of ours."""
    from localspec.web.wiring import build_page

    queue = build_page(service)._queue
    queue.events_recorded = 1000
    event = {"function": "send", "status": "success", "process_time": 0.1}
    assert queue.compute_analytics_summary([event]) == {"functions": {}}


def test_no_component_shows_the_progress_of_an_event(service: ChatService) -> None:
    """Gradio copied all that those hold at each step of any event, a long chat at every word."""
    from localspec.web.wiring import build_page

    events = build_page(service).get_config_file()["dependencies"]
    told = [event["show_progress_on"] for event in events if event["backend_fn"]]
    closing = [event for event in events if ("unload" in str(event["targets"]))]
    assert told.count([]) == len(told) - len(closing) > 20
