"""The process in which chat templates run (see template_process).

A question holds the arguments of transformers' render_jinja_template. The answer holds the text, a
refusal of this conversation or a fault of the template. Of transformers only what renders is
imported.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from types import ModuleType
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from localspec.chat.limited_child import answer_questions

# What no other conversation would change.
FAULTS = (TemplateSyntaxError, SecurityError, RecursionError)
NO_OTHER_FILE = "no loader for this environment"  # jinja2's, of a template that includes another
# Characters of a text that is in proportion to what was asked.
MOST_GROWTH, MOST_ADDED = 4, 2**20


@cache
def _renderer() -> Any:
    """transformers' own. What its packages import at their start is left out: that takes three
    quarters of a second, four times as long as the rest, and rendering needs none of it."""
    found = importlib.util.find_spec("transformers")
    assert found is not None, "it is installed"
    for name, below in (("transformers", ""), ("transformers.utils", "/utils")):
        package = ModuleType(name)
        package.__path__ = [f"{folder}{below}" for folder in found.submodule_search_locations or ()]
        sys.modules[name] = package
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def answer(question: dict[str, Any]) -> dict[str, str]:
    """Return the answer to a question; an empty one asks only whether the process is there."""
    if not question:
        return {}
    try:
        text = str(_renderer()(**question)[0][0])
    except MemoryError:
        return {"fault": "it takes too much memory"}
    except Exception as error:  # a template is a program: it may fail in any way
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        is_fault = isinstance(error, FAULTS) or NO_OTHER_FILE in said
        return {"fault" if is_fault else "refusal": said}
    if len(text) > MOST_GROWTH * len(json.dumps(question)) + MOST_ADDED:
        return {"fault": f"it makes a text of {len(text):,} characters."}
    return {"text": text}


if __name__ == "__main__":
    _renderer()
    answer_questions(answer)
