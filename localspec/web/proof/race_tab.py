"""The Race tab: one prompt with and without drafting.

Contract: `add_tab` makes and connects the tab in the Tabs that are open. A race runs in the
service's queue; the page reads its view a few times a second, and leaving the page or pressing
Stop ends it. The lane that begins alternates from race to race.

Not here: what a race is (chat.race), how it is shown (race_html).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from localspec.chat.race import Race, race_request
from localspec.chat.service import ChatService, Task
from localspec.core.decoding import AUTO, SamplingParams
from localspec.core.errors import LocalspecError, RequestError
from localspec.drafters.registry import label_of
from localspec.web.layout import QUIET, choice, html_box
from localspec.web.proof.race_html import IDLE, race_html
from localspec.web.stats.tab import PANELS

POLL_S = 0.15
SEED = 1
FEWEST_TOKENS, MOST_TOKENS = 8, 2048  # of a reply
ON_A_SERVER = (
    "A server answers, which does not tell the tokens that a race compares. Load a model of this "
    "machine, under Models, to race."
)
# The button to stop is off when it has done its work, and would take the focus with it.
TO_START = "() => { document.querySelector('#ls-race-start').focus(); return []; }"


@dataclass(eq=False)
class Runs:
    """What runs for the pages of this server. num_races: decides which lane runs first."""

    service: ChatService
    num_races: int = 0
    tasks: dict[str, Task] = field(default_factory=dict)

    def race(self, prompt: str, temperature: float, max_tokens: int, drafter: str) -> Race:
        """Raises RequestError for a value out of range."""
        if not prompt.strip():
            raise RequestError("Write a prompt first.")
        if not FEWEST_TOKENS <= max_tokens <= MOST_TOKENS:
            raise RequestError(
                f"Max tokens is {max_tokens:,}, but must lie between {FEWEST_TOKENS} and "
                f"{MOST_TOKENS:,} in a race."
            )
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        request = race_request(prompt, sampling, drafter, max_tokens)
        self.num_races += 1
        return Race(request, is_plain_first=self.num_races % 2 == 1)

    def stop(self, page: str) -> None:
        if page in self.tasks:
            self.tasks[page].cancel.set()

    async def follow(self, page: str, race: Race) -> AsyncGenerator[str]:
        """Queue the race, which loads a model that was let go, and show its view until it is over;
        closing this ends it."""
        self.stop(page)
        task = self.tasks[page] = self.service.enqueue("a race", race.run)
        shown = ""
        try:
            while not task.done.is_set():
                now = race_html(race.view)
                if now != shown:
                    shown = now
                    yield now
                await asyncio.sleep(POLL_S)
        finally:
            task.cancel.set()
            if self.tasks.get(page) is task:
                del self.tasks[page]
        yield race_html(race.view, is_over=True, error=task.error)


def add_tab(blocks: gr.Blocks, service: ChatService) -> None:
    """The tab with all its components, connected."""
    runs = Runs(service)

    async def race(
        request: gr.Request, prompt: str, temperature: float, max_tokens: float | None, drafter: str
    ) -> AsyncIterator[str]:
        try:
            race = runs.race(prompt, temperature, int(max_tokens or 0), drafter)
        except LocalspecError as error:
            yield PANELS.warning(str(error))
            return
        shown = runs.follow(str(request.session_hash), race)
        async with aclosing(shown):
            async for now in shown:
                yield now

    def stop(request: gr.Request) -> None:
        runs.stop(str(request.session_hash))

    def opened() -> tuple[Any, Any, str]:
        loaded = service.status().description
        drafters = () if loaded is None else loaded.drafters
        choices = [(label_of(one.name), one.name) for one in drafters if one.is_available]
        can_race = loaded is None or loaded.server is None
        note = "" if can_race else PANELS.warning(ON_A_SERVER)
        return gr.update(choices=[("Auto", AUTO), *choices]), gr.Button(interactive=can_race), note

    with gr.Tab("Race", id="race") as tab:
        prompt, temperature, max_tokens, drafter = _race_form()
        with gr.Row(elem_id="ls-race-buttons", elem_classes="ls-buttons"):
            start = gr.Button("Start the race", variant="primary", elem_id="ls-race-start")
            end = gr.Button("Stop", elem_id="ls-race-stop", interactive=False)
        note = html_box("", "ls-race-note")
        shown = html_box(IDLE, "ls-race")
    start.click(lambda: gr.Button(interactive=True), None, end, queue=False, **QUIET)
    running = start.click(race, [prompt, temperature, max_tokens, drafter], shown, **QUIET)
    running.then(lambda: gr.Button(interactive=False), None, end, queue=False, **QUIET)
    end.click(stop, None, None, js=TO_START, queue=False, **QUIET)
    tab.select(opened, None, [drafter, start, note], **QUIET)
    blocks.unload(stop)


def _race_form() -> tuple[gr.Textbox, gr.Slider, gr.Number, gr.HTML]:
    with gr.Row(elem_id="ls-race-form", elem_classes="ls-fields"):
        prompt = gr.Textbox(
            value="Explain what speculative decoding is, in three sentences.",
            label="Prompt for both",
            lines=2,
            max_lines=8,
            scale=3,
            min_width=320,
            elem_id="ls-race-prompt",
        )
        temperature = gr.Slider(0, 1.5, value=0.7, step=0.1, label="Temperature", min_width=190)
        max_tokens = gr.Number(value=128, precision=0, label="Max tokens", min_width=110)
        drafter = choice("Drafter", [("Auto", AUTO)], "ls-race-drafter")
    return prompt, temperature, max_tokens, drafter
