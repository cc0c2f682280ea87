"""Lets the target answer the prompts, many at a time, and keeps the answers.

Contract: each prompt is answered at every temperature until all are or the minutes are used up. An
answer that the log holds is not asked for again, and its time counts; the time of answers to other
prompts does not. Prompts of a batch are padded in front and masked, so any family that
transformers can mask works; answers that have ended leave the batch. A prompt that the template or
the context refuses is left out and counted.

`AnswerLog` has one JSON line an answer, on the disk before the next is begun, so that a run killed
at any moment loses only the answers in progress. A line that was cut off is removed when the file
is opened again.

Not here: reading the prompts (prompt_files), rows (rows).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from localspec.chat.template import ChatTemplate
from localspec.core.backend import Message, Report
from localspec.core.errors import ConfigError, MemoryShortage, RequestError, StoreError
from localspec.core.units import clock
from localspec.training.prompt_files import TrainingPrompt
from localspec.training.rows import Answer
from localspec.training.target import Target

SORTED_TOGETHER = 512  # questions that are sorted by length together
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class CollectPlan:
    """max_length: tokens of an answer at most. tokens_at_once: positions of a batch, answers
    included, which bounds the cache."""

    minutes: float
    max_length: int = 256
    tokens_at_once: int = 16_384
    batch_size: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 1


@dataclass(frozen=True)
class Question:
    """A rendered prompt and how to answer it. key: a hash of both and of the longest answer."""

    key: str
    group: str
    prompt: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class Branch:
    """A conversation at one temperature, as far as it has come. place: of its prompt."""

    place: int
    group: str
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...]
    temperature: float

    def after(self, reply: str) -> list[Branch]:
        """The branch with its next question, if it has one."""
        if not self.follow_ups:
            return []
        exchange = (Message("assistant", reply), Message("user", self.follow_ups[0]))
        messages = (*self.messages, *exchange)
        return [replace(self, messages=messages, follow_ups=self.follow_ups[1:])]


class AnswerLog:
    """All answers of a file by the keys of their questions, and the seconds each took. Raises
    StoreError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, Answer] = {}
        self.seconds: dict[str, float] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._read()

    def add(self, key: str, answer: Answer, seconds: float) -> None:
        """Append one answer; it is on the disk when this returns."""
        row = {"key": key, **vars(answer), "seconds": round(seconds, 3)}
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror}). Free disk space there or name "
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


def collect(
    target: Target,
    template: ChatTemplate,
    prompts: Sequence[TrainingPrompt],
    plan: CollectPlan,
    log: AnswerLog,
    report: Report,
) -> list[Answer]:
    """All answers to the prompts that there are now, those of the person's own log first. Raises
    ConfigError when there is none, StoreError, MemoryShortage."""
    found = _logged(template, prompts)
    branches = [
        Branch(place, one.group, one.opening, one.follow_ups, temperature)
        for place, one in enumerate(prompts)
        for temperature in plan.temperatures
    ]
    asked, refused = dict[str, Question](), set[tuple[int, int]]()
    while branches:  # once for each message of the longest conversation
        questions = [_question(target, template, branch, plan) for branch in branches]
        asked |= {question.key: question for question in questions if question is not None}
        _ask(target, template, asked, plan, log, report)
        remaining = []
        for branch, question in zip(branches, questions, strict=True):
            if question is None:
                refused.add((branch.place, len(branch.messages)))
            elif question.key in log.answers:
                answer = log.answers[question.key]
                found.append(replace(answer, group=branch.group))
                remaining += branch.after(template.decode(answer.answer))
        branches = remaining
    if refused:
        left_out = "1 prompt was" if len(refused) == 1 else f"{len(refused)} prompts were"
        report(f"{left_out} left out: too long for the context, or refused by the template.")
    if not found:
        raise ConfigError(
            "The target has answered nothing. Give more --answer-minutes, or prompts that fit its "
            f"context of {target.context_length} tokens."
        )
    return found


def _logged(template: ChatTemplate, prompts: Sequence[TrainingPrompt]) -> list[Answer]:
    """Answers that were given before, without an end token: how an answer ends is learned from the
    target's own. A prompt that the template refuses is counted with the questions."""
    found = []
    for one in prompts:
        prompt = None if one.logged is None else _rendered(template, one.opening)
        if one.logged is not None and prompt is not None:
            answer = tuple(template.encode_text(one.logged))
            found.append(Answer(one.group, prompt, answer, None))
    return found


def _rendered(template: ChatTemplate, messages: Sequence[Message]) -> tuple[int, ...] | None:
    try:
        return tuple(template.render(messages))
    except RequestError:
        return None


def _question(
    target: Target, template: ChatTemplate, branch: Branch, plan: CollectPlan
) -> Question | None:
    prompt = _rendered(template, branch.messages)
    if not prompt or len(prompt) + plan.max_length > target.context_length:
        return None
    asked = json.dumps([prompt, branch.temperature, plan.max_length])
    key = hashlib.sha256(asked.encode()).hexdigest()
    return Question(key, branch.group, prompt, branch.temperature)


def _ask(
    target: Target,
    template: ChatTemplate,
    questions: Mapping[str, Question],
    plan: CollectPlan,
    log: AnswerLog,
    report: Report,
) -> None:
    """Answer what is not in the log, as long as there is time. questions: all of this run by key,
    the answered ones too, as their time counts."""
    waiting = [question for key, question in questions.items() if key not in log.answers]
    Random(plan.seed).shuffle(waiting)  # when time runs out, some of every kind are answered
    generator = torch.Generator().manual_seed(plan.seed + len(log.answers))
    num_tokens, started, reported_at = 0, time.monotonic(), time.monotonic()
    for batch in batches(waiting, plan):
        if log.seconds_of(questions) >= 60.0 * plan.minutes:
            report("The time for answers is used up.")
            return
        added_at = time.monotonic()
        for place, answer in write(
            target.module, template.end_ids, batch, plan.max_length, generator
        ):
            question, now = batch[place], time.monotonic()
            given = Answer(question.group, question.prompt, answer, question.temperature)
            log.add(question.key, given, now - added_at)
            added_at, num_tokens = now, num_tokens + len(answer)
            if now - reported_at > REPORT_SECONDS:
                reported_at, rate = now, num_tokens / (now - started)
                left = max(0.0, plan.minutes - log.seconds_of(questions) / 60.0)
                report(
                    f"{len(log.answers)} answers, {rate:.0f} tokens/s, at most "
                    f"{clock(60 * left)} left"
                )


def batches(questions: Sequence[Question], plan: CollectPlan) -> Iterator[list[Question]]:
    """Questions of similar length, as many as the plan allows at once."""
    for start in range(0, len(questions), SORTED_TOGETHER):
        batch = list[Question]()
        for question in sorted(
            questions[start : start + SORTED_TOGETHER], key=lambda each: len(each.prompt)
        ):
            num_fitting = plan.tokens_at_once // (len(question.prompt) + plan.max_length)
            if batch and len(batch) >= min(num_fitting, plan.batch_size):
                yield batch
                batch = []
            batch.append(question)
        yield batch


@torch.inference_mode()
def write(
    module: Any,
    end_ids: frozenset[int],
    questions: Sequence[Question],
    max_length: int,
    generator: torch.Generator,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(place of the question, answer with its end token) for each answer as it ends. module: of
    transformers."""
    device = module.device
    longest = max(len(question.prompt) for question in questions)
    padding = [longest - len(question.prompt) for question in questions]
    rows = [[0] * n + list(q.prompt) for n, q in zip(padding, questions, strict=True)]
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
    temperatures = torch.tensor([question.temperature for question in questions], device=device)
    tokens, past = torch.tensor(rows, device=device), None  # [B, n]
    places, written = list(range(len(questions))), [list[int]() for _ in questions]
    while places:
        logits, past = _step(module, tokens, mask, past)
        drawn = choose(logits, temperatures, generator)  # [B]
        kept = []
        for row, token in enumerate(drawn.tolist()):
            answer = written[places[row]]
            answer.append(token)
            if token in end_ids or len(answer) >= max_length:
                yield places[row], tuple(answer)
            else:
                kept.append(row)
        if len(kept) < len(places) and kept:
            index = torch.tensor(kept, device=device)
            past.batch_select_indices(index)
            mask, temperatures, drawn = mask[index], temperatures[index], drawn[index]
        places = [places[row] for row in kept]
        tokens = drawn[:, None]
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)


def choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row. logits: [B, V]; temperatures: [B], 0 takes the most likely token."""
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    scaled = logits / temperatures.clamp_min(1e-3)[:, None]
    # Drawing on the generator's own device keeps a seed's samples the same on every device.
    noise = torch.rand(scaled.shape, generator=generator).to(scaled.device).clamp_min(1e-10)
    drawn = (scaled - (-noise.log()).log()).argmax(dim=-1)
    return torch.where(temperatures > 0, drawn, greedy)


def _step(module: Any, tokens: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Logits of the last position [B, V], and the cache."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
    try:
        output = module(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryShortage(
            f"The memory does not hold {len(tokens)} answers at once. Close other programs or give "
            "shorter prompts, and run the command again: it continues where it stopped."
        ) from error
    return output.logits[:, -1], output.past_key_values
