"""The page's own HTML: Jinja templates, in which every text is escaped where it is placed.

Contract: `macros` gives a file of web/templates, whose macros are called as functions and return
HTML. What they are given is text and is escaped, without hidden characters, but for what another
macro made; `exact` keeps these in a value that the page sends back. A name that a template does
not know raises.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from localspec.core.units import DASH, capital, counted, direction, gb, gib, took
from localspec.core.visible import visible
from localspec.drafters.registry import label_of
from localspec.web.words import gain, number, percent

WORDS = {"gib": gib, "gb": gb, "took": took, "number": number, "percent": percent, "gain": gain,
         "direction": direction, "label_of": label_of, "capital": capital, "counted": counted,
         "thousands": "{:,}".format, "exact": Markup.escape,
         }  # fmt: skip


def macros(name: str, **known: Any) -> Any:
    """known: further functions and values of this file."""
    return _environment().get_template(name, globals=known).module


def _shown(value: Any) -> Any:
    """Return what a template places: text without hidden characters, and HTML as it is."""
    return visible(value) if type(value) is str else value


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= WORDS
    made.globals["DASH"] = DASH
    return made
