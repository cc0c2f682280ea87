"""The page's components: conversations at one side, settings at the other, between them the tabs.
Over the chat stands one line for the model and its speed; its popover has the rest. Race and Stats
lay themselves out.

Not here: the HTML between them (templates/frame.html), what they do (wiring), the figures of the
line (live).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.service import ChatService
from localspec.web.markup import macros
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


FRAME = macros("frame.html")

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


# Of every event. Gradio copies all that a component holds which shows progress, even hidden one, at
# each step of any event: so none does.
QUIET: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "show_progress_on": [],
}


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
        html_box(FRAME.brand(), "ls-brand-box")
        new_chat = gr.Button("New chat", variant="secondary", elem_id="ls-new")
        html_box(FRAME.search(), "ls-search-box")
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
    html_box('<div id="ls-notices" role="alert"></div>', "ls-notices-box")


def talk() -> tuple[gr.Chatbot, gr.Chatbot, gr.Textbox, gr.Button]:
    """The Chat tab: what stands, what is being written, the message box and its button."""
    html_box(FRAME.strip(), "ls-strip-box")
    with gr.Column(elem_id="ls-chat"):
        html_box(FRAME.welcome(EXAMPLES), "ls-welcome-box")
        chat = _chatbot("ls-written", "Conversation")
        growing = _chatbot("ls-growing", "Reply being written")
    with gr.Column(elem_id="ls-compose"):
        html_box('<ul id="ls-chips" aria-label="Attached files"></ul>', "ls-compose-head")
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
            html_box(FRAME.compose_foot(), "ls-compose-foot")
            stop = gr.Button("Stop", size="sm", interactive=False, elem_id="ls-stop")
    return chat, growing, message, stop


def models() -> gr.Tab:
    """The Models tab: an empty frame, filled by static/models.js."""
    with gr.Tab("Models", id="models") as opened:
        tab: gr.Tab = opened
        html_box(FRAME.models(), "ls-models-box")
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
