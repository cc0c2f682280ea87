"""The loop that trains any recipe: steps, judgements on held-out rows, checkpoints.

Contract: `TrainLoop.train` runs until the schedule's budget is used up or the held-out figure has
stopped improving, and leaves the best weights in the recipe. That figure is the expected tokens of
a round, and where it is equal the loss. The checkpoint is one file that is written beside the old
one and swapped in, so that a run killed at any moment continues from the last one, at the same
place in the data. It is read as plain tensors and numbers, never as objects that could run code.

Not here: data (rows), what is trained (recipe), measuring (judging), where it goes (run).
Source of the schedule: warm-up, stable, decay; Hu et al. 2024 (arXiv 2404.06395).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from localspec.core.backend import Report
from localspec.core.errors import (
    ConfigError,
    MemoryShortage,
    NumericsError,
    StoreError,
    first_line,
)
from localspec.core.files import replacing
from localspec.core.units import clock
from localspec.training.judging import Judgement, judge
from localspec.training.recipe import Recipe
from localspec.training.rows import SplitRows, TokenRow, make_batches
from localspec.training.target import Target

BETAS, CLIP_NORM = (0.9, 0.95), 1.0
EMBEDDING_RATE = 0.25  # relative; an embedding starts from the target's
REPORT_SECONDS = 10.0
CHECKPOINT_KEYS = {"about", "data", "has_ended", "trained", "best", "optimiser", "progress"}


@dataclass(frozen=True)
class Schedule:
    """The learning rate over a budget in steps or in minutes of trained time, so that a run ends
    in its decay however fast the machine is. The fractions are of its phases."""

    peak_rate: float
    num_steps: int | None = None
    minutes: float | None = None
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.25

    def progress(self, step: int, trained_seconds: float) -> float:
        """The used share of the budget, 0 to 1."""
        if self.num_steps is not None:
            return min(1.0, step / self.num_steps)
        assert self.minutes is not None, "a budget in steps or in minutes"
        return min(1.0, trained_seconds / (60 * self.minutes))

    def rate(self, progress: float) -> float:
        warm = min(1.0, (progress + 1e-3) / self.warmup_fraction)
        cool = min(1.0, (1.0 - progress) / self.decay_fraction)
        return self.peak_rate * min(warm, max(cool, 0.02))

    def is_decaying(self, progress: float) -> bool:
        return progress > 1.0 - self.decay_fraction


@dataclass(frozen=True)
class LoopSettings:
    """tokens_per_batch: of one update. tokens_at_once: of one forward, which bounds the memory.
    judge_share: of the budget between two judgements. patience: judgements without a better one
    until the rate decays, and again until the run ends."""

    schedule: Schedule
    folder: Path
    tokens_per_batch: int = 4096
    tokens_at_once: int = 4096
    judge_share: float = 0.05
    checkpoint_minutes: float = 2.0
    patience: int = 5
    weight_decay: float = 0.01
    max_held_out_rows: int = 128
    seed: int = 1


@dataclass(eq=False)
class TrainProgress:
    """What a run has done, kept in the checkpoint. place: of the next batch in the epoch.
    num_worse: judgements since the best. skipped: share of the budget left out."""

    step: int = 0
    num_tokens: int = 0
    trained_seconds: float = 0.0
    epoch: int = 0
    place: int = 0
    num_worse: int = 0
    skipped: float = 0.0
    judged_at: float = 0.0
    is_over: bool = False
    first: Judgement | None = None
    best: Judgement | None = None

    @classmethod
    def restored(cls, row: dict[str, Any]) -> TrainProgress:
        """From the plain data of a checkpoint."""
        judged = {
            name: None if row[name] is None else Judgement.of(row[name])
            for name in ("first", "best")
        }
        return cls(**(row | judged))


class TrainLoop:
    """One training: recipe, optimiser, data, clock, and their checkpoint.

    about: what must be equal for a checkpoint to be resumed."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        rows: SplitRows,
        settings: LoopSettings,
        about: dict[str, Any],
        report: Report,
    ) -> None:
        self.recipe, self.target, self.rows = recipe, target, rows
        self.settings, self.about, self.report = settings, about, report
        self.teacher = target.teacher()
        self.trained = {n: p for n, p in recipe.module.named_parameters() if p.requires_grad}
        embeddings = {id(m.weight) for m in recipe.module.modules() if isinstance(m, nn.Embedding)}
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p], "scale": EMBEDDING_RATE if id(p) in embeddings else 1.0}
                for p in self.trained.values()
            ],
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )
        self.progress = TrainProgress()
        self._order: tuple[int, list[list[TokenRow]]] | None = None
        self.best = self._copied()
        self.path = settings.folder / "checkpoint.pt"
        settings.folder.mkdir(parents=True, exist_ok=True)

    def train(self) -> Judgement:
        """Train to the end; returns what held-out rows say of the best weights."""
        if self.resume():
            self.report(f"Continuing from the checkpoint at step {self.progress.step}.")
        if self.progress.best is None:
            self.judge()
        reported_at = saved_at = time.monotonic()
        losses = list[float]()
        while self.done < 1.0 and not self.progress.is_over:
            losses.append(self.step())
            now = time.monotonic()
            if now - reported_at > REPORT_SECONDS:
                self.report(self._progress_line(losses))
                reported_at, losses = now, []
            is_due = self.done - self.progress.judged_at >= self.settings.judge_share
            if is_due:
                self.judge()
            if is_due or now - saved_at > 60 * self.settings.checkpoint_minutes:
                self.save()
                saved_at = now
        if self.progress.judged_at < self.done:
            self.judge()
        self.save(has_ended=True)
        self._put(self.best)
        return self.judgement

    @property
    def judgement(self) -> Judgement:
        """Of the best weights so far."""
        assert self.progress.best is not None, "nothing was judged yet"
        return self.progress.best

    @property
    def done(self) -> float:
        """How much of the budget is used, 0 to 1."""
        progress = self.progress
        used = self.settings.schedule.progress(progress.step, progress.trained_seconds)
        return min(1.0, used + progress.skipped)

    def step(self) -> float:
        """One update; returns its loss. Raises NumericsError, MemoryShortage."""
        started = time.monotonic()
        progress = self.progress
        torch.manual_seed(self.settings.seed * 1_000_003 + progress.step)  # a resumed run repeats
        rows = self._next_rows()
        self.recipe.module.train()
        try:
            loss = self.backward(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise MemoryShortage(
                f"The memory does not hold a batch of {self.settings.tokens_at_once} tokens. Close "
                "other programs or give a smaller --batch, and run the command again: it continues "
                "from the last checkpoint."
            ) from error
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), CLIP_NORM))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NumericsError(
                f"The loss became no number at step {progress.step}. Run the command again with "
                "a lower --rate; it continues from the last checkpoint."
            )
        rate = self.settings.schedule.rate(self.done)
        for group in self.optimiser.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        progress.step += 1
        progress.num_tokens += sum(map(len, rows))
        progress.trained_seconds += time.monotonic() - started
        return loss

    def backward(self, rows: Sequence[TokenRow]) -> float:
        """Add the gradients of the mean loss over rows, one forward's worth at a time."""
        parts = make_batches(rows, self.settings.tokens_at_once, Random(0))
        weights = [float(sum(row.weights.sum() for row in part)) for part in parts]
        total, sum_of_weights = 0.0, max(sum(weights), 1e-6)
        for part, weight in zip(parts, weights, strict=True):
            batch = self.target.taught(part, self.recipe.layers)
            loss: Tensor = self.recipe.loss(self.teacher, batch) * (weight / sum_of_weights)
            loss.backward()
            total += float(loss.detach())
        return total

    def _next_rows(self) -> list[TokenRow]:
        progress = self.progress
        if self._order is None or self._order[0] != progress.epoch:
            # A function of the epoch alone, so that a checkpoint keeps only the place in it.
            order = Random(f"{self.settings.seed}/{progress.epoch}")
            batches = make_batches(self.rows.train, self.settings.tokens_per_batch, order)
            self._order = (progress.epoch, batches)
        batches = self._order[1]
        chosen = batches[progress.place % len(batches)]
        progress.place += 1
        if progress.place >= len(batches):
            progress.epoch, progress.place = progress.epoch + 1, 0
        return chosen

    def measure(self, recipe: Recipe) -> Judgement:
        """What the held-out rows say of any recipe for this target."""
        rows = self.rows.held_out[: self.settings.max_held_out_rows]
        return judge(recipe, self.target, rows, self.settings.tokens_at_once)

    def judge(self) -> None:
        """Measure; keep the weights if they are the best, else count towards the patience."""
        found, progress = self.measure(self.recipe), self.progress
        is_better = progress.best is None or found.rank > self.judgement.rank
        if is_better:
            progress.best, self.best = found, self._copied()
        progress.first = progress.first or found
        progress.num_worse = 0 if is_better else progress.num_worse + 1
        progress.judged_at = self.done
        rates = ", ".join(f"{rate:.0%}" for rate in found.acceptance[:4])
        best = "the best so far" if is_better else f"best {self.judgement.expected_tokens:.2f}"
        self.report(
            f"held out: {found.expected_tokens:.2f} tokens a round ({best}), loss "
            f"{found.loss:.3f}, accepted by position {rates}"
        )
        if progress.num_worse >= self.settings.patience:
            self._lose_patience()

    def _lose_patience(self) -> None:
        """Start the decay of the rate, or end the run where it decays already."""
        schedule, progress = self.settings.schedule, self.progress
        if schedule.is_decaying(self.done):
            progress.is_over = True
            self.report("The held-out figure no longer improves, so the training ends here.")
            return
        progress.skipped += 1.0 - schedule.decay_fraction - self.done + 1e-6
        progress.num_worse, progress.judged_at = 0, self.done
        self.report("The held-out figure no longer improves, so the rate decays from here.")

    def save(self, has_ended: bool = False) -> None:
        """Write the checkpoint. Raises StoreError; the one before is then still whole."""
        content = {
            "has_ended": has_ended,
            "about": self.about,
            "data": self.rows.digest,
            "trained": {name: weight.detach() for name, weight in self.trained.items()},
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        try:
            with replacing(self.path) as part:
                torch.save(content, part)
        except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
            raise StoreError(
                f"The checkpoint {self.path} cannot be written ({first_line(error)}). "
                "Free disk space and run the command again: it continues from the one before."
            ) from error

    def resume(self) -> bool:
        """Load the checkpoint; say whether there was one. Raises ConfigError, StoreError."""
        if not self.path.is_file():
            return False
        content = self._read_checkpoint()
        is_other = content["about"] != self.about
        is_other_data = content["data"] != self.rows.digest
        if content["has_ended"] and (is_other or is_other_data):
            return False  # that training is over, and this is a new one
        if is_other:
            raise ConfigError(
                f"{self.settings.folder} holds an unfinished training with other settings "
                f"({_differences(content['about'], self.about)}). Name another --work, or delete "
                "that folder to start again."
            )
        first = self.measure(self.recipe) if is_other_data else None
        self._put(content["trained"])
        self.best = {name: tensor.cpu() for name, tensor in content["best"].items()}
        self.optimiser.load_state_dict(content["optimiser"])
        self.progress = TrainProgress.restored(content["progress"])
        if is_other_data:
            self.report("The answers differ from before; the training continues with these.")
            self.progress.best, self.progress.first = None, first
        return True

    def _read_checkpoint(self) -> dict[str, Any]:
        try:
            content = torch.load(self.path, map_location=self.target.device, weights_only=True)
            assert content.keys() == CHECKPOINT_KEYS, "not a checkpoint of this command"
        except Exception as error:  # a damaged file can fail in any way
            raise StoreError(
                f"The checkpoint {self.path} is damaged ({first_line(error)}). Delete it to begin "
                "the training anew; the answers collected so far are kept."
            ) from error
        return dict(content)

    def _copied(self) -> dict[str, Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self.trained.items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.trained.items():
            weight.copy_(weights[name])

    def _progress_line(self, losses: Sequence[float]) -> str:
        progress = self.progress
        speed = progress.num_tokens / max(progress.trained_seconds, 1e-9)
        seconds_a_share = progress.trained_seconds / max(self.done - progress.skipped, 1e-9)
        return (
            f"step {progress.step}: loss {sum(losses) / len(losses):.3f}, {speed:.0f} tokens/s, "
            f"{clock((1.0 - self.done) * seconds_a_share)} left"
        )


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {there.get(name)} there, {here.get(name)} now"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
