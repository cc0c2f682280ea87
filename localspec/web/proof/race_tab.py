"""The Race tab: one prompt with and without drafting, and the distribution test.

Contract: `add_tab` makes and connects the tab in the Tabs that are open. Both jobs run in the
service's queue; the page reads their view a few times a second, and leaving the page or pressing
Stop ends them. The lane that begins alternates from race to race.

Not here: what a race or a test is (chat.race, chat.distribution), how they are shown (race_html).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from localspec.chat.distribution import DistributionTest
from localspec.chat.race import Race, race_request
from localspec.chat.service import ChatService, Task
from localspec.core import AUTO, OFF, SamplingParams
from localspec.drafters.registry import REGISTRY, label_of
from localspec.errors import LocalspecError, RequestError
from localspec.web.layout import QUIET, html_box
from localspec.web.proof.race_html import IDLE, race_html, trial_html
from localspec.web.stats.panels import warning_html

POLL_S = 0.15
SEED = 1
TRIAL_DRAFT_TOKENS = 4
NO_DRAFTER = "Nothing can draft here, so there is nothing to compare. The strip above says why."
NOT_LOADED = "No model is loaded yet. Wait until the strip says Ready."
TRIAL_HEAD = """<h2 class="ls-heading">Does drafting change what is written?</h2>
<p class="ls-formula">A race answers that for one prompt and one seed, token by token. This draws
many short replies with drafting and as many without, each with a seed of its own, and compares how
often each token stood where (chi-squared, rare tokens pooled, corrected for the number of
comparisons).</p>"""


@dataclass
class Runs:
    """What runs for the pages of this server. num_races: decides which lane runs first."""

    service: ChatService
    num_races: int = 0
    tasks: dict[str, Task] = field(default_factory=dict)

    def race(self, prompt: str, temperature: float, max_tokens: int, drafter: str) -> Race:
        """Raises RequestError for a value out of range."""
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        request = race_request(prompt, sampling, drafter, max_tokens)
        self.num_races += 1
        return Race(request, is_plain_first=self.num_races % 2 == 1)

    def trial(self, temperature: float, seconds: float, drafter: str) -> DistributionTest:
        """Where no drafter is named: of one that guesses in any text, if there is one; the others
        guess next to nothing in short replies. Raises RequestError where nothing can draft."""
        named = self.drafters() if drafter in (AUTO, OFF) else [drafter]
        if not named:
            raise RequestError(NO_DRAFTER)
        tried = min(named, key=lambda name: not REGISTRY[name].always_proposes)
        sampling = SamplingParams(temperature=temperature)
        return DistributionTest(sampling, tried, TRIAL_DRAFT_TOKENS, seconds)

    def require_model(self) -> None:
        """Raises RequestError before one is loaded."""
        if self.service.status().description is None:
            raise RequestError(NOT_LOADED)

    def drafters(self) -> list[str]:
        loaded = self.service.status().description
        return [] if loaded is None else [one.name for one in loaded.drafters if one.is_available]

    def stop(self, page: str) -> None:
        if page in self.tasks:
            self.tasks[page].cancel.set()

    async def follow(
        self, page: str, name: str, run: Any, show: Callable[[], str]
    ) -> AsyncGenerator[str]:
        """Queue the job and show its view until it is over; closing this ends it."""
        self.stop(page)
        task = self.tasks[page] = self.service.enqueue(name, run)
        shown = ""
        try:
            while not task.done.is_set():
                now = show()
                if now != shown:
                    shown = now
                    yield now
                await asyncio.sleep(POLL_S)
        finally:
            task.cancel.set()
            if self.tasks.get(page) is task:
                del self.tasks[page]
        yield show()


def add_tab(blocks: gr.Blocks, service: ChatService) -> None:
    """The tab with all its components, connected."""
    runs = Runs(service)

    async def race(
        request: gr.Request, prompt: str, temperature: float, max_tokens: float, drafter: str
    ) -> AsyncIterator[str]:
        try:
            runs.require_model()
            if not prompt.strip():
                raise RequestError("Write a prompt first.")
            race = runs.race(prompt, temperature, int(max_tokens or 128), drafter)
        except LocalspecError as error:
            yield warning_html(str(error))
            return
        page = str(request.session_hash)
        shown = runs.follow(page, "a race", race.run, lambda: race_html(race.view))
        async with aclosing(shown):
            async for now in shown:
                yield now

    async def test(
        request: gr.Request, temperature: float, seconds: float, drafter: str
    ) -> AsyncIterator[str]:
        try:
            runs.require_model()
            trial = runs.trial(temperature, seconds, drafter)
        except LocalspecError as error:
            yield warning_html(str(error))
            return
        page = str(request.session_hash)
        shown = runs.follow(
            page, "the distribution test", trial.run, lambda: trial_html(trial.view)
        )
        async with aclosing(shown):
            async for now in shown:
                yield now

    def stop(request: gr.Request) -> None:
        runs.stop(str(request.session_hash))

    def drafters() -> Any:
        choices = [(label_of(name), name) for name in runs.drafters()]
        return gr.update(choices=[("auto", AUTO), *choices])

    with gr.Tab("Race", id="race") as tab:
        prompt, temperature, max_tokens, drafter = _race_form()
        buttons = _buttons("ls-race", "Start the race", "primary")
        shown = html_box(IDLE, "ls-race")
        _run(*buttons, race, stop, [prompt, temperature, max_tokens, drafter], shown)
        html_box(TRIAL_HEAD, "ls-trial-head")
        trial_form = _trial_form()
        buttons = _buttons("ls-trial", "Test the distribution", "secondary")
        _run(*buttons, test, stop, [*trial_form, drafter], html_box("", "ls-trial"))
    tab.select(drafters, None, drafter, **QUIET)
    blocks.unload(stop)


def _race_form() -> tuple[gr.Textbox, gr.Slider, gr.Number, gr.Dropdown]:
    with gr.Row(elem_id="ls-race-form"):
        prompt = gr.Textbox(
            value="Explain what speculative decoding is, in three sentences.",
            label="Prompt for both",
            lines=2,
            max_lines=8,
            scale=3,
            elem_id="ls-race-prompt",
        )
        temperature = gr.Slider(0, 1.5, value=0.7, step=0.1, label="Temperature", min_width=190)
        max_tokens = gr.Number(
            value=128, minimum=8, maximum=2048, precision=0, label="Max tokens", min_width=110
        )
        drafter = gr.Dropdown(
            [("auto", AUTO)], value=AUTO, label="Drafter", filterable=False, min_width=150,
            elem_id="ls-race-drafter",
        )  # fmt: skip
    return prompt, temperature, max_tokens, drafter


def _trial_form() -> tuple[gr.Slider, gr.Slider]:
    with gr.Row(elem_id="ls-trial-form"):
        temperature = gr.Slider(
            0.1, 1.5, value=1.0, step=0.1, label="Temperature of the test", min_width=150
        )
        seconds = gr.Slider(5, 120, value=20, step=5, label="Seconds at most", min_width=150)
    return temperature, seconds


def _buttons(name: str, label: str, variant: Any) -> tuple[gr.Button, gr.Button]:
    with gr.Row(elem_id=f"{name}-buttons", elem_classes="ls-buttons"):
        start = gr.Button(label, variant=variant, elem_id=f"{name}-start")
        stop = gr.Button("Stop", elem_id=f"{name}-stop", interactive=False)
    return start, stop


def _run(
    start: gr.Button,
    stop: gr.Button,
    job: Callable[..., AsyncIterator[str]],
    end: Callable[..., None],
    form: Sequence[gr.components.Component],
    shown: gr.HTML,
) -> None:
    """Run the job when its button is pressed; it can be stopped as long as it runs."""
    start.click(lambda: gr.Button(interactive=True), None, stop, queue=False, **QUIET)
    running = start.click(job, form, shown, **QUIET)
    running.then(lambda: gr.Button(interactive=False), None, stop, queue=False, **QUIET)
    stop.click(end, None, None, queue=False, **QUIET)
