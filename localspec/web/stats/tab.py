"""The Stats tab: its components, and what fills them.

Contract: `add_tab` makes and connects the tab in the Tabs that are open. It is filled when it is
opened or a filter changes, never while a reply is written.

Not here: figures (figures), plots (log_plots), HTML (templates/stats.html).
"""

from __future__ import annotations

from typing import Any

import gradio as gr

from localspec.chat.service import ChatService
from localspec.core.errors import StoreError
from localspec.core.leniency import label
from localspec.core.units import capital
from localspec.record.rows import API, PAGE
from localspec.web.layout import QUIET, choice, html_box
from localspec.web.markup import macros
from localspec.web.stats import figures as stats
from localspec.web.stats import hindsight
from localspec.web.stats.log_plots import MAIN, make_plots
from localspec.web.stats.selection import (
    ALL_MODELS,
    ANYONE,
    SCOPES,
    WHOSE,
    Selection,
    day_of,
    rounds_of,
)

SOURCES = [("You", PAGE), ("Other programs", API), ("Anyone", ANYONE)]
EVERY_MODEL = ("Every model", ALL_MODELS)
PANELS = macros("stats.html", lenient=label)


def add_tab(service: ChatService, conversation: gr.components.Component) -> None:
    """The tab with all its components, connected. conversation: holds the handle of the
    conversation that is shown."""

    def refresh(
        scope: str, source: str, model: str, since: str, until: str, handle: int | None
    ) -> list[Any]:
        try:
            selection = Selection(scope, handle, model, day_of(since), day_of(until), source)
            found = fill(service, selection)
        except StoreError as error:
            return [gr.skip(), PANELS.warning(str(error)), *[gr.skip()] * 5]
        choices = [EVERY_MODEL, *((name, name) for name in service.logged_models())]
        return [gr.update(choices=choices), "", *found]

    with gr.Tab("Stats", id="stats") as tab:
        warning, summary = html_box("", "ls-stats-warning"), html_box("", "ls-summary")
        scopes = [(capital(words), name) for name, words in SCOPES.items()]
        with gr.Row(elem_id="ls-stats-top"):
            scope = gr.Radio(scopes, value="all", label="Show and export", elem_id="ls-scope")
            exports = html_box("", "ls-exports")
        with (
            gr.Accordion(
                "Filter figures and report by who asked, model or day",
                open=False,
                elem_id="ls-filters-fold",
            ),
            gr.Row(elem_id="ls-filters", elem_classes="ls-fields"),
        ):
            source = choice("Asked by", SOURCES, "ls-stats-source")
            model = choice("Model", [EVERY_MODEL], "ls-stats-model")
            since = gr.Textbox(
                label="From day", placeholder="2026-01-31", max_lines=1, elem_id="ls-since"
            )
            until = gr.Textbox(
                label="Until day", placeholder="2026-12-31", max_lines=1, elem_id="ls-until"
            )
        names = ("ls-plots-box", "ls-figures", "ls-turns")
        plots, figures, turns = (html_box("", name) for name in names)
    inputs = [scope, source, model, since, until, conversation]
    outputs = [model, warning, exports, summary, plots, figures, turns]
    chosen = [each.input for each in (scope, source, model)]
    written = [since.submit, since.blur, until.submit, until.blur]
    for event in (tab.select, *chosen, *written):
        event(refresh, inputs, outputs, **QUIET)


def fill(service: ChatService, selection: Selection) -> list[str]:
    """Exports, verdict, plots, figures and the table of these turns. Raises StoreError."""
    found = selection.of_anyone(service)
    rows = selection.asked(found)
    num_apart = len(found) - len(rows) if selection.source == PAGE else 0
    rounds = rounds_of(service, rows)
    plots = make_plots(rows, rounds, service.status().description)
    summary, saved_ms = stats.summarise(rows, rounds), stats.saved_ms(rows)
    verdict = stats.verdict(rows, rounds, selection.words, WHOSE.get(selection.source, ""))
    waits = stats.wait_lines(*stats.with_and_without(rows, rounds))
    loaded = service.status().description
    usable = [each.name for each in (loaded.drafters if loaded else ()) if each.is_available]
    judged = hindsight.lines(service.hindsight(rows), usable)
    judged = PANELS.hindsight(hindsight.TITLE, hindsight.COLUMNS, judged, hindsight.NOTE)
    all_figures = PANELS.figures(summary, saved_ms) + PANELS.waits(stats.WAIT_COLUMNS, waits)
    return [
        PANELS.exports(selection, bool(found) or selection.scope == "all", bool(rows)),
        PANELS.verdict(*verdict, summary, saved_ms, num_apart),
        PANELS.plots(plots, MAIN),
        PANELS.folded("All figures", all_figures) + judged if rows else "",
        PANELS.turns(stats.turn_table(rows), len(rows)),
    ]
