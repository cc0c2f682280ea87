"""Pretrains a decoder on packed text, with checkpoints that resume to the same losses.

Contract: `pretrain` runs until the schedule's budget is used up and returns what happened; it
writes `checkpoint.pt` atomically every few minutes and continues from it when it is there.
Weighted cross-entropy on all tokens. `early_exit_loss` adds the loss of one early exit, the exits
in turn, and leaves each layer out of a batch with a chance that grows with its depth, so that the
first layers can draft. Both depend on the batch's number alone, so that a resumed run repeats them.
Source of early exits: LayerSkip (arXiv 2404.16710), with whole batches in place of samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from localspec.core.backend import Report
from localspec.core.files import replacing
from localspec.training.train_loop import Schedule
from tools.demo_pair.decoder import hidden_states, hidden_with_exit
from tools.demo_pair.optimiser import Optimiser
from tools.demo_pair.packs import BatchStream, Pack, PackedBatch

LossFunction = Callable[[LlamaForCausalLM, PackedBatch], Tensor]
HeadLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Judge = Callable[[LlamaForCausalLM], float]


@dataclass(frozen=True)
class PretrainSettings:
    """How to run: where the checkpoint is, how often it is written, what is compiled.
    adam_rate_ratio: see Optimiser. patience:
    judgements (one with each checkpoint) without a better held-out loss before the run goes over
    to its decay; None never does."""

    schedule: Schedule
    work_dir: Path
    checkpoint_minutes: float = 4.0
    report_steps: int = 20
    is_compiled: bool = False
    adam_rate_ratio: float = 1.0
    patience: int | None = None


@dataclass
class PretrainProgress:
    """What a run has done so far; saved with each checkpoint. num_worse: judgements since the
    best held-out loss. skipped_seconds: of the budget, left out because it got no better."""

    step: int = 0
    num_tokens: int = 0
    trained_seconds: float = 0.0
    best_loss: float = math.inf
    num_worse: int = 0
    skipped_seconds: float = 0.0


def head_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy.

    hidden: [B, n, H]; head: [V, H]; targets, weights: [B, n].
    """
    logits = functional.linear(hidden, head).flatten(0, 1).float()  # [B * n, V] fp32
    losses = functional.cross_entropy(logits, targets.flatten(), reduction="none")
    flat = weights.flatten()
    return (losses * flat).sum() / flat.sum().clamp_min(1e-6)


def weighted_loss(
    model: LlamaForCausalLM, batch: PackedBatch, head: HeadLoss = head_loss
) -> Tensor:
    """Return the mean cross-entropy in nats, by loss weight."""
    hidden = hidden_states(model, batch.tokens[:, :-1])
    return head(hidden, model.lm_head.weight, batch.tokens[:, 1:], batch.weights)


@dataclass(frozen=True)
class ExitLayers:
    """exits: after how many layers the model may leave. weight: of the exit's loss beside the
    whole model's. dropout: chance to leave out the last layer; earlier ones have less."""

    exits: tuple[int, ...] = (2, 3, 4, 6)
    weight: float = 0.3
    dropout: float = 0.1

    def exit_of(self, number: int) -> int:
        """The exit whose loss batch `number` carries."""
        return self.exits[number % len(self.exits)]

    def skipped(self, number: int, num_layers: int) -> frozenset[int]:
        """The layers that batch `number` leaves out; never the first."""
        rng = Random(f"layers/{number}")
        chances = (self.dropout * (2.0 ** (i / (num_layers - 1)) - 1.0) for i in range(num_layers))
        return frozenset(i for i, chance in enumerate(chances) if rng.random() < chance)


def early_exit_loss(plan: ExitLayers, head: HeadLoss = head_loss) -> LossFunction:
    """A loss in nats over a batch, by loss weight."""

    def loss(model: LlamaForCausalLM, batch: PackedBatch) -> Tensor:
        inputs, targets = batch.tokens[:, :-1], batch.tokens[:, 1:]
        skipped = plan.skipped(batch.number, model.config.num_hidden_layers)
        last, left = hidden_with_exit(model, inputs, plan.exit_of(batch.number), skipped)
        whole, at_exit = (
            head(each, model.lm_head.weight, targets, batch.weights) for each in (last, left)
        )
        return whole + plan.weight * at_exit

    return loss


@torch.no_grad()
def held_out_loss(
    model: LlamaForCausalLM, pack: Pack, rows_per_batch: int = 8, max_rows: int = 256
) -> float:
    """Return the loss over a pack, tokens counted by their weight."""
    total = weight = 0.0
    for start in range(0, min(len(pack.tokens), max_rows), rows_per_batch):
        stop = min(start + rows_per_batch, len(pack.tokens), max_rows)
        batch = pack.rows(range(start, stop), model.device)
        batch_weight = float(batch.weights.sum())
        total += float(weighted_loss(model, batch)) * batch_weight
        weight += batch_weight
    return total / max(weight, 1e-6)


def load_model(checkpoint: Path, device: torch.device) -> LlamaForCausalLM:
    """Build the decoder of a checkpoint from its master weights."""
    content = torch.load(checkpoint, map_location=device, weights_only=True)
    model = LlamaForCausalLM(LlamaConfig.from_dict(content["config"])).to(device, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(content["optimiser"]["master"][name])
    return model


class PretrainRun:
    """One training run: model, optimiser, data and clock, and their checkpoint."""

    def __init__(
        self, model: LlamaForCausalLM, stream: BatchStream, settings: PretrainSettings
    ) -> None:
        self.model = model
        self.stream = stream
        self.settings = settings
        self.optimiser = Optimiser(model, settings.adam_rate_ratio)
        self.progress = PretrainProgress()
        self.path = settings.work_dir / "checkpoint.pt"
        settings.work_dir.mkdir(parents=True, exist_ok=True)

    def resume(self) -> bool:
        """Continue from the checkpoint; say whether there was one."""
        if not self.path.exists():
            return False
        content = torch.load(self.path, map_location=self.stream.device, weights_only=True)
        self.optimiser.load_state(content["optimiser"])
        self.stream.load_state(content["stream"])
        self.progress = PretrainProgress(**content["progress"])
        return True

    def save(self) -> None:
        """In the old one's place: a crash leaves one whole file. Raises OSError."""
        content = {
            "config": self.model.config.to_dict(),
            "optimiser": self.optimiser.state(),
            "stream": self.stream.state(),
            "progress": asdict(self.progress),
        }
        with replacing(self.path) as part:
            torch.save(content, part)

    def step(self, loss_function: LossFunction) -> float:
        """Do one update and return its loss in nats."""
        started = time.monotonic()
        schedule, done = self.settings.schedule, self.done()
        batch = self.stream.next(schedule.is_decaying(done))
        loss = loss_function(self.model, batch)
        loss.backward()
        self.optimiser.step(schedule.rate(done))
        self.progress.step += 1
        self.progress.num_tokens += batch.num_tokens
        self.progress.trained_seconds += time.monotonic() - started
        return float(loss.detach())

    def done(self) -> float:
        """How much of the budget is used, 0 to 1. A run that gets no better skips to its decay,
        which then lasts as long as it would have."""
        schedule, progress = self.settings.schedule, self.progress
        return schedule.progress(progress.step, progress.trained_seconds + progress.skipped_seconds)

    def judge(self, loss: float) -> None:
        progress, patience = self.progress, self.settings.patience
        progress.num_worse = 0 if loss < progress.best_loss else progress.num_worse + 1
        progress.best_loss = min(loss, progress.best_loss)
        schedule = self.settings.schedule
        if patience is None or progress.num_worse < patience or schedule.minutes is None:
            return
        decay_from = 60 * schedule.minutes * (1.0 - schedule.decay_fraction)
        used = progress.trained_seconds + progress.skipped_seconds
        progress.skipped_seconds += max(0.0, decay_from - used)


def train_run(
    run: PretrainRun, loss_function: LossFunction, report: Report, judge: Judge | None = None
) -> list[float]:
    """Step until the budget is used up; checkpoint and report on the way; return the losses.

    judge: the held-out loss of the model as it stands, asked with each checkpoint.
    """
    losses: list[float] = []
    saved_at = time.monotonic()
    while run.done() < 1.0:
        losses.append(run.step(loss_function))
        if run.progress.step % run.settings.report_steps == 0:
            recent = losses[-run.settings.report_steps :]
            speed = run.progress.num_tokens / max(run.progress.trained_seconds, 1e-9)
            report(
                f"step {run.progress.step}: loss {sum(recent) / len(recent):.3f}, "
                f"{run.progress.num_tokens / 1e6:.2f} M tokens, {speed:.0f} tokens/s, "
                f"{run.progress.trained_seconds / 60:.1f} min"
            )
        if time.monotonic() - saved_at > 60 * run.settings.checkpoint_minutes:
            if judge is not None:
                loss = judge(run.model)
                run.judge(loss)
                report(f"held-out loss {loss:.3f}, best {run.progress.best_loss:.3f}")
            run.save()
            saved_at = time.monotonic()
    run.save()
    return losses


def compiled(function: Callable[..., Tensor], is_wanted: bool) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False) if is_wanted else function


def compile_layers(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def pretrain(
    model: LlamaForCausalLM,
    stream: BatchStream,
    settings: PretrainSettings,
    report: Report,
    loss: LossFunction,
    judge: Judge | None = None,
) -> PretrainProgress:
    """Train from scratch or from the checkpoint until the budget is used up."""
    run = PretrainRun(model, stream, settings)
    if run.resume():
        report(f"Resuming at step {run.progress.step}.")
    if settings.is_compiled:
        compile_layers(model)
    train_run(run, loss, report, judge)
    return run.progress
