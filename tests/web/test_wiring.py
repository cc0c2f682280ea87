"""What the page holds when it opens."""

from pathlib import Path

import gradio as gr
import pytest

from localspec.chat.service import ChatService
from localspec.leniency import THRESHOLD
from localspec.record.store import Store
from localspec.web.talk.form import Form, lay_out
from localspec.web.wiring import build_page
from localspec.workloads import AS_SET
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


def test_each_field_of_the_settings_holds_what_it_is_named_for(service: ChatService) -> None:
    with gr.Blocks():
        fields = lay_out(service).fields
    assert Form(*(field.value for field in fields)) == Form(
        temperature=0.7, top_p=1.0, max_tokens=512, seed=None, system_prompt=None, drafter="auto",
        top_k=0, min_p=0, repetition_penalty=1, fixed_gamma=None, workload="auto",
        checking=AS_SET, lenient_rule=THRESHOLD,
    )  # fmt: skip
