"""The page's components: conversations at one side, settings at the other, between them the tabs.
Over the chat stands one line for the model and its speed; its popover has the rest. Race and Stats
lay themselves out.

Not here: what the components do (wiring), the figures of the line (live).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.service import ChatService
from localspec.units import DASH
from localspec.web.talk import form
from localspec.web.talk.plain_markdown import LATEX_DELIMITERS

# What drafting is good at, with the model that comes along too: title, what it says of itself,
# message.
EXAMPLES = (
    (
        "Fill in a form",
        "Its brackets and names are easy to guess",
        "Make a JSON object with name Clara, age 34, city Lisbon and job baker.",
    ),
    (
        "Write some code",
        "Code repeats its own names",
        "Write a Python function called `count_vowels` that counts the vowels in a text, and show "
        "one call of it.",
    ),
    (
        "List the steps",
        "Every line begins like the one before",
        "How do I make tea? Answer in numbered steps.",
    ),
    (
        "Explain the speed",
        "How speculative decoding works",
        "How does speculative decoding work? Explain it in a few sentences.",
    ),
)


def _example(title: str, why: str, message: str) -> str:
    return (
        f'<button type="button" class="ls-example" data-message="{html.escape(message)}">'
        f"<b>{title}</b><span>{why}</span></button>"
    )


WELCOME = f"""<div class="ls-welcome"><h2>What should it write?</h2>
<p>Your chats are kept on this machine. Guessing ahead is at its best here:</p>
<div class="ls-examples">{"".join(_example(*one) for one in EXAMPLES)}</div>
<p id="ls-demo" hidden>The model that comes along is tiny: it shows the speed, not good sense.
<button type="button" class="ls-to-models">Get a real model</button></p></div>"""

BRAND = """<div class="ls-head"><p class="ls-brand">localspec</p>
<button type="button" id="ls-theme" class="ls-icon" aria-label="Theme: as the system"
 title="Theme: as the system"><span aria-hidden="true">◐</span></button>
<button type="button" id="ls-keys" class="ls-icon" aria-label="Keyboard shortcuts"
 title="Keyboard shortcuts (?)"><span aria-hidden="true">?</span></button></div>"""


def _icon(name: str, label: str, path: str, more: str = "") -> str:
    """A button with a drawn sign. path: within 16 x 16. more: what the tooltip says beyond it."""
    return (
        f'<button type="button" id="{name}" class="ls-icon" aria-label="{label}" '
        f'title="{label}{more}"><svg aria-hidden="true" width="16" height="16" viewBox="0 0 16 16" '
        f'fill="none" stroke="currentColor" stroke-width="1.4" stroke-linecap="round" '
        f'stroke-linejoin="round"><path d="{path}"/></svg></button>'
    )


SEARCH = f"""<div class="ls-search">
<input id="ls-search" type="search" placeholder="Search chats" aria-label="Search chats"
 autocomplete="off" spellcheck="false">
{_icon("ls-new-folder", "New folder", "M1.8 12.6V3.4h4.4l1.6 1.8h6.4v7.4z")}
{_icon("ls-import", "Import conversations", "M8 10V2.6M5 5.4l3-3 3 3M2.6 9.6v3.8h10.8V9.6")}
<input id="ls-import-file" type="file" accept=".jsonl,.json" hidden aria-label="File to import">
</div>"""

COMPOSE_HEAD = """<ul id="ls-chips" aria-label="Attached files"></ul>"""

COMPOSE_FOOT = f"""<div class="ls-foot">
{_icon("ls-attach", "Attach text, PDF or DOCX", "M8 3v10M3 8h10", ", or drop them here")}
<input id="ls-attach-file" type="file" multiple hidden aria-label="Files to attach">
<div id="ls-gauge" role="img" aria-label="Context: not known yet" hidden></div>
<span id="ls-gauge-text"></span></div>"""

GRIP = "M6 4v0M10 4v0M6 8v0M10 8v0M6 12v0M10 12v0"  # six dots

STRIP_HTML = f"""
<section id="ls-strip" aria-label="Model and speed" data-phase="connecting">
  <p class="ls-now"><i class="ls-dot" aria-hidden="true"></i><span id="ls-phase">Connecting</span>
    <span title="Of writing; reading the prompt is not counted"><b id="ls-speed">{DASH}</b>
    tok/s</span></p>
  <button type="button" id="ls-model" aria-haspopup="menu" aria-expanded="false">
    <b id="ls-model-name">{DASH}</b> <small id="ls-model-detail"></small>
    <span class="ls-caret" aria-hidden="true"></span></button>
  <div class="ls-won"><p><span id="ls-gain"></span><span id="ls-guesses"></span></p>
    <button type="button" id="ls-why-open" class="ls-icon" aria-expanded="false"
      aria-controls="ls-why" aria-label="How fast, and why" title="How fast, and why">
      <span aria-hidden="true">i</span></button></div>
</section>
<section id="ls-why" role="dialog" aria-labelledby="ls-why-title" hidden>
  <div class="ls-why-head"><h2 id="ls-why-title">How fast, and why</h2>
    {_icon("ls-why-move", "Move: drag it, or arrow keys", GRIP)}
    <button type="button" id="ls-why-close" class="ls-icon" aria-label="Close"
      title="Close (Esc)"><span aria-hidden="true">×</span></button></div>
  <p id="ls-reason"></p>
  <p id="ls-remedy" hidden></p>
  <dl id="ls-facts"></dl>
  <figure id="ls-spark" hidden>
    <svg viewBox="0 0 320 44" preserveAspectRatio="none" role="img"
      aria-label="Tokens per second over this reply"><polyline id="ls-spark-line"/></svg>
    <figcaption id="ls-spark-label"></figcaption>
  </figure>
  <details id="ls-rounds"><summary>Drafted tokens of the latest reply</summary>
    <p id="ls-rounds-text" tabindex="0" role="group" aria-label="The reply, check by check"></p>
    <p class="ls-legend">One block for each check by the model.
      <span class="ls-round ls-r3">Underlined twice: all but its last token was guessed.</span>
      <span class="ls-round ls-r2">Underlined: half or more.</span>
      <span class="ls-round ls-r1">Dotted: some.</span>
      <span id="ls-rounds-sum"></span></p>
  </details>
  <p id="ls-hardware" hidden></p>
</section>
"""
NOTICES_HTML = '<div id="ls-notices" role="alert"></div>'

# The parts of the Models tab, in order; the server makes each, static/models.js places it.
MODELS_PARTS = (
    "found", "loaded", "first", "here", "search", "results", "downloads", "others", "elsewhere",
    "tune", "folder", "server", "programs",
)  # fmt: skip
MODELS_HTML = (
    '<div id="ls-models" aria-busy="true">'
    + "".join(f'<section data-part="{part}"></section>' for part in MODELS_PARTS)
    + '<p id="ls-models-said" role="status" aria-live="polite"></p></div>'
)

# A command of our scripts becomes an event of the bridge of its kind; commands from before both
# bridges were ready wait in a queue.
BRIDGE_JS = """
const moving = new Set(['open', 'show', 'continue', 'again', 'several', 'takeback', 'rewrite',
  'fork', 'remove', 'bring_back', 'duplicate', 'delete', 'restore', 'earlier']);
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

# A list may arrive after one that was read later (handlers.history): that one stays.
HISTORY_JS = """
let [newest, shown] = [0, ''];
watch('value', () => {
  const number = Number(/^<div data-number="(\\d+)"/.exec(props.value)?.[1]);
  if (number < newest) props.value = shown;
  else if (number) [newest, shown] = [number, props.value];
});
"""

# Gradio's own list loses the focus when a key chooses. What is chosen and not listed any more
# becomes the first.
CHOICE_HTML = '<label class="ls-choice"><span>LABEL</span><select></select></label>'
CHOICE_JS = """
const list = element.querySelector('select');
const draw = () => {
  list.replaceChildren(...props.choices.map(([said, value]) => new Option(said, value)));
  list.value = props.value;
  if (list.selectedIndex < 0) props.value = list.options[0].value;
};
watch(['choices', 'value'], draw);
list.addEventListener('change', () => { props.value = list.value; trigger('input'); });
draw();
"""


QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}  # of every event


class Page(NamedTuple):
    """The components that handlers read or write, in the order in which the functions below make
    them. chat: the messages that stand; growing: the reply being written. conversation: the handle
    shown, None for a new chat. extras: what the page adds to a message as it is sent. reading: the
    number of the reader of its reply. settings: the fields at the side. bridge, mover: commands
    from our scripts, the mover's are those after which another conversation or reply is shown;
    signal: news to them."""

    new_chat: gr.Button
    history: gr.HTML
    settings: gr.HTML
    conversation: gr.Number
    extras: gr.Textbox
    reading: gr.Number
    bridge: gr.HTML
    mover: gr.HTML
    signal: gr.HTML
    chat: gr.Chatbot
    growing: gr.Chatbot
    message: gr.Textbox
    stop: gr.Button


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
        checkbox_border_color_dark="#64748b",  # Base's own is hardly seen
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
        history = gr.HTML(
            "", elem_id="ls-history", padding=False, apply_default_css=False, js_on_load=HISTORY_JS
        )
    return new_chat, history


def settings(service: ChatService) -> gr.HTML:
    """The settings, at the right; closed, unless the person left them open (static/side.js)."""
    with gr.Sidebar(width=312, position="right", open=False, elem_id="ls-settings"):
        html_box('<h2 class="ls-settings-title">Settings</h2>', "ls-settings-head")
        return form.lay_out(service)


def frame() -> None:
    """What belongs to no tab: the page's heading, for the brand goes when its side closes, and
    what has to be said whatever is shown."""
    html_box('<h1 class="ls-sr">localspec</h1>', "ls-heading")
    html_box(NOTICES_HTML, "ls-notices-box")


def talk() -> tuple[gr.Chatbot, gr.Chatbot, gr.Textbox, gr.Button]:
    """The Chat tab: what stands, what is being written, the message box and its button."""
    html_box(STRIP_HTML, "ls-strip-box")
    with gr.Column(elem_id="ls-chat"):
        html_box(WELCOME, "ls-welcome-box")
        chat = _chatbot("ls-written", "Conversation")
        growing = _chatbot("ls-growing", "Reply being written")
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
            stop = gr.Button("Stop", size="sm", interactive=False, elem_id="ls-stop")
    return chat, growing, message, stop


def models() -> gr.Tab:
    """The Models tab: an empty frame, filled by static/models.js."""
    with gr.Tab("Models", id="models") as opened:
        tab: gr.Tab = opened
        html_box(MODELS_HTML, "ls-models-box")
    return tab


def _chatbot(name: str, label: str) -> gr.Chatbot:
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
        autoscroll=False,  # the column around both scrolls: static/chat.js
    )


def unseen() -> tuple[gr.Number, gr.Textbox, gr.Number, gr.HTML, gr.HTML, gr.HTML]:
    """What the page carries along without showing it."""
    conversation, reading = (
        gr.Number(None, precision=0, visible="hidden", label=label, elem_id=f"ls-{label.lower()}")
        for label in ("Conversation", "Reading")
    )
    extras = gr.Textbox(visible=False, label="Extras")
    bridge, mover = _bridge("ls-bridge", "false"), _bridge("ls-mover", "true")
    signal = gr.HTML("", html_template="", js_on_load=SIGNAL_JS, elem_id="ls-signal")
    return conversation, extras, reading, bridge, mover, signal


def _bridge(name: str, moves: str) -> gr.HTML:
    return gr.HTML("", html_template="", js_on_load=BRIDGE_JS.replace("MOVES", moves), elem_id=name)


def html_box(value: str, name: str) -> gr.HTML:
    """Our own markup, without Gradio's frame and styles around it."""
    return gr.HTML(value, elem_id=name, padding=False, apply_default_css=False, js_on_load=None)


def choice(label: str, choices: Sequence[tuple[str, str]], name: str) -> gr.HTML:
    """The browser's own list of names and values, the first chosen."""
    return gr.HTML(
        choices[0][1],
        html_template=CHOICE_HTML.replace("LABEL", label),
        js_on_load=CHOICE_JS,
        apply_default_css=False,
        min_width=150,
        elem_id=name,
        choices=choices,
    )
