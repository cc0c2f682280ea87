"""Kinds of text and their settings: profiles/workloads/*.toml.

Contract: `load_workloads` reads them, a person's own in HOME/profiles/workloads before the shipped
ones; a mistake in a file is a ConfigError that names the file and the nearest key. `decide` gives
the kind of text of a request, named or recognised, and its leniency. Naming or recognising a kind
never makes a reply lenient: only the request does, or a profile of the person's own that says
`lenient = true`.

Not here: what a rule does with a draft (engine.lenient).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localspec.core.config import PROJECT_FOLDER, Settings, by_name, check_table, nearest, read_toml
from localspec.core.decoding import AUTO
from localspec.core.errors import ConfigError, RequestError
from localspec.core.leniency import THRESHOLD, Leniency, Threshold, parsed

SHIPPED_WORKLOADS = PROJECT_FOLDER / "profiles" / "workloads"
CHAT, CODE, JSON, REWORK, STORY = "chat", "code", "json", "rework", "story"
MAX_FIRST = 15
FORMER_KEY = "floor"  # files of earlier versions name it; without effect
KINDS: Mapping[str, type] = {
    "title": str, "first_num_draft_tokens": int, "threshold": float, "lenient": bool,
    FORMER_KEY: float,
}  # fmt: skip

# A file as chat/attachments writes it, its name and its text: nothing in it can close its fence.
FILE = re.compile(
    r"(?:\A|\n\n)File `([^`\n]{1,100})`:\n\n(`{3,})\n(.*?)\n?\2(?=\Z|\n\nFile `)", re.DOTALL
)
ITS_FENCE = re.compile(r"(?:\A|\n\n)File `[^`\n]{1,100}`:\n\n`{3,}\n|\n`{3,}(?=\Z|\n\nFile `)")
EDGE = 2_000  # characters read at each end of a text: some patterns take quadratic time

# How a request may be checked, besides by a rule (see leniency.parsed).
AS_SET = "as set"  # what the kind of text's profile says: exact, unless the person set otherwise
EXACT = "exact"

# The beginning of a line of code: a keyword alone also begins lines of prose.
NAMES = r"\w+(?:\.\w+)*(?: +as +\w+)?"
STATEMENT = "|".join(
    (
        r"def +\w+ *\(",
        r"(?:fn|func) +(?:\([^)\n]*\) *)?\w+ *[(<]",
        r"class +\w+(?: *\([^)\n]*\)| +(?:extends|implements)[^\n]*)? *[:{] *$",
        r"public +[^\n]*(?:\w\(|[{;] *$)",
        r"(?:const|let|var) +[^=.?!\n]{1,60}=",
        rf"import +(?:{NAMES}(?: *, *{NAMES})* *;? *$|[^\n]*[\"'])",
        r"from +[\w.]+ +import\b",
        r"#include *[<\"]",
    )
)

# Tried in this order; a wrong guess costs nothing but a first draft of another length.
PATTERNS = (
    (JSON, re.compile(r"\bjson\b|^\s*[{\[]\s*[\"{\[]", re.IGNORECASE)),
    (
        CODE,
        re.compile(
            rf"```|^[ \t]*(?-i:{STATEMENT})"
            r"|\b(?:python|javascript|typescript|java|rust|golang|sql|regex|bash|c\+\+)(?!\w)"
            r"|\b(?:write|fix|debug|refactor|implement|complete|explain|optimi[sz]e)\b[^.?!\n]{0,40}"
            r"\b(?:function|method|class|script|program|code|query|unit tests?|bug)\b"
            r"|\w\([^)\n]*\)\s*[{:]\s*$",
            re.IGNORECASE | re.MULTILINE,
        ),
    ),
    (
        REWORK,
        re.compile(
            r"\b(?:summari[sz]e|summary of|main points of|rewrite|rephrase|shorten|proofread"
            r"|translate|correct|replace|repeat)\b[^?!\n]{0,90}:",
            re.IGNORECASE,
        ),
    ),
    (
        STORY,
        re.compile(
            r"\b(?:write|tell|continue|make up|invent|compose|finish)\b[^.?!\n]{0,40}"
            r"\b(?:story|stories|tale|poem|fable|novel|chapter|verse|limerick|haiku|ballad)\b"
            r"|\bonce upon a time\b",
            re.IGNORECASE,
        ),
    ),
    (REWORK, re.compile(r"\n\s*\S[\s\S]{250,}")),  # a long text below what is asked of it
)


@dataclass(frozen=True)
class Workload:
    """One kind of text. first_num_draft_tokens: γ before acceptance was learnt, None: the engine's
    own guess. threshold: of the lenient rule, None: there is none. lenient: set by the person,
    makes every reply of this kind lenient that does not ask for exactness."""

    name: str
    title: str
    first_num_draft_tokens: int | None = None
    threshold: float | None = None
    lenient: bool = False

    @property
    def leniency(self) -> Leniency | None:
        return None if self.threshold is None else Threshold(self.threshold)


@dataclass(frozen=True)
class Decision:
    """The settings of one request. is_recognised: the kind was recognised, not named."""

    workload: Workload
    is_recognised: bool
    leniency: Leniency | None


def workload_folders(settings: Settings) -> tuple[Path, ...]:
    """The person's own come first."""
    return (settings.home / "profiles" / "workloads", SHIPPED_WORKLOADS)


def load_workloads(folders: Iterable[Path] = (SHIPPED_WORKLOADS,)) -> dict[str, Workload]:
    return by_name(folders, load_workload)


def load_workload(path: Path) -> Workload:
    """The kind of text in `path`. Raises ConfigError for whatever is wrong with it."""
    table = read_toml(path)
    if path.stem in (AUTO, ""):
        raise ConfigError(f"{path}: no kind of text can be called {path.stem!r}. Rename the file.")
    check_table(table, KINDS, str(path))
    kept = {key: value for key, value in table.items() if key != FORMER_KEY}
    found = Workload(path.stem, **{"title": path.stem.capitalize(), **kept})
    for key, low, high in (("first_num_draft_tokens", 1, MAX_FIRST), ("threshold", 0, 1)):
        value = table.get(key, low)
        if not low <= value <= high:
            raise ConfigError(
                f"{path}: '{key}' is {value!r}, but must be a number from {low} to {high}."
            )
    if found.lenient and found.threshold is None:
        raise ConfigError(f"{path} is to be lenient but has no threshold. Add one, as 0.75.")
    return found


def kind_words(workload: str) -> str:
    """A kind of text by a name that says what it is."""
    return "editing" if workload == REWORK else workload


def recognise(text: str) -> str:
    """The kind that a request's text looks like, CHAT where it looks like none. The fence of an
    attached file is no sign of code; what is asked stands before it as before a colon."""
    text = ITS_FENCE.sub(":\n", text)
    if len(text) > 2 * EDGE:
        text = f"{text[:EDGE]}\n{text[-EDGE:]}"
    return next((name for name, pattern in PATTERNS if pattern.search(text)), CHAT)


def decide(workloads: Mapping[str, Workload], named: str, checking: str, text: str) -> Decision:
    """The settings of a request. named: a kind, or AUTO to recognise it from `text`. checking:
    AS_SET, EXACT, THRESHOLD (the kind's own: none for a kind that is exact only), or a rule with
    its numbers. Raises RequestError."""
    is_recognised = named == AUTO
    name = recognise(text) if is_recognised else named
    if name not in workloads:
        raise RequestError(
            f"There is no kind of text called {name!r}. Did you mean "
            f"{nearest(name, workloads)!r}? Known: {', '.join((AUTO, *workloads))}.",
            "workload",
        )
    workload = workloads[name]
    if checking == AS_SET:
        return Decision(workload, is_recognised, workload.leniency if workload.lenient else None)
    if checking == EXACT:
        return Decision(workload, is_recognised, None)
    rule = workload.leniency if checking == THRESHOLD else parsed(checking)
    return Decision(workload, is_recognised, rule)
