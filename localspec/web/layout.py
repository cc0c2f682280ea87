"""The page's components: conversations at one side, settings at the other, between them the live
strip and the tabs. Race and Stats lay themselves out.

Not here: what the components do (wiring), the figures of the strip (live).
"""

from __future__ import annotations

import html
from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.service import ChatService
from localspec.web.live import DASH
from localspec.web.talk import form
from localspec.web.talk.plain_markdown import LATEX_DELIMITERS

PLACEHOLDER = """<div class="ls-welcome"><h2>Ask something</h2>
<p>Everything stays on this machine. The strip above shows how fast it writes,
and how much speculation gains.</p></div>"""

BRAND = """<div class="ls-head"><p class="ls-brand">localspec</p>
<button type="button" id="ls-theme" class="ls-icon" aria-label="Theme: as the system"
 title="Theme: as the system"><span aria-hidden="true">◐</span></button>
<button type="button" id="ls-keys" class="ls-icon" aria-label="Keyboard shortcuts"
 title="Keyboard shortcuts (?)"><span aria-hidden="true">?</span></button></div>"""

SEARCH = """<div class="ls-search">
<input id="ls-search" type="search" placeholder="Search chats" aria-label="Search chats"
 autocomplete="off" spellcheck="false">
<button type="button" id="ls-import" class="ls-icon" aria-label="Import conversations"
 title="Import conversations"><span aria-hidden="true">⇪</span></button>
<input id="ls-import-file" type="file" accept=".jsonl,.json" hidden aria-label="File to import">
</div>"""

COMPOSE_HEAD = """<div id="ls-editing" hidden><span>Editing an earlier message. What was said stays
 as another version.</span><button type="button" id="ls-edit-cancel">Cancel</button></div>
<ul id="ls-chips" aria-label="Attached files"></ul>"""

COMPOSE_FOOT = """<div class="ls-foot">
<button type="button" id="ls-attach" class="ls-icon" aria-label="Attach text files"
 title="Attach text files, or drop them here"><span aria-hidden="true">+</span></button>
<input id="ls-attach-file" type="file" multiple hidden aria-label="Text files to attach">
<div id="ls-gauge" role="img" aria-label="Context: not known yet"><i aria-hidden="true"></i></div>
<span id="ls-gauge-text"></span></div>"""

# id, label, what it means
TILES = (
    (
        "speed",
        "Tokens / s",
        "Tokens written each second, reading the prompt not counted. A token is a short piece of "
        "a word.",
    ),
    (
        "speedup",
        "Speedup",
        "How many times as fast as the same reply without drafting, from sending to the last "
        "token; below it, of decoding alone. Against plain steps measured here under the same "
        "load. A dash where nothing was drafted, or where the load changed and no plain step was "
        "taken since.",
    ),
    (
        "acceptance",
        "Accepted",
        "Acceptance rate: of the tokens that were guessed, the share the model agreed with. "
        "Whether drafting pays is told by the speedup.",
    ),
    (
        "gamma",
        "Draft length γ",
        "Tokens guessed ahead in the latest round, and on average over this reply. It adapts to "
        "the temperature and the text.",
    ),
    (
        "drafter",
        "Drafter",
        "What guesses ahead: a small draft model, n-grams copied from this chat, a compressed "
        "copy of the model itself, or nothing (off).",
    ),
    (
        "memory",
        "Memory",
        "Memory held by the model, its drafters and the context they remember.",
    ),
)


def _tile(name: str, label: str, help_text: str) -> str:
    return (
        f'<div class="ls-tile" tabindex="0" aria-describedby="ls-help-{name}">'
        f'<span class="ls-label">{label}</span>'
        f'<span class="ls-value" id="ls-{name}">{DASH}</span>'
        f'<span class="ls-sub" id="ls-{name}-sub"></span>'
        f'<span class="ls-help" role="tooltip" id="ls-help-{name}">{html.escape(help_text)}</span>'
        "</div>"
    )


STRIP_HTML = f"""
<section id="ls-strip" aria-label="Live figures" data-phase="connecting">
  <div class="ls-tile ls-phase" tabindex="0" aria-describedby="ls-help-phase">
    <span class="ls-label"><i class="ls-dot" aria-hidden="true"></i>Now</span>
    <span class="ls-value" id="ls-phase" role="status">Connecting</span>
    <span class="ls-sub" id="ls-clock"></span>
    <span class="ls-help" role="tooltip" id="ls-help-phase">What localspec is doing at this moment,
      and for how long. A slow model and a stuck one look different here.</span>
  </div>
  {"".join(_tile(*tile) for tile in TILES)}
  <div class="ls-why">
    <p id="ls-reason" class="ls-reason">Speculation: {DASH}</p>
    <p id="ls-off" class="ls-off" hidden><b class="ls-off-chip">Off</b>
      <span id="ls-off-remedy"></span></p>
    <figure class="ls-spark" id="ls-spark" hidden>
      <svg viewBox="0 0 160 28" preserveAspectRatio="none" role="img"
        aria-label="Tokens per second over this reply"><polyline id="ls-spark-line"/></svg>
      <figcaption id="ls-spark-label"></figcaption>
    </figure>
  </div>
  <p id="ls-hardware" class="ls-hardware" hidden></p>
</section>
<div id="ls-notices" role="alert"></div>
"""

ROUNDS_HTML = """
<section id="ls-rounds" aria-label="Drafted tokens of the latest reply">
  <p class="ls-legend">The latest reply, one block for each check by the model:
    <span class="ls-round ls-r3">underlined twice: all but its last token was drafted</span>
    <span class="ls-round ls-r2">underlined: half or more drafted</span>
    <span class="ls-round ls-r1">dotted: some drafted</span>
    <span class="ls-round ls-r0">no line: written by the model itself</span>
  </p>
  <p id="ls-rounds-text"></p>
  <p class="ls-legend" id="ls-rounds-sum"></p>
</section>
"""

# The parts of the Models tab, in order; the server makes each (models.page), static/models.js
# places it.
MODELS_PARTS = (
    "found", "loaded", "downloads", "first", "near", "tune", "here", "folder", "others",
)  # fmt: skip
MODELS_HTML = (
    '<div id="ls-models" aria-busy="true">'
    + "".join(f'<section data-part="{part}"></section>' for part in MODELS_PARTS)
    + '<p id="ls-models-said" role="status" aria-live="polite"></p></div>'
)

# A command of our scripts becomes an event of the bridge of its kind; commands from before both
# bridges were ready wait in a queue.
BRIDGE_JS = """
const moving = new Set(['open', 'show', 'continue', 'delete', 'restore']);
const isMine = (command) => moving.has(command.do) === MOVES;
const pass = (command) => { if (isMine(command)) trigger('click', command); };
window.addEventListener('ls-command', (event) => pass(event.detail));
window.lsBridges = (window.lsBridges || 0) + 1;
for (const command of window.lsWaiting || []) pass(command);
"""
SIGNAL_JS = """
watch('value', () => {
  window.lsSignal = props.value;
  if (props.value) window.dispatchEvent(new CustomEvent('ls-signal', { detail: props.value }));
});
"""


QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}  # of every event


class Page(NamedTuple):
    """The components that handlers read or write. chat: the messages that stand; growing: the
    reply being written. conversation: the handle shown, None for a new chat. extras: what the
    page adds to a message as it is sent. bridge, mover: commands from our scripts, the mover's are
    those after which another conversation or reply is shown; signal: news to them."""

    chat: gr.Chatbot
    growing: gr.Chatbot
    message: gr.Textbox
    stop: gr.Button
    regenerate: gr.Button
    new_chat: gr.Button
    history: gr.HTML
    conversation: gr.Number
    extras: gr.Textbox
    bridge: gr.HTML
    mover: gr.HTML
    signal: gr.HTML
    form: form.FormPage
    preset: gr.Dropdown
    waiting_for_model: gr.Timer


def theme() -> gr.themes.Base:
    """System fonts, so that nothing is fetched; one calm hue."""
    font = gr.themes.utils.fonts.Font
    sans = [font("system-ui"), font("Segoe UI"), font("Helvetica Neue"), font("sans-serif")]
    mono = [font("ui-monospace"), font("Cascadia Mono"), font("Menlo"), font("monospace")]
    calm = gr.themes.Base(
        primary_hue=gr.themes.colors.teal,
        secondary_hue=gr.themes.colors.teal,
        neutral_hue=gr.themes.colors.slate,
        radius_size=gr.themes.sizes.radius_lg,
        font=sans,
        font_mono=mono,
    )
    subdued, subdued_dark = "#55637a", "#a8b5c8"  # Base's own are too pale to read
    return calm.set(
        body_text_color_subdued=subdued,
        body_text_color_subdued_dark=subdued_dark,
        block_info_text_color=subdued,
        block_info_text_color_dark=subdued_dark,
        input_placeholder_color=subdued,
        input_placeholder_color_dark=subdued_dark,
        # White on Base's own teal is too pale to read.
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_hover_dark="*primary_800",
        body_background_fill_dark="#0e141b",
        background_fill_primary_dark="#0e141b",
        background_fill_secondary_dark="#151d27",
        border_color_primary_dark="#2a3644",
        input_background_fill_dark="#1b2531",
        button_secondary_background_fill_dark="#243040",
        button_secondary_background_fill_hover_dark="#2e3c4e",
    )


def side() -> tuple[gr.Button, gr.HTML]:
    """The conversations, at the left."""
    with gr.Sidebar(width=264, elem_id="ls-side"):
        html_box(BRAND, "ls-brand-box")
        new_chat = gr.Button("New chat", variant="secondary", elem_id="ls-new")
        html_box(SEARCH, "ls-search-box")
        history = html_box("", "ls-history")
    return new_chat, history


def settings(service: ChatService) -> tuple[form.FormPage, gr.Dropdown]:
    """The settings, at the right; static/side.js closes them where there is no room."""
    with gr.Sidebar(width=292, position="right", elem_id="ls-settings"):
        html_box('<h2 class="ls-settings-title">Settings</h2>', "ls-settings-head")
        with gr.Row(elem_id="ls-preset-row"):
            preset = gr.Dropdown(
                choices=[], value=None, label="Preset", filterable=False, elem_id="ls-preset"
            )
            html_box(
                '<button type="button" id="ls-preset-save">Save as…</button>'
                '<button type="button" id="ls-preset-delete">Delete</button>',
                "ls-preset-buttons",
            )
        fields = form.lay_out(service)
    return fields, preset


def strip() -> None:
    html_box(
        '<h1 class="ls-sr">localspec</h1>', "ls-heading"
    )  # the brand goes when its side closes
    html_box(STRIP_HTML, "ls-strip-box")


def talk() -> tuple[gr.Chatbot, gr.Chatbot, gr.Textbox, gr.Button, gr.Button]:
    """The Chat tab: what stands, what is being written, the message box and its buttons."""
    with gr.Column(elem_id="ls-chat"):
        chat = _chatbot("ls-written", "Conversation", PLACEHOLDER)
        growing = _chatbot("ls-growing", "Reply being written", None)
    with gr.Column(elem_id="ls-compose"):
        html_box(COMPOSE_HEAD, "ls-compose-head")
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
            html_box(COMPOSE_FOOT, "ls-compose-foot")
            gr.Checkbox(
                label="Show drafted tokens", elem_id="ls-show-rounds", container=False, min_width=0
            )
            regenerate = gr.Button("Regenerate", size="sm", elem_id="ls-regenerate")
            stop = gr.Button("Stop", size="sm", interactive=False, elem_id="ls-stop")
        html_box(ROUNDS_HTML, "ls-rounds-box")
    return chat, growing, message, stop, regenerate


def models() -> gr.Tab:
    """The Models tab: an empty frame, filled by static/models.js."""
    with gr.Tab("Models", id="models") as opened:
        tab: gr.Tab = opened
        html_box(MODELS_HTML, "ls-models-box")
    return tab


def _chatbot(name: str, label: str, placeholder: str | None) -> gr.Chatbot:
    return gr.Chatbot(
        show_label=False,
        label=label,
        elem_id=name,
        height=None,
        layout="bubble",
        buttons=["copy"],
        feedback_options=None,
        allow_tags=False,
        allow_file_downloads=False,
        sanitize_html=True,
        latex_delimiters=LATEX_DELIMITERS,
        placeholder=placeholder,
        autoscroll=False,  # the column around both scrolls: static/chat.js
    )


def unseen() -> tuple[gr.Number, gr.Textbox, gr.HTML, gr.HTML, gr.HTML]:
    """What the page carries along without showing it."""
    conversation = gr.Number(
        value=None, precision=0, visible="hidden", label="Conversation", elem_id="ls-conversation"
    )
    extras = gr.Textbox(visible=False, label="Extras")
    bridge, mover = _bridge("ls-bridge", "false"), _bridge("ls-mover", "true")
    signal = gr.HTML("", html_template="", js_on_load=SIGNAL_JS, elem_id="ls-signal")
    return conversation, extras, bridge, mover, signal


def _bridge(name: str, moves: str) -> gr.HTML:
    return gr.HTML("", html_template="", js_on_load=BRIDGE_JS.replace("MOVES", moves), elem_id=name)


def html_box(value: str, name: str) -> gr.HTML:
    """Our own markup, without Gradio's frame and styles around it."""
    return gr.HTML(value, elem_id=name, padding=False, apply_default_css=False, js_on_load=None)
