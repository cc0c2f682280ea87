"""The page's components: conversations and settings at the side, Chat and Stats in the middle,
the live strip above both. What they do stands in wiring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import gradio as gr

from localspec.core import AUTO
from localspec.leniency import THRESHOLD
from localspec.web.colours import COLOURS
from localspec.web.handlers import LENIENT
from localspec.web.live import ROUNDS_HTML, STRIP_HTML
from localspec.web.stats import TURN_COLUMNS
from localspec.workloads import AS_SET, EXACT

PLACEHOLDER = """<div class="ls-welcome"><h2>Ask something</h2>
<p>Everything stays on this machine. The strip above shows how fast it writes,
and how much speculation gains.</p></div>"""


RULES = (
    ("the drafter is sure: the kind of text's threshold", THRESHOLD),
    ("the model finds it likely enough: typical acceptance", "typical"),
    ("twice as likely as exact checking takes it: factor 2", "factor:2"),
)


class Page(NamedTuple):
    """The components that handlers read or write."""

    chat: gr.Chatbot
    message: gr.Textbox
    stop: gr.Button
    regenerate: gr.Button
    new_chat: gr.Button
    conversations: gr.Radio
    form: Sequence[gr.components.Component]
    drafter: gr.Dropdown
    drafter_note: gr.Markdown
    waiting_for_model: gr.Timer


class Choices(NamedTuple):
    """What may be chosen, as label and name. set_lenient: kinds of text that are lenient by a
    profile of the person's own."""

    drafters: Sequence[tuple[str, str]]
    first_drafter: str
    workloads: Sequence[tuple[str, str]]
    set_lenient: Sequence[str]


class StatsPage(NamedTuple):
    """The components of the Stats tab."""

    tab: gr.Tab
    scope: gr.Radio
    summary: gr.HTML
    exports: gr.HTML
    speed_by_turn: gr.ScatterPlot
    acceptance_by_turn: gr.ScatterPlot
    speed_by_temperature: gr.BarPlot
    acceptance_by_temperature: gr.BarPlot
    turns: gr.Dataframe


def theme() -> gr.themes.Base:
    """System fonts, so that nothing is fetched; one calm hue."""
    font = gr.themes.utils.fonts.Font
    sans = [font("system-ui"), font("Segoe UI"), font("Helvetica Neue"), font("sans-serif")]
    mono = [font("ui-monospace"), font("Cascadia Mono"), font("Menlo"), font("monospace")]
    return gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        secondary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=sans,
        font_mono=mono,
    )


def lay_out(choices: Choices) -> tuple[Page, StatsPage]:
    """All components, in the Blocks that is open."""
    with gr.Sidebar(width=280, elem_id="ls-side"):
        gr.HTML('<h1 class="ls-brand">localspec</h1>')
        new_chat = gr.Button("New chat", variant="secondary", elem_id="ls-new")
        conversations = gr.Radio(
            choices=[], label="Conversations", elem_id="ls-conversations", interactive=True
        )
        form, drafter, drafter_note = _settings(choices)
    gr.HTML(STRIP_HTML, elem_id="ls-strip-box", padding=False, apply_default_css=False)
    with gr.Tabs(elem_id="ls-tabs"):
        with gr.Tab("Chat", id="chat"):
            chat, message, stop, regenerate = _chat()
        with gr.Tab("Stats", id="stats") as stats_tab:
            stats_page = _stats(stats_tab)
    timer = gr.Timer(0.7, active=True)
    page = Page(
        chat,
        message,
        stop,
        regenerate,
        new_chat,
        conversations,
        form,
        drafter,
        drafter_note,
        timer,
    )
    return page, stats_page


def _chat() -> tuple[gr.Chatbot, gr.Textbox, gr.Button, gr.Button]:
    chat = gr.Chatbot(
        show_label=False,
        label="Conversation",
        elem_id="ls-chat",
        height="100%",
        min_height=220,
        layout="bubble",
        buttons=["copy"],
        feedback_options=None,
        allow_tags=False,
        allow_file_downloads=False,
        sanitize_html=True,
        placeholder=PLACEHOLDER,
        scale=1,
    )
    message = gr.Textbox(
        show_label=False,
        label="Message",
        placeholder="Write a message",
        lines=1,
        max_lines=10,
        autofocus=True,
        submit_btn="Send",
        elem_id="ls-message",
    )
    with gr.Row(elem_id="ls-actions"):
        stop = gr.Button("Stop", size="sm", interactive=False, elem_id="ls-stop")
        regenerate = gr.Button("Regenerate", size="sm", elem_id="ls-regenerate")
        gr.Checkbox(
            label="Show drafted tokens", elem_id="ls-show-rounds", container=False, min_width=200
        )
    gr.HTML(ROUNDS_HTML, elem_id="ls-rounds-box", padding=False, apply_default_css=False)
    return chat, message, stop, regenerate


def _settings(
    choices: Choices,
) -> tuple[Sequence[gr.components.Component], gr.Dropdown, gr.Markdown]:
    with gr.Accordion("Settings", open=True, elem_id="ls-settings"):
        temperature = gr.Slider(
            0,
            2,
            value=0.7,
            step=0.05,
            label="Temperature",
            info="0 always takes the likeliest word; higher is freer. γ adapts to it.",
        )
        top_p = gr.Slider(
            0.05, 1, value=1.0, step=0.05, label="Top-p", info="1 leaves every word possible."
        )
        max_tokens = gr.Number(value=512, minimum=1, maximum=32768, precision=0, label="Max tokens")
        drafter = gr.Dropdown(
            choices=choices.drafters,
            value=choices.first_drafter,
            label="Drafter",
            filterable=False,
            elem_id="ls-drafter-choice",
        )
        drafter_note = gr.Markdown("", elem_id="ls-drafter-note")
        workload, checking = _checking(choices)
        system_prompt = gr.Textbox(label="System prompt", lines=2, max_lines=8)
        with gr.Accordion("Advanced", open=False):
            seed = gr.Number(
                value=None,
                precision=0,
                label="Seed",
                info="Repeats a sampled reply, for a fixed drafter and γ only.",
            )
            fixed_gamma = gr.Number(
                value=None,
                minimum=0,
                maximum=64,
                precision=0,
                label="Fixed γ",
                info="Empty: chosen anew each round.",
            )
            top_k = gr.Number(value=0, minimum=0, precision=0, label="Top-k", info="0: not used.")
            min_p = gr.Slider(0, 1, value=0, step=0.01, label="Min-p", info="0: not used.")
            penalty = gr.Slider(
                1, 2, value=1, step=0.05, label="Repetition penalty", info="1: not used."
            )
            rule = gr.Dropdown(
                choices=list(RULES),
                value=THRESHOLD,
                label="Lenient rule",
                filterable=False,
                info="Used only where checking is lenient.",
                elem_id="ls-lenient-rule",
            )
    # The order is that of handlers.Form.
    form = [
        temperature,
        top_p,
        max_tokens,
        seed,
        system_prompt,
        drafter,
        top_k,
        min_p,
        penalty,
        fixed_gamma,
        workload,
        checking,
        rule,
    ]
    return form, drafter, drafter_note


def _checking(choices: Choices) -> tuple[gr.Dropdown, gr.Radio]:
    """The kind of text, and whether lenient checking is wanted."""
    workload = gr.Dropdown(
        choices=choices.workloads,
        value=AUTO,
        label="Kind of text",
        filterable=False,
        info="Sets the first draft length, and the threshold where checking is lenient (chat has "
        "none and stays exact).",
        elem_id="ls-workload",
    )
    own = f" You set it to lenient for: {', '.join(choices.set_lenient)}."
    checking = gr.Radio(
        choices=[("as set", AS_SET), ("exact", EXACT), ("lenient", LENIENT)],
        value=AS_SET,
        label="Checking",
        info="Lenient gives up that the text is what the model alone would write: guesses it "
        "would have refused may stay, and the reply says how many. As set is exact, unless a "
        f"profile of yours says otherwise.{own if choices.set_lenient else ''}",
        elem_id="ls-checking",
    )
    return workload, checking


def _stats(tab: gr.Tab) -> StatsPage:
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
        exports = gr.HTML(elem_id="ls-exports", padding=False, apply_default_css=False)
    summary = gr.HTML(elem_id="ls-summary", padding=False, apply_default_css=False)
    with gr.Row():
        speed = gr.ScatterPlot(
            x="turn",
            y="tokens_per_second",
            color="drafter",
            title="Tokens per second by turn",
            x_title="turn",
            y_title="tok/s",
            x_axis_format="d",
            y_axis_format=".0f",
            color_map=COLOURS,
            height=240,
            min_width=300,
        )
        acceptance = gr.ScatterPlot(
            x="turn",
            y="acceptance_rate",
            color="drafter",
            title="Acceptance by turn",
            x_title="turn",
            y_title="%",
            y_lim=[0, 100],
            x_axis_format="d",
            y_axis_format=".0f",
            color_map=COLOURS,
            height=240,
            min_width=300,
        )
    with gr.Row():
        by_temperature_speed = gr.BarPlot(
            x="temperature",
            y="tokens_per_second",
            color="drafter",
            title="Tokens per second by temperature",
            x_title="temperature",
            y_title="tok/s",
            y_axis_format=".0f",
            color_map=COLOURS,
            height=240,
            min_width=300,
        )
        by_temperature_acceptance = gr.BarPlot(
            x="temperature",
            y="acceptance_rate",
            color="drafter",
            title="Acceptance by temperature",
            x_title="temperature",
            y_title="%",
            y_lim=[0, 100],
            y_axis_format=".0f",
            color_map=COLOURS,
            height=240,
            min_width=300,
        )
    turns = gr.Dataframe(
        headers=list(TURN_COLUMNS),
        interactive=False,
        wrap=False,
        label="Turns",
        elem_id="ls-turns",
        max_height=420,
    )
    return StatsPage(
        tab,
        scope,
        summary,
        exports,
        speed,
        acceptance,
        by_temperature_speed,
        by_temperature_acceptance,
        turns,
    )
