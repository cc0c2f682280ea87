"""Settings of a file that note which of their keys are read, so that the others can be told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class NotedSettings(Mapping[str, Any]):
    """prefix: of all keys, left out.

    >>> settings = NotedSettings({"llama.block_count": 2}, "llama.")
    >>> settings["block_count"], settings.read
    (2, {'block_count'})
    """

    def __init__(self, settings: Mapping[str, Any], prefix: str = "") -> None:
        self.read: set[str] = set()
        self._settings = settings
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._settings[f"{self._prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        begin = self._prefix
        return (key.removeprefix(begin) for key in self._settings if key.startswith(begin))

    def __len__(self) -> int:
        return sum(1 for _ in self)
