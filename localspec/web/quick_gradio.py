"""Gradio, imported without what only its authors need, and without the proxies of the environment.

Contract: `without_type_stubs` is around the first import of Gradio, and around what makes classes
of its own (quick_blocks). Whenever the class of a component or of blocks is made, Gradio parses its
source and writes a type stub for editors beside it, which takes a second of the two and a half that
its import takes. It leaves out classes that have no source file, so here they have none.

Not here: settings of Gradio that come from the environment (guard.environment).
"""

from __future__ import annotations

import importlib
import inspect
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def import_httpx_without_proxies() -> None:
    """Import httpx, which Gradio alone uses here, so that it asks no proxy. Gradio makes a client
    as it is imported, and that raises for a proxy which it cannot use, or for an IPv6 address among
    the exceptions; and here it calls nobody."""
    request: Any = urllib.request
    getproxies, request.getproxies = request.getproxies, dict
    try:
        importlib.import_module("httpx")
    finally:
        request.getproxies = getproxies


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
