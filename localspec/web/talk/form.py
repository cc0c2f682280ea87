"""The settings: the fields at the side, and what they mean as settings of a reply.

Contract: every field is a text, as it was typed or chosen; an empty one means its default. The
fields are one component, whose value is JSON by the names of `Form`; static/settings.js reads and
writes them. `panel` is what the fields have to know besides: the ways of drafting, the prompts and
the defaults.

Not here: the fields as HTML (templates/form.html), where settings are kept (chat/log_service), who
listens to the fields (wiring).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from markupsafe import Markup, escape

from localspec.chat.service import ChatService, ReplySettings
from localspec.core.backend import LARGEST_FIXED_LENGTH
from localspec.core.decoding import AUTO, LARGEST_INTEGER, RANGES, SamplingParams
from localspec.core.errors import RequestError
from localspec.core.files import parsed
from localspec.core.leniency import THRESHOLD
from localspec.core.units import capital, gib
from localspec.core.workloads import AS_SET, EXACT
from localspec.drafters.registry import REGISTRY
from localspec.web.markup import macros

if TYPE_CHECKING:
    import gradio as gr

THINKING_BUDGET = 2048
THINKS = {"on": True, "off": False}  # else as the model does by itself
LENIENT = "lenient"  # of the checking field: by the rule of its own field
RULES = (
    (THRESHOLD, "guesses that are sure enough"),
    ("typical", "guesses that are likely enough"),
    ("factor:2", "guesses up to twice as often"),
)
# Fields of SamplingParams, each with the name that it has on the page.
DRAWN = {
    "temperature": "The temperature", "top_k": "Top-k", "top_p": "Top-p", "min_p": "Min-p",
    "repetition_penalty": "The repetition penalty",
}  # fmt: skip
SEEDS = (-LARGEST_INTEGER, LARGEST_INTEGER)
MOST_STOPS, LONGEST_STOP = 16, 200  # looked for in every token's text
N = TypeVar("N", int, float)
TEMPLATE_SIGNS = str.maketrans({sign: f"&#{ord(sign)};" for sign in "$`{}\\"})


@dataclass(frozen=True)
class Form:
    """The settings as the fields hold them."""

    system_prompt: str = ""
    temperature: str = "0.7"
    max_tokens: str = "512"
    drafter: str = AUTO
    top_p: str = "1"
    top_k: str = "0"
    min_p: str = "0"
    repetition_penalty: str = "1"
    seed: str = ""
    fixed_gamma: str = ""
    workload: str = AUTO
    checking: str = AS_SET
    lenient_rule: str = THRESHOLD
    stop: str = ""
    thinking: str = AUTO
    thinking_budget: str = str(THINKING_BUDGET)

    @classmethod
    def of(cls, kept: Mapping[str, str]) -> Form:
        """With the defaults where nothing is kept; a field of another version is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in known})

    @classmethod
    def read(cls, written: str | None) -> Form:
        """The form as the page sends it. Raises RequestError."""
        try:
            found = parsed(written or "{}")
            if isinstance(found, dict) and all(isinstance(one, str) for one in found.values()):
                return cls.of(found)
        except ValueError:
            pass
        raise RequestError("The settings did not arrive whole. Reload the page.")

    @property
    def data(self) -> dict[str, str]:
        return asdict(self)

    def settings(self) -> ReplySettings:
        """Raises RequestError for a value out of range."""
        drawn = dict[str, Any](seed=_number(int, "The seed", self.seed, *SEEDS))
        for name, said in DRAWN.items():
            kind = type(getattr(SamplingParams, name))
            found = _number(kind, said, getattr(self, name), *RANGES[name])
            if found is not None:
                drawn[name] = found
        return ReplySettings(
            sampling=SamplingParams(**drawn),
            max_tokens=_number(int, "Max tokens", self.max_tokens, 1, 10_000_000) or 512,
            drafter=self.drafter or AUTO,
            num_draft_tokens=_number(
                int, "The draft length", self.fixed_gamma, 0, LARGEST_FIXED_LENGTH
            ),
            system_prompt=self.system_prompt,
            workload=self.workload or AUTO,
            checking=self._checking(),
            stop=_stops(self.stop),
            thinks=THINKS.get(self.thinking),
            thinking_budget=_number(int, "Thinking tokens", self.thinking_budget, 0, 10_000_000),
        )

    @property
    def faults(self) -> dict[str, str]:
        """Return why each field that cannot be used cannot, by its name."""
        found = {}
        for name, value in self.data.items():
            try:
                replace(Form(), **{name: value}).settings()
            except RequestError as error:
                found[name] = str(error)
        return found

    def _checking(self) -> str:
        if self.checking == LENIENT:
            return self.lenient_rule or THRESHOLD
        return self.checking or AS_SET


def _stops(written: str) -> tuple[str, ...]:
    """One a line; \\n in a line means a line break. Raises RequestError."""
    found = tuple(line.replace("\\n", "\n") for line in written.split("\n") if line)
    if len(found) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in found):
        raise RequestError(
            f"There may be {MOST_STOPS} stop strings of {LONGEST_STOP} characters each. Remove or "
            "shorten some."
        )
    return found


def _number(kind: type[N], name: str, written: str, low: float, high: float) -> N | None:
    """A number out of a field, by the name it has on the page; None of an empty one. Raises
    RequestError."""
    text = written.strip()
    if not text:
        return None
    try:
        found = kind(text)
    except ValueError:
        told = "a whole number" if kind is int else "a number"
        raise RequestError(
            f"{name} is {text[:20]!r}, but takes {told}. Write one, or leave it empty."
        ) from None
    if low <= found <= high:  # also refuses NaN
        return found
    raise RequestError(
        f"{name} is {text[:24]}, but must lie between {low} and {high}. Write a number in this "
        "range, or leave it empty."
    )


# what the fields show besides their values


def panel(service: ChatService, model: str | None) -> dict[str, Any]:
    """For static/settings.js. model: whose defaults are shown; None where none is known yet."""
    loaded = service.status().description
    ways = () if loaded is None else loaded.drafters
    listed = [(one.name, one.is_available, capital(one.reason)) for one in ways]
    return {
        "ways": [dict(zip(("name", "is_ready", "reason"), one, strict=True)) for one in listed],
        "is_loaded": loaded is not None,
        "thinks": loaded is not None and loaded.thinks,
        "kernels": None if loaded is None else loaded.kernels,
        "makes_titles": None if service.titles is None else service.titles.is_on,
        "kept": {
            "limit": service.kept_chats.gigabytes,
            "now": gib(service.kept_chats.num_bytes),
        },
        "prompts": service.prompts.all(),
        "model": model,
        "defaults": defaults(service, model).data,
        "has_defaults": model in service.defaults.all(),
    }


def defaults(service: ChatService, model: str | None) -> Form:
    """What a new chat begins with. A way of drafting that was asked for at the start comes before
    the one that was kept."""
    kept = {} if model is None else service.defaults.all().get(model, {})
    asked = {} if service.drafter == AUTO else {"drafter": service.drafter}
    return Form.of({**kept, **asked})


# the fields


def inert(text: str) -> Markup:
    """A text of a profile as HTML that Gradio's template, which runs `${…}`, shows as it is."""
    return Markup(escape(text).translate(TEMPLATE_SIGNS))


FIELDS = macros("form.html", inert=inert)


def form_html(service: ChatService) -> str:
    """The fields. Their only texts from outside are names and titles of kinds of text."""
    kinds = [(AUTO, "automatic"), *((one.name, one.title) for one in service.workloads.values())]
    lenient = [one.title for one in service.workloads.values() if one.lenient]
    ways = [
        (one.name, capital(one.label.removeprefix("the ")), one.summary.rpartition(": ")[2])
        for one in REGISTRY.values()
    ]
    made: str = FIELDS.form(kinds, _checkings(lenient), RULES, ways)
    return made


def _checkings(lenient: list[str]) -> tuple[tuple[str, str], ...]:
    """Exact by itself where no kind of text was set to lenient by the person."""
    if not lenient:
        return ((AS_SET, "exact"), (LENIENT, "lenient"))
    as_set = f"lenient for {', '.join(lenient)}"
    return ((AS_SET, as_set), (EXACT, "exact"), (LENIENT, "lenient"))


# Values come to the fields, and go from them, through static/settings.js.
FORM_JS = """
window.lsSettings = { get: () => props.value, set: (written) => { props.value = written; } };
const tell = () => window.dispatchEvent(new CustomEvent('ls-settings', { detail: props.value }));
watch('value', tell);
tell();
"""


def lay_out(service: ChatService) -> gr.HTML:
    import gradio as gr  # heavy: what reads a form works without it

    return gr.HTML(
        written(defaults(service, None)),
        html_template=form_html(service),
        js_on_load=FORM_JS,
        elem_id="ls-form-box",
        padding=False,
        apply_default_css=False,
    )


def written(form: Form) -> str:
    """The component's value; never markup."""
    return json.dumps(form.data).replace("<", "\\u003c")
