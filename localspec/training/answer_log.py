"""The answers of a target, written to the work folder as they come.

Contract: one JSON line an answer, on the disk before the next is begun, so that a run killed at any
moment loses only the answers in progress. A line that was cut off is removed when the file is
opened again. The key of an answer is a hash of the prompt and how it was sampled, so that nothing
is asked twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from localspec.errors import StoreError
from localspec.training.rows import Answer


def answer_key(prompt: Sequence[int], temperature: float, max_length: int) -> str:
    asked = json.dumps([list(prompt), temperature, max_length])
    return hashlib.sha256(asked.encode()).hexdigest()


class AnswerLog:
    """All answers of a file by key, and the seconds each took. Raises StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        self.seconds: dict[str, float] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._read()

    def add(self, key: str, answer: Answer, seconds: float) -> None:
        """Append one answer; it is on the disk when this returns."""
        row = {
            "key": key,
            "group": answer.group,
            "prompt": answer.prompt,
            "answer": answer.answer,
            "temperature": answer.temperature,
            "seconds": round(seconds, 3),
        }
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror}). Free some space there or name "
                "another --work, and run the command again: it continues where it stopped."
            ) from error
        self.answers[key], self.seconds[key] = answer, seconds

    def seconds_of(self, keys: Iterable[str]) -> float:
        """The time these answers took together; 0 for those that are not there yet."""
        return sum(self.seconds.get(key, 0.0) for key in keys)

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):  # killed while writing
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                prompt, answer = tuple(row["prompt"]), tuple(row["answer"])
                self.answers[row["key"]] = Answer(row["group"], prompt, answer, row["temperature"])
                self.seconds[row["key"]] = float(row["seconds"])
            except (ValueError, KeyError, TypeError) as error:
                raise StoreError(
                    f"Line {number} of {self.path} is damaged. Delete that line, or the file to "
                    "let the target answer again."
                ) from error
