"""Gradio, imported without what only its authors need.

Contract: `without_type_stubs` is around the first import of Gradio, and around what makes classes
of its own (quick_blocks). Whenever the class of a component or of blocks is made, Gradio parses its
source and writes a type stub for editors beside it, which takes a second of the two and a half that
its import takes. It leaves out classes that have no source file, so here they have none.

Not here: settings of Gradio that come from the environment (guard.environment).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_type_stubs() -> Iterator[None]:
    module: Any = inspect
    found = module.getfile

    def file_of(what: Any) -> str:
        if isinstance(what, type) and what.__module__.partition(".")[0] == "gradio":
            raise OSError("no source file")
        path: str = found(what)
        return path

    module.getfile = file_of
    try:
        yield
    finally:
        module.getfile = found
