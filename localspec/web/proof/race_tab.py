"""The Race tab: one prompt with and without drafting, and the distribution test.

Contract: `lay_out` makes the tab in the Tabs that are open, `wire` connects it inside the same
Blocks. Both run in the service's queue; the page looks at their view a few times a second, and
leaving the page or pressing Stop ends them. Who goes first alternates from race to race.

Not here: what a race or a test is (chat.race, chat.distribution), how they look (race_html).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.distribution import DistributionTest
from localspec.chat.race import Race, race_request
from localspec.chat.service import ChatService, Task
from localspec.core import AUTO, OFF, SamplingParams
from localspec.drafters.registry import REGISTRY
from localspec.errors import LocalspecError
from localspec.web.proof.race_html import IDLE, race_html, trial_html
from localspec.web.stats.panels import warning_html

QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
LOOK_S = 0.15
SEED = 1
TRIAL_DRAFT_TOKENS = 4
NO_DRAFTER = "Nothing can draft here, so there is nothing to compare. The strip above says why."
NOT_LOADED = "No model is loaded yet. Wait until the strip says Ready."


class RacePage(NamedTuple):
    """The components of the Race tab."""

    tab: gr.Tab
    prompt: gr.Textbox
    temperature: gr.Slider
    max_tokens: gr.Number
    drafter: gr.Dropdown
    start: gr.Button
    stop: gr.Button
    race: gr.HTML
    trial_temperature: gr.Slider
    trial_seconds: gr.Slider
    trial_start: gr.Button
    trial_stop: gr.Button
    trial: gr.HTML


def lay_out() -> RacePage:
    """The tab with all its components, in the Tabs that are open."""
    with gr.Tab("Race", id="race") as tab:
        with gr.Row(elem_id="ls-race-form"):
            prompt = gr.Textbox(
                value="Explain what speculative decoding is, in three sentences.",
                label="Prompt for both",
                lines=2,
                max_lines=8,
                scale=3,
                elem_id="ls-race-prompt",
            )
            temperature = gr.Slider(
                0, 1.5, value=0, step=0.1, label="Temperature", info="0: both must agree.",
                min_width=190,
            )  # fmt: skip
            max_tokens = gr.Number(
                value=128, minimum=8, maximum=2048, precision=0, label="Max tokens", min_width=110
            )
            drafter = gr.Dropdown(
                [("auto", AUTO)], value=AUTO, label="Who drafts", filterable=False, min_width=150,
                elem_id="ls-race-drafter",
            )  # fmt: skip
        with gr.Row(elem_id="ls-race-buttons", elem_classes="ls-buttons"):
            start = gr.Button("Start the race", variant="primary", elem_id="ls-race-start")
            stop = gr.Button("Stop", elem_id="ls-race-stop", interactive=False)
        race = _html("ls-race", IDLE)
        _html("ls-trial-head", TRIAL_HEAD)
        with gr.Row(elem_id="ls-trial-form"):
            trial_temperature = gr.Slider(
                0.1, 1.5, value=1.0, step=0.1, label="Temperature of the test", min_width=150
            )
            trial_seconds = gr.Slider(
                5, 120, value=20, step=5, label="Seconds at most", min_width=150
            )
        with gr.Row(elem_id="ls-trial-buttons", elem_classes="ls-buttons"):
            trial_start = gr.Button("Test the distribution", elem_id="ls-trial-start")
            trial_stop = gr.Button("Stop", elem_id="ls-trial-stop", interactive=False)
        trial = _html("ls-trial", "")
    return RacePage(
        tab, prompt, temperature, max_tokens, drafter, start, stop, race,
        trial_temperature, trial_seconds, trial_start, trial_stop, trial,
    )  # fmt: skip


TRIAL_HEAD = """<h2 class="ls-heading">Does drafting change what is written?</h2>
<p class="ls-formula">At temperature 0 a race answers that. For sampled replies this draws many
short ones with drafting and as many without, and compares how often each token stood where
(chi-squared, rare tokens pooled, corrected for the number of comparisons).</p>"""


def _html(name: str, value: str) -> gr.HTML:
    return gr.HTML(value, elem_id=name, padding=False, apply_default_css=False)


@dataclass
class Runs:
    """What runs for the pages of this server. num_races: decides who goes first."""

    service: ChatService
    num_races: int = 0
    tasks: dict[str, Task] = field(default_factory=dict)

    def race(self, prompt: str, temperature: float, max_tokens: int, drafter: str) -> Race:
        """Raises RequestError for a value out of range."""
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        request = race_request(prompt, "", sampling, drafter, max_tokens)
        self.num_races += 1
        return Race(request, is_plain_first=self.num_races % 2 == 1)

    def trial(self, temperature: float, seconds: float, drafter: str) -> DistributionTest | None:
        """None where nothing can draft. Where no drafter is named it is one that guesses in any
        text, if there is one; the others guess next to nothing in short ones."""
        named = self.drafters() if drafter in (AUTO, OFF) else [drafter]
        if not named:
            return None
        tried = min(named, key=lambda name: not REGISTRY[name].always_proposes)
        sampling = SamplingParams(temperature=temperature)
        return DistributionTest(sampling, tried, TRIAL_DRAFT_TOKENS, seconds)

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
        seen = ""
        try:
            while not task.done.is_set():
                now = show()
                if now != seen:
                    seen = now
                    yield now
                await asyncio.sleep(LOOK_S)
        finally:
            task.cancel.set()
            if self.tasks.get(page) is task:
                del self.tasks[page]
        yield show()


def wire(blocks: gr.Blocks, service: ChatService, view: RacePage) -> None:
    """Connect the buttons."""
    runs = Runs(service)

    async def start(
        request: gr.Request, prompt: str, temperature: float, max_tokens: float, drafter: str
    ) -> AsyncIterator[str]:
        problem = _problem(service, prompt)
        if problem is not None:
            yield warning_html(problem)
            return
        try:
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
        problem = _problem(service, "any")
        trial = None if problem else runs.trial(temperature, seconds, drafter)
        if trial is None:
            yield warning_html(problem or NO_DRAFTER)
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
        return gr.update(choices=[("auto", AUTO), *((name, name) for name in runs.drafters())])

    form = [view.prompt, view.temperature, view.max_tokens, view.drafter]
    _run(view.start, view.stop, start, form, view.race)
    trial_form = [view.trial_temperature, view.trial_seconds, view.drafter]
    _run(view.trial_start, view.trial_stop, test, trial_form, view.trial)
    for button in (view.stop, view.trial_stop):
        button.click(stop, None, None, queue=False, **QUIET)
    view.tab.select(drafters, None, view.drafter, **QUIET)
    blocks.unload(stop)


def _run(
    start: gr.Button,
    stop: gr.Button,
    job: Callable[..., AsyncIterator[str]],
    form: Sequence[gr.components.Component],
    shown: gr.HTML,
) -> None:
    """Run the job when its button is pressed; it can be stopped as long as it runs."""
    start.click(lambda: gr.Button(interactive=True), None, stop, queue=False, **QUIET)
    running = start.click(job, form, shown, **QUIET)
    running.then(lambda: gr.Button(interactive=False), None, stop, queue=False, **QUIET)


def _problem(service: ChatService, prompt: str) -> str | None:
    if service.status().description is None:
        return NOT_LOADED
    return None if prompt.strip() else "Write a prompt first."
