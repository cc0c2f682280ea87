"""Let the target answer, many conversations at once, and keep what it says.

Contract: each conversation is answered at every temperature until all are or the minutes are used
up; what the log holds already is not asked again, and its time counts, but not that of answers to
other questions. Prompts are cut to like
lengths, filled in front and masked, so any family that transformers can mask will do; answers
that have ended leave the batch. A prompt the template or the context refuses is left out and
counted.

Not here: what is asked (questions), rows (rows).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from localspec.backend import Message
from localspec.chat.template import ChatTemplate
from localspec.errors import ConfigError, MemoryShortage, RequestError
from localspec.training.answers import AnswerLog, answer_key
from localspec.training.questions import Conversation
from localspec.training.rows import Answer
from localspec.training.target import Target

Report = Callable[[str], None]
TEMPERATURES = (0.0, 0.7, 1.0)
SORTED_TOGETHER = 512  # questions whose lengths are brought together
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class CollectPlan:
    """max_length: tokens of an answer at most. tokens_at_once: positions of a batch, its answers
    included; the cache of a batch holds so many."""

    minutes: float
    max_length: int = 256
    tokens_at_once: int = 16_384
    batch_size: int = 64
    temperatures: tuple[float, ...] = TEMPERATURES
    seed: int = 1


@dataclass(frozen=True)
class Question:
    """A rendered prompt and how to answer it."""

    key: str
    group: str
    prompt: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class Branch:
    """A conversation at one temperature, as far as it has come. place: of the conversation."""

    place: int
    group: str
    said: tuple[Message, ...]
    follow_ups: tuple[str, ...]
    temperature: float

    def after(self, reply: str) -> list[Branch]:
        """The branch with its next question, if it has one."""
        if not self.follow_ups:
            return []
        said = (*self.said, Message("assistant", reply), Message("user", self.follow_ups[0]))
        return [replace(self, said=said, follow_ups=self.follow_ups[1:])]


def collect(
    target: Target,
    template: ChatTemplate,
    conversations: Sequence[Conversation],
    plan: CollectPlan,
    log: AnswerLog,
    report: Report,
) -> list[Answer]:
    """All answers to these conversations that there are now, logged ones first. Raises
    ConfigError when there is none, StoreError, MemoryShortage."""
    found = _logged(template, conversations)
    branches = [
        Branch(place, one.group, one.opening, one.follow_ups, heat)
        for place, one in enumerate(conversations)
        for heat in plan.temperatures
    ]
    asked, refused = dict[str, Question](), set[tuple[int, int]]()
    while branches:  # once for each message of the longest conversation
        rendered = [_question(target, template, branch, plan) for branch in branches]
        new = [question for question in rendered if question is not None]
        asked |= {question.key: question for question in new}
        _ask(target, template, asked, plan, log, report)
        going_on = []
        for branch, question in zip(branches, rendered, strict=True):
            if question is None:
                refused.add((branch.place, len(branch.said)))
            elif question.key in log.answers:
                answer = log.answers[question.key]
                found.append(Answer(branch.group, answer.prompt, answer.answer, answer.temperature))
                going_on += branch.after(template.decode(answer.answer))
        branches = going_on
    if refused:
        left_out = "1 prompt was" if len(refused) == 1 else f"{len(refused)} prompts were"
        report(f"{left_out} left out: too long for the context, or refused by the template.")
    if not found:
        raise ConfigError(
            "The target has answered nothing. Give more --answer-minutes, or prompts that fit its "
            f"context of {target.context_length} tokens."
        )
    return found


def _logged(template: ChatTemplate, conversations: Sequence[Conversation]) -> list[Answer]:
    """Answers that were given before. How they ended is learnt from the target's own."""
    found = []
    for one in conversations:
        if one.logged is None:
            continue
        try:
            prompt = template.render(one.opening)
        except RequestError:
            continue  # counted with the questions
        said = tuple(template.encode_text(one.logged))
        found.append(Answer(one.group, tuple(prompt), said, None))
    return found


def _question(
    target: Target, template: ChatTemplate, branch: Branch, plan: CollectPlan
) -> Question | None:
    try:
        prompt = template.render(branch.said)
    except RequestError:
        return None
    if not prompt or len(prompt) + plan.max_length > target.context_length:
        return None
    key = answer_key(prompt, branch.temperature, plan.max_length)
    return Question(key, branch.group, tuple(prompt), branch.temperature)


def _ask(
    target: Target,
    template: ChatTemplate,
    questions: Mapping[str, Question],
    plan: CollectPlan,
    log: AnswerLog,
    report: Report,
) -> None:
    """Answer what is not answered yet, as long as there is time. questions: all of this run by
    their keys, the answered ones too, for they have used time."""
    open_ones = [question for key, question in questions.items() if key not in log.answers]
    Random(plan.seed).shuffle(open_ones)  # when time runs out, of every kind some are answered
    generator = torch.Generator().manual_seed(plan.seed + len(log.answers))
    num_tokens, begun, said_at = 0, time.monotonic(), time.monotonic()
    for batch in _batches(open_ones, plan):
        left = 60.0 * plan.minutes - log.seconds_of(questions)
        if left <= 0.0:
            report("The time for answers is used up.")
            return
        noted_at = time.monotonic()
        for place, answer in _write(target, template.end_ids, batch, plan.max_length, generator):
            question, now = batch[place], time.monotonic()
            given = Answer(question.group, question.prompt, answer, question.temperature)
            log.add(question.key, given, now - noted_at)
            noted_at, num_tokens = now, num_tokens + len(answer)
            if now - said_at > REPORT_SECONDS:
                said_at, rate = now, num_tokens / (now - begun)
                left = max(0.0, plan.minutes - log.seconds_of(questions) / 60.0)
                report(
                    f"{len(log.answers)} answers, {rate:.0f} tokens/s, at most {left:.1f} "
                    "minutes left"
                )


def _batches(questions: Sequence[Question], plan: CollectPlan) -> Iterator[list[Question]]:
    """Questions of like length, as many as the plan allows at once."""
    for start in range(0, len(questions), SORTED_TOGETHER):
        batch = list[Question]()
        for question in sorted(
            questions[start : start + SORTED_TOGETHER], key=lambda each: len(each.prompt)
        ):
            room = plan.tokens_at_once // (len(question.prompt) + plan.max_length)
            if batch and len(batch) >= min(room, plan.batch_size):
                yield batch
                batch = []
            batch.append(question)
        yield batch


def choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one token per row. logits: [B, V]; temperatures: [B], 0 takes the most likely token."""
    logits = logits.float()
    greedy = logits.argmax(dim=-1)
    scaled = logits / temperatures.clamp_min(1e-3)[:, None]
    # Drawing on the generator's own device keeps a seed's samples the same on every device.
    noise = torch.rand(scaled.shape, generator=generator).to(scaled.device).clamp_min(1e-10)
    drawn = (scaled - (-noise.log()).log()).argmax(dim=-1)
    return torch.where(temperatures > 0, drawn, greedy)


@torch.inference_mode()
def _write(
    target: Target,
    end_ids: frozenset[int],
    questions: Sequence[Question],
    max_length: int,
    generator: torch.Generator,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(place of the question, answer with its end token) for each as it ends."""
    device = target.device
    longest = max(len(question.prompt) for question in questions)
    fill = [longest - len(question.prompt) for question in questions]
    rows = [[0] * n + list(q.prompt) for n, q in zip(fill, questions, strict=True)]
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in fill], device=device)
    heat = torch.tensor([question.temperature for question in questions], device=device)
    tokens, past = torch.tensor(rows, device=device), None  # [B, n]
    places, written = list(range(len(questions))), [list[int]() for _ in questions]
    while places:
        logits, past = _step(target.module, tokens, mask, past)
        drawn = choose(logits, heat, generator)  # [B]
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
            mask, heat, drawn = mask[index], heat[index], drawn[index]
        places = [places[row] for row in kept]
        tokens = drawn[:, None]
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), dim=1)


def _step(module: Any, tokens: Tensor, mask: Tensor, past: Any) -> tuple[Tensor, Any]:
    """Logits of the last position [B, V] and the cache."""
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
            "shorter prompts, and run the command again: it goes on where it stopped."
        ) from error
    return output.logits[:, -1], output.past_key_values
