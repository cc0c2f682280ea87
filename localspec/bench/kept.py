"""The file of `bench --out`: JSON that is written while a result grows.

Contract: the file is written whole or not at all. It holds one line for each entry of a list or
value of an object, numbers rounded to KEPT_DIGITS significant digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any

from localspec.core.arithmetic import rounded
from localspec.core.errors import StoreError
from localspec.core.files import replacing

KEPT_DIGITS = 6
MIN_INTERVAL_S = 20.0
MAX_SHARE = 0.02  # of the time, for making and writing results that are not complete


class KeptFile:
    """path: None for a result that is not to be kept. report: called with what cannot be
    written."""

    def __init__(self, path: Path | None, report: Callable[[str], None]) -> None:
        self._path, self._report = path, report
        self._next_s = 0.0

    def offer(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Write a result that grows: the first at once, others so seldom that they take at most
        MAX_SHARE of the time. What cannot be written is reported."""
        started = monotonic()
        if self._path is None or started < self._next_s:
            return
        try:
            self.write(make())
        except StoreError as error:
            self._report(str(error))
        ended = monotonic()
        self._next_s = ended + max(MIN_INTERVAL_S, (ended - started) / MAX_SHARE)

    def write(self, result: Mapping[str, Any]) -> None:
        """Raises StoreError."""
        if self._path is None:
            return
        try:
            with replacing(self._path) as part:
                part.write_text(compact_json(result), encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"{error.filename or self._path} cannot be written ({error.strerror or error}). "
                "The table is printed all the same; copy it from there."
            ) from error


def compact_json(result: Mapping[str, Any]) -> str:
    parts = [f'"{name}": {_compact_value(value)}' for name, value in result.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _compact_value(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {_one_line(each)}" for each in value) + "\n]"
    if isinstance(value, Mapping) and value:
        lines = [f" {json.dumps(name)}: {_one_line(each)}" for name, each in value.items()]
        return "{\n" + ",\n".join(lines) + "\n}"
    return _one_line(value)


def _one_line(value: Any) -> str:
    kept = rounded(value, lambda number: float(f"{number:.{KEPT_DIGITS}g}"))
    return json.dumps(kept, ensure_ascii=False)
