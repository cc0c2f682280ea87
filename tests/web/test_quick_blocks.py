"""What is sent for an event is what Gradio sends, and a skipped output makes no component."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState

from localspec.web.quick_blocks import QuickBlocks

pytestmark = pytest.mark.slow

VALUES: list[list[Any]] = [
    [gr.skip(), gr.skip(), gr.skip()],
    [gr.skip(), gr.update(interactive=True), gr.skip()],
    [7, gr.skip(), [{"role": "user", "content": "hello"}]],
    [gr.update(value=None), gr.update(interactive=False), []],
    [None, gr.skip(), gr.skip()],
]


@pytest.fixture(scope="module")
def blocks() -> QuickBlocks:
    """An event with no output, one with one and so on, each at the place of its number."""
    with QuickBlocks() as made:
        outputs = [gr.Number(), gr.Button(), gr.Chatbot()]
        for num_outputs in range(len(outputs) + 1):
            gr.Button().click(print, None, outputs[len(outputs) - num_outputs :])
    return made


def sent(
    blocks: QuickBlocks, way: type[gr.Blocks], values: Any, num_outputs: int = 3
) -> tuple[Any, int]:
    """What a page gets for them, and how many components were made for it."""
    state, event = SessionState(blocks), blocks.default_config.fns[num_outputs]
    made = way.postprocess_data(blocks, event, deepcopy(values), state)
    # In a thread: the main one may have the loop of a browser's tests.
    with ThreadPoolExecutor() as threads:
        found = threads.submit(asyncio.run, made).result()
    return found, sum(state[one._id] is not one for one in event.outputs)


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_the_browser_is_sent_what_gradio_sends(blocks: QuickBlocks, values: list[Any]) -> None:
    assert sent(blocks, QuickBlocks, values)[0] == sent(blocks, gr.Blocks, values)[0]


def test_one_output_is_sent_as_gradio_sends_it(blocks: QuickBlocks) -> None:
    for value in (gr.skip(), [{"role": "assistant", "content": "hi"}]):
        assert sent(blocks, QuickBlocks, value, 1)[0] == sent(blocks, gr.Blocks, value, 1)[0]
    assert sent(blocks, QuickBlocks, gr.skip())[0] == sent(blocks, gr.Blocks, gr.skip())[0], (
        "one for all"
    )


def test_an_event_without_outputs_sends_nothing_and_too_few_values_are_refused(
    blocks: QuickBlocks,
) -> None:
    assert sent(blocks, QuickBlocks, None, 0)[0] == []
    with pytest.raises(ValueError, match="returned"):
        sent(blocks, QuickBlocks, [gr.skip()])


def test_a_skipped_output_makes_no_component(blocks: QuickBlocks) -> None:
    values = [gr.skip(), gr.update(interactive=True), gr.skip()]
    assert sent(blocks, gr.Blocks, values)[1] == 3
    assert sent(blocks, QuickBlocks, values)[1] == 1
