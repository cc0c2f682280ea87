"""The Stats tab: its components, and what fills them.

Contract: `add_tab` makes and connects the tab in the Tabs that are open. It is filled when it is
opened or a filter changes, never while a reply is written.

Not here: figures (figures), plots (log_plots), HTML (panels).
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from localspec.chat.service import ChatService
from localspec.errors import StoreError
from localspec.web.layout import QUIET, html_box
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

SCOPES = [
    ("This session", "session"),
    ("This conversation", "conversation"),
    ("Everything", "all"),
]
EVERY_MODEL = ("Every model", ALL_MODELS)


def add_tab(service: ChatService, conversation: gr.components.Component) -> None:
    """The tab with all its components, connected. conversation: holds the handle of the
    conversation that is shown."""

    def refresh(scope: str, model: str, since: str, until: str, handle: int | None) -> list[Any]:
        try:
            selection = Selection(scope, handle, model, day_of(since), day_of(until))
            found = fill(service, selection)
        except StoreError as error:
            return [gr.skip(), warning_html(str(error)), *[gr.skip()] * 5]
        choices = [EVERY_MODEL, *((name, name) for name in models_of(service))]
        return [gr.update(choices=choices), "", *found]

    with gr.Tab("Stats", id="stats") as tab:
        with gr.Row(elem_id="ls-stats-top"):
            scope = gr.Radio(SCOPES, value="session", label="Show and export", elem_id="ls-scope")
            exports = html_box("", "ls-exports")
        with gr.Row(elem_id="ls-filters", elem_classes="ls-filters"):
            model = gr.Dropdown(
                [EVERY_MODEL], value=ALL_MODELS, label="Model", filterable=False,
                elem_id="ls-stats-model",
            )  # fmt: skip
            since = gr.Textbox(
                label="From day", placeholder="2026-01-31", max_lines=1, elem_id="ls-since"
            )
            until = gr.Textbox(
                label="Until day", placeholder="2026-12-31", max_lines=1, elem_id="ls-until"
            )
        names = ("ls-stats-warning", "ls-summary", "ls-plots-box", "ls-waits")
        warning, summary, plots, waits = (html_box("", name) for name in names)
        turns = gr.Dataframe(
            headers=list(TURN_COLUMNS), interactive=False, wrap=False, label="Turns",
            elem_id="ls-turns", max_height=420,
        )  # fmt: skip
    inputs = [scope, model, since, until, conversation]
    outputs = [model, warning, exports, summary, plots, waits, turns]
    filters = (scope.input, model.input, since.submit, since.blur, until.submit, until.blur)
    for event in (tab.select, *filters):
        event(refresh, inputs, outputs, **QUIET)


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
