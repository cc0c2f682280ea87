"""Gradio's blocks, in which an output that a handler skips costs nothing.

Contract: as `gradio.Blocks`. For every output that is skipped Gradio makes its component anew and
describes it, two milliseconds of a core; of the eight outputs of most of our events few change.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import gradio as gr

SKIPPED = gr.skip()


class QuickBlocks(gr.Blocks):
    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """What the browser is sent for each output."""
        outputs = block_fn.outputs
        values = predictions if len(outputs) > 1 else [predictions]
        if not isinstance(values, list | tuple) or len(values) != len(outputs):
            return await super().postprocess_data(block_fn, predictions, state)  # type: ignore[no-any-return]
        told = [place for place, value in enumerate(values) if value != SKIPPED]
        sent: list[Any] = [dict(SKIPPED) for _ in values]
        if told:
            part = copy(block_fn)
            part.outputs = [outputs[place] for place in told]
            of_part = [values[place] for place in told]
            made = await super().postprocess_data(
                part, of_part[0] if len(told) == 1 else of_part, state
            )
            for place, value in zip(told, made, strict=True):
                sent[place] = value
        return sent
