"""The settings: the fields at the side, what they mean as settings of a reply, and presets.

Contract: `lay_out` returns the fields in the order of `Form`. A field may be empty while it is
being typed, which means its default. A preset sets some of the fields.

Not here: who listens to the fields (wiring), where presets are kept (chat/journal).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import gradio as gr

from localspec.backend import LARGEST_FIXED_LENGTH
from localspec.chat.service import ChatService, Preset, ReplySettings
from localspec.core import AUTO, OFF, TOO_LARGE_A_SEED, SamplingParams
from localspec.drafters.registry import label_of
from localspec.errors import RequestError
from localspec.leniency import THRESHOLD
from localspec.web.live import capital, labelled
from localspec.workloads import AS_SET, EXACT

LENIENT = "lenient"  # of the checking field: by the rule of its own field
RULES = (
    ("the drafter is sure: the kind of text's threshold", THRESHOLD),
    ("the model finds it likely enough: typical acceptance", "typical"),
    ("accepted up to twice as often as by exact checking: factor 2", "factor:2"),
)


@dataclass(frozen=True)
class Form:
    """The settings as the page's fields hold them; numbers may be missing while being typed. seed
    and fixed_gamma are text: a number field of Gradio's turns "nothing" into 0."""

    temperature: float | None
    top_p: float | None
    max_tokens: float | None
    seed: str | None
    system_prompt: str | None
    drafter: str | None
    top_k: float | None
    min_p: float | None
    repetition_penalty: float | None
    fixed_gamma: str | None
    workload: str | None = None
    checking: str | None = None
    lenient_rule: str | None = None

    def settings(self) -> ReplySettings:
        """Raises RequestError for a value out of range."""
        return ReplySettings(
            sampling=SamplingParams(
                temperature=_or(self.temperature, 0.0),
                top_k=_counted("Top-k", self.top_k, 0, 0),
                top_p=_or(self.top_p, 1.0),
                min_p=_or(self.min_p, 0.0),
                repetition_penalty=_or(self.repetition_penalty, 1.0),
                seed=_whole("The seed", self.seed, 1 - TOO_LARGE_A_SEED, TOO_LARGE_A_SEED - 1),
            ),
            max_tokens=_counted("Max tokens", self.max_tokens, 512, 1),
            drafter=self.drafter or AUTO,
            num_draft_tokens=_whole("The fixed γ", self.fixed_gamma, 0, LARGEST_FIXED_LENGTH),
            system_prompt=self.system_prompt or "",
            workload=self.workload or AUTO,
            checking=self._checking(),
        )

    def _checking(self) -> str:
        if self.checking == LENIENT:
            return self.lenient_rule or THRESHOLD
        return self.checking or AS_SET


def preset_of(name: str, form: Form) -> Preset:
    """The form as a preset. Raises RequestError for a value out of range."""
    settings = form.settings()
    sampling = settings.sampling
    return Preset(
        name=name,
        system_prompt=settings.system_prompt,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=settings.max_tokens,
    )


def with_preset(form: Form, preset: Preset) -> Form:
    """The form with the preset's values, the other fields as they are."""
    values = asdict(preset)
    del values["name"]
    return replace(form, **values)


def _whole(name: str, written: str | None, low: int, high: int) -> int | None:
    """A whole number out of a field that may be empty, by the name it has on the page. Raises
    RequestError."""
    text = (written or "").strip()
    if not text:
        return None
    try:
        found = int(text)
    except ValueError:
        raise RequestError(
            f"{name} is {text[:20]!r}, but takes a whole number. Write one, or leave it empty."
        ) from None
    if not low <= found <= high:
        raise RequestError(
            f"{name} is {text[:24]}, but must lie between {low} and {high}. Write a number in "
            "this range, or leave it empty."
        )
    return found


def _counted(name: str, value: float | None, default: int, least: int) -> int:
    """A count out of a number field; empty means its default. Raises RequestError for what would
    not be used as it is shown."""
    wanted = _or(value, default)
    if wanted != int(wanted):
        raise RequestError(f"{name} is {wanted:g}, but takes a whole number. Write {int(wanted)}.")
    if wanted < least:
        raise RequestError(f"{name} is {wanted:g}, but needs at least {least}.")
    return int(wanted)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class FormPage(NamedTuple):
    """The components of the settings. fields: in the order of Form."""

    fields: Sequence[gr.components.Component]
    drafter: gr.Dropdown
    drafter_note: gr.Markdown
    system_prompt: gr.Textbox


def workload_choices(service: ChatService) -> tuple[list[tuple[str, str]], list[str]]:
    """The kinds of text that can be chosen, and the titles of those the person set to lenient."""
    kinds = service.workloads.values()
    choices = [("auto: by the message", AUTO), *((kind.title, kind.name) for kind in kinds)]
    return choices, [kind.title for kind in kinds if kind.lenient]


def drafter_choices(service: ChatService) -> tuple[list[tuple[str, str]], str]:
    """The drafters that can be chosen, and a line about each: why it can be used or cannot."""
    choices = [("auto: whatever is fastest", AUTO), ("off: without drafting", OFF)]
    loaded = service.status().description
    if loaded is None:
        if service.drafter not in (AUTO, OFF):  # asked for at the start, not known yet
            choices.append((label_of(service.drafter), service.drafter))
        return choices, "The drafters are known once the model is loaded."
    notes = []
    for drafter in loaded.drafters:
        label = label_of(drafter.name)
        if drafter.is_available:
            choices.append((label, drafter.name))
        mark = "" if drafter.is_available else " (not available)"
        notes.append(f"**{capital(label)}**{mark}: {html.escape(labelled(drafter.reason))}")
    return choices, "\n\n".join(notes)


def lay_out(service: ChatService) -> FormPage:
    """The fields, in the column that is open."""
    system_prompt = gr.Textbox(
        label="System prompt",
        info="Stands before everything that is said in this chat.",
        lines=2,
        max_lines=8,
        elem_id="ls-system",
    )
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
    # No limits here: Gradio would refuse each event of the page in words of its own.
    max_tokens = gr.Number(value=512, label="Max tokens")
    drafter = gr.Dropdown(
        choices=drafter_choices(service)[0],
        value=service.drafter,
        label="Drafter",
        filterable=False,
        elem_id="ls-drafter-choice",
    )
    drafter_note = gr.Markdown("", elem_id="ls-drafter-note")
    made: dict[str, gr.components.Component] = {
        "system_prompt": system_prompt,
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "drafter": drafter,
        **_checking(*workload_choices(service)),
    }
    with gr.Accordion("Advanced", open=False):
        made |= _advanced()
    in_order = [made[field.name] for field in fields(Form)]
    return FormPage(in_order, drafter, drafter_note, system_prompt)


def _checking(
    workloads: list[tuple[str, str]], set_lenient: list[str]
) -> dict[str, gr.components.Component]:
    """The kind of text, and whether lenient checking is wanted."""
    workload = gr.Dropdown(
        choices=workloads,
        value=AUTO,
        label="Kind of text",
        filterable=False,
        info="Sets the first draft length, and the threshold where checking is lenient (chat has "
        "none and stays exact).",
        elem_id="ls-workload",
    )
    own = f" You set it to lenient for: {', '.join(set_lenient)}."
    checking = gr.Radio(
        choices=[("as set", AS_SET), ("exact", EXACT), ("lenient", LENIENT)],
        value=AS_SET,
        label="Checking",
        info="Lenient gives up that the text is what the model alone would write: guesses it "
        "would have refused may stay, and the reply says how many. As set is exact, unless a "
        f"profile of yours says otherwise.{own if set_lenient else ''}",
        elem_id="ls-checking",
    )
    return {"workload": workload, "checking": checking}


def _advanced() -> dict[str, gr.components.Component]:
    seed = gr.Textbox(
        label="Seed",
        info="Repeats a sampled reply, for a fixed drafter and γ only. Empty: another each time.",
        placeholder="none",
    )
    gamma = gr.Textbox(
        label="Fixed γ",
        info="Tokens drafted in every round; 0 drafts none. Empty: chosen anew each round.",
        placeholder="chosen",
    )
    top_k = gr.Number(value=0, label="Top-k", info="0: not used.")
    min_p = gr.Slider(0, 1, value=0, step=0.01, label="Min-p", info="0: not used.")
    penalty = gr.Slider(1, 2, value=1, step=0.05, label="Repetition penalty", info="1: not used.")
    rule = gr.Dropdown(
        choices=list(RULES),
        value=THRESHOLD,
        label="Lenient rule",
        filterable=False,
        info="Used only where checking is lenient.",
        elem_id="ls-lenient-rule",
    )
    return {
        "seed": seed,
        "fixed_gamma": gamma,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": penalty,
        "lenient_rule": rule,
    }
