"""bitsandbytes, imported so that it neither asks a model hub for kernels nor prepares to compile
functions that are not used here: torch's compiler takes a second to import."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from localspec.core.errors import ModelError


def bitsandbytes() -> Any:
    """Return the library. Raises ModelError where it cannot be imported."""
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would warn of the kernels
    try:
        with _set(sys.modules, "kernels", None), _set(vars(torch), "compile", _as_it_is):
            return import_module("bitsandbytes")
    except ImportError as error:
        raise ModelError(
            f"NF4 needs the package bitsandbytes, which cannot be imported ({error}). Install "
            "the versions in requirements.txt, or choose another drafter."
        ) from error
    finally:
        logger.setLevel(level)


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """torch.compile without compiling, as a decorator with settings or without."""
    return function if function is not None else lambda given: given


@contextmanager
def _set(values: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """Set one entry for a while. A module that is None cannot be imported."""
    missing = object()
    before = values.get(name, missing)
    values[name] = value
    try:
        yield
    finally:
        if before is missing:
            del values[name]
        else:
            values[name] = before
