"""What the page holds when it opens."""

from pathlib import Path

import gradio as gr
import pytest

from localspec.chat.service import ChatService
from localspec.record.store import Store
from localspec.web.wiring import build_page
from tests.fakes import FakeBackend, session_info


@pytest.mark.parametrize("drafter", ["auto", "off", "ngram"])
def test_the_page_starts_with_the_drafter_that_was_asked_for(tmp_path: Path, drafter: str) -> None:
    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(store, session_info, lambda report: FakeBackend(), drafter)
    blocks = build_page(service).blocks.values()
    chosen = next(
        b for b in blocks if isinstance(b, gr.Dropdown) and b.elem_id == "ls-drafter-choice"
    )
    store.close()
    assert chosen.value == drafter
    assert drafter in [name for _, name in chosen.choices]
