"""The prompts of a comparison, as people write them and as token ids.

A file holds one JSON object a line, `{"id", "task", "turns": [...]}`; the first turn is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.core.config import PROJECT_FOLDER
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ConfigError
from localspec.core.prompt_rows import read_prompt_rows
from localspec.core.workloads import recognise

OWN_PROMPTS = PROJECT_FOLDER / "assets" / "prompts.jsonl"
FORM = '{"id": ..., "task": ..., "turns": [...]}'


@dataclass(frozen=True)
class Prompt:
    """One message to answer. task: the kind of work; every task gets rows of its own."""

    id: str
    task: str
    text: str


@dataclass(frozen=True)
class Case:
    """One prompt as token ids. seed: the same for every arm. workload: the kind of text that the
    app would recognise."""

    id: str
    task: str
    prompt: tuple[int, ...]
    seed: int
    workload: str = ""

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=self.seed)


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file in its order; None takes all. Raises ConfigError."""
    prompts = read_prompt_rows(path, _prompt, FORM, limit)
    ids = [prompt.id for prompt in prompts]
    twice = next((each for each in ids if ids.count(each) > 1), None)
    if twice is not None:  # results are paired by id
        raise ConfigError(f"{path} has the id {twice!r} twice. Give each prompt its own.")
    return prompts


def _prompt(row: Any) -> Prompt:
    prompt = Prompt(row["id"], row["task"], row["turns"][0])
    if not all(isinstance(v, str) and v.strip() for v in (prompt.id, prompt.task, prompt.text)):
        raise ValueError("a field without text")
    return prompt


def fitting_cases(
    prompts: Sequence[Prompt],
    render: Callable[[str], Sequence[int]],
    max_tokens: int,
    context_length: int,
) -> tuple[list[Case], list[dict[str, str]]]:
    """Prompts as token ids, and those that do not fit the context, each with the reason."""
    cases, skipped = list[Case](), list[dict[str, str]]()
    for prompt in prompts:
        tokens = tuple(render(prompt.text))
        if len(tokens) + max_tokens <= context_length:
            seed, workload = zlib.crc32(prompt.id.encode()), recognise(prompt.text)
            cases.append(Case(prompt.id, prompt.task, tokens, seed, workload))
            continue
        reason = (
            f"{len(tokens)} tokens and {max_tokens} of reply do not fit the context of "
            f"{context_length}."
        )
        skipped.append({"prompt": prompt.id, "task": prompt.task, "reason": reason})
    return cases, skipped


def repeated(cases: Sequence[Case], times: int) -> list[Case]:
    """All cases `times` times over; each repetition has its own name and seed."""
    return [
        replace(case, id=f"{case.id}#{time}", seed=case.seed + time) if time else case
        for time in range(times)
        for case in cases
    ]
