"""The process in which chat templates run (see template_process).

Contract: a line of JSON in, the arguments of transformers' render_jinja_template; a line out, with
the text, a refusal of this conversation or a fault of the template. The process ends itself when a
line takes the seconds of its argument, whatever the interpreter is doing, and when its input ends.
It is run as a file and imports nothing of localspec, and of transformers only what renders.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
from types import ModuleType
from typing import Any

from jinja2.exceptions import SecurityError, TemplateSyntaxError

# What no other conversation would change.
FAULTS = (TemplateSyntaxError, SecurityError, RecursionError, MemoryError)
NO_OTHER_FILE = "no loader for this environment"  # jinja2's, of a template that includes another
# Characters of a text that is in proportion to what was asked.
MOST_GROWTH, MOST_ADDED = 4, 2**20


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    render, limit_s = _renderer(), float(sys.argv[1])
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=nowhere)
            answer = _answer(render, line)
            sys.stdout.write(f"{json.dumps(answer)}\n")
            sys.stdout.flush()
            faulthandler.cancel_dump_traceback_later()


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


def _answer(render: Any, line: str) -> dict[str, str]:
    try:
        text = str(render(**json.loads(line))[0][0])
    except Exception as error:  # a template is a program: it may fail in any way
        said = next(iter(str(error).strip().splitlines()), type(error).__name__)
        is_fault = isinstance(error, FAULTS) or NO_OTHER_FILE in said
        return {"fault" if is_fault else "refusal": said}
    if len(text) > MOST_GROWTH * len(line) + MOST_ADDED:
        return {"fault": f"it makes a text of {len(text):,} characters."}
    return {"text": text}


if __name__ == "__main__":
    main()
