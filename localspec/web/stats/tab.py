"""The Stats tab: its components, and what fills them.

Contract: `lay_out` makes the tab in the Tabs that are open, `wire` connects it inside the same
Blocks. The tab is filled when it is opened or a filter changes, never while a reply is written.

Not here: figures (figures), plots (log_plots), HTML (panels).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.service import ChatService
from localspec.errors import StoreError
from localspec.web.stats import figures as stats
from localspec.web.stats.figures import TURN_COLUMNS
from localspec.web.stats.log_plots import make_plots
from localspec.web.stats.panels import (
    exports_html,
    plots_html,
    summary_html,
    waits_html,
    warning_html,
)
from localspec.web.stats.selection import ALL_MODELS, Selection, day_of, models_of, rounds_of


class StatsPage(NamedTuple):
    """The components of the Stats tab."""

    tab: gr.Tab
    scope: gr.Radio
    model: gr.Dropdown
    since: gr.Textbox
    until: gr.Textbox
    warning: gr.HTML
    exports: gr.HTML
    summary: gr.HTML
    plots: gr.HTML
    waits: gr.HTML
    turns: gr.Dataframe


def lay_out() -> StatsPage:
    """The tab with all its components, in the Tabs that are open."""
    with gr.Tab("Stats", id="stats") as tab:
        return _inside(tab)


def _inside(tab: gr.Tab) -> StatsPage:
    with gr.Row(elem_id="ls-stats-top"):
        scope = gr.Radio(
            [
                ("This session", "session"),
                ("This conversation", "conversation"),
                ("Everything", "all"),
            ],
            value="session",
            label="Show and export",
            elem_id="ls-scope",
        )
        exports = _html("ls-exports")
    with gr.Row(elem_id="ls-filters", elem_classes="ls-filters"):
        model = gr.Dropdown(
            [("Every model", ALL_MODELS)],
            value=ALL_MODELS,
            label="Model",
            filterable=False,
            elem_id="ls-stats-model",
        )
        since = gr.Textbox(
            label="From day", placeholder="2026-01-31", max_lines=1, elem_id="ls-since"
        )
        until = gr.Textbox(
            label="Until day", placeholder="2026-12-31", max_lines=1, elem_id="ls-until"
        )
    warning, summary = _html("ls-stats-warning"), _html("ls-summary")
    plots, waits = _html("ls-plots-box"), _html("ls-waits")
    turns = gr.Dataframe(
        headers=list(TURN_COLUMNS),
        interactive=False,
        wrap=False,
        label="Turns",
        elem_id="ls-turns",
        max_height=420,
    )
    return StatsPage(
        tab, scope, model, since, until, warning, exports, summary, plots, waits, turns
    )


def _html(name: str) -> gr.HTML:
    return gr.HTML(elem_id=name, padding=False, apply_default_css=False)


def wire(
    blocks: gr.Blocks, service: ChatService, view: StatsPage, conversation: gr.components.Component
) -> None:
    """Fill the tab whenever it is opened or a filter changes. conversation: holds the handle of
    the conversation that is shown."""

    def refresh(scope: str, model: str, since: str, until: str, handle: int | None) -> list[Any]:
        try:
            selection = Selection(scope, handle, model, day_of(since), day_of(until))
            found = fill(service, selection)
        except StoreError as error:
            return [gr.skip(), warning_html(str(error)), *[gr.skip()] * 5]
        choices = [("Every model", ALL_MODELS), *((name, name) for name in models_of(service))]
        return [gr.update(choices=choices), "", *found]

    outputs = [
        view.model,
        view.warning,
        view.exports,
        view.summary,
        view.plots,
        view.waits,
        view.turns,
    ]
    inputs = [view.scope, view.model, view.since, view.until, conversation]
    for event in (
        view.tab.select,
        view.scope.input,
        view.model.input,
        view.since.submit,
        view.since.blur,
        view.until.submit,
        view.until.blur,
    ):
        event(refresh, inputs, outputs, api_visibility="private", show_progress="hidden")


def fill(service: ChatService, selection: Selection) -> list[Any]:
    """Exports, summary, plots, waits and the table of these turns. Raises StoreError."""
    rows = selection.rows(service)
    rounds = rounds_of(service, rows)
    plots = make_plots(rows, rounds, service.status().description)
    summary = stats.summarise(rows, rounds)
    return [
        exports_html(selection),
        summary_html(summary, stats.seconds_saved(rows)),
        plots_html(plots),
        waits_html(*stats.with_and_without(rows, rounds)),
        gr.update(value=stats.turn_table(rows)),
    ]
