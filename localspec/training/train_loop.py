"""The loop that trains any recipe: steps, judgements, checkpoints, the best weights.

Contract: `Run.train` goes on until the schedule's budget is used up or the held-out figure has
stopped improving, and leaves the best weights it met in the recipe. The checkpoint is written
beside the old one and swapped in, so that a run killed at any moment goes on from the last one,
at the same place in the data. The held-out figure is the expected tokens of a round, and where
that is equal the loss.

Not here: data (rows), what is learnt (recipe), measuring (judging), where it goes (made).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from localspec.errors import ConfigError, MemoryShortage, NumericsError
from localspec.training.checkpoint import differences, keep, kept
from localspec.training.judging import Judgement, held_out, judgement_from
from localspec.training.recipe import Recipe
from localspec.training.rows import Row, Rows, filled, make_batches
from localspec.training.schedule import Schedule
from localspec.training.target import Target

Report = Callable[[str], None]
BETAS, CLIP_NORM = (0.9, 0.95), 1.0
GENTLE = 0.25  # of the rate, for an embedding that starts from the target's
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class FrameSettings:
    """tokens_per_batch: of one update. tokens_at_once: of one forward, which bounds the memory.
    judge_share: of the budget between two judgements. patience: judgements without a better one
    until the rate goes down, and again until the run ends."""

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


@dataclass
class Progress:
    """All that a run has done, kept in the checkpoint. skipped: share of the budget left out."""

    step: int = 0
    num_tokens: int = 0
    trained_seconds: float = 0.0
    epoch: int = 0
    place: int = 0
    num_worse: int = 0
    skipped: float = 0.0
    judged_at: float = 0.0
    is_over: bool = False
    first: dict[str, Any] | None = None
    best: dict[str, Any] | None = None


class Run:
    """One training: recipe, optimiser, data, clock, and their checkpoint.

    about: what must be the same for a checkpoint to be taken up. Raises ConfigError where the
    folder holds a run of another kind."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        rows: Rows,
        settings: FrameSettings,
        about: dict[str, Any],
        report: Report,
    ) -> None:
        self.recipe, self.target, self.rows = recipe, target, rows
        self.settings, self.about, self.report = settings, about, report
        self.teacher = target.teacher()
        self.trained = trained_weights(recipe.module)
        embeddings = {id(m.weight) for m in recipe.module.modules() if isinstance(m, nn.Embedding)}
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [p], "scale": GENTLE if id(p) in embeddings else 1.0}
                for p in self.trained.values()
            ],
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )
        self.progress = Progress()
        self._order: tuple[int, list[list[Row]]] | None = None
        self.best = self._copied()
        self.path = settings.folder / "checkpoint.pt"
        settings.folder.mkdir(parents=True, exist_ok=True)

    # -- the whole ---------------------------------------------------------------------------

    def train(self) -> Judgement:
        """Train to the end; returns what held-out answers say of the best weights."""
        if self.resume():
            self.report(f"Going on from the checkpoint at step {self.progress.step}.")
        if self.progress.best is None:
            self.judge()
        said_at = saved_at = time.monotonic()
        losses = list[float]()
        while self.done < 1.0 and not self.progress.is_over:
            losses.append(self.step())
            now = time.monotonic()
            if now - said_at > REPORT_SECONDS:
                self.report(self._said(losses))
                said_at, losses = now, []
            is_due = self.done - self.progress.judged_at >= self.settings.judge_share
            if is_due:
                self.judge()
            if is_due or now - saved_at > 60 * self.settings.checkpoint_minutes:
                self.save()
                saved_at = now
        if self.progress.judged_at < self.done:
            self.judge()
        self.save(has_ended=True)
        self.put(self.best)
        return self.judgement

    @property
    def judgement(self) -> Judgement:
        """Of the best weights so far."""
        assert self.progress.best is not None, "nothing was judged yet"
        return judgement_from(self.progress.best)

    @property
    def first_judgement(self) -> Judgement:
        """Of the weights it began with."""
        assert self.progress.first is not None, "nothing was judged yet"
        return judgement_from(self.progress.first)

    @property
    def done(self) -> float:
        """How much of the budget is used, 0 to 1."""
        progress = self.progress
        used = self.settings.schedule.progress(progress.step, progress.trained_seconds)
        return min(1.0, used + progress.skipped)

    # -- one step ----------------------------------------------------------------------------

    def step(self) -> float:
        """One update; returns its loss. Raises NumericsError, MemoryShortage."""
        started = time.monotonic()
        progress = self.progress
        torch.manual_seed(self.settings.seed * 1_000_003 + progress.step)  # a resumed run repeats
        rows = self._next_rows()
        self.recipe.module.train()
        try:
            loss = self._backward(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise MemoryShortage(
                f"The memory does not hold a batch of {self.settings.tokens_at_once} tokens. Close "
                "other programs or give a smaller --batch, and run the command again: it goes on "
                "from the last checkpoint."
            ) from error
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), CLIP_NORM))
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NumericsError(
                f"The loss became no number at step {progress.step}. Run the command again with "
                "a lower --rate; it goes on from the last checkpoint."
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

    def _backward(self, rows: Sequence[Row]) -> float:
        """Gradients of the mean loss over rows, a forward's worth at a time."""
        parts = make_batches(rows, self.settings.tokens_at_once, Random(0))
        weights = [float(sum(row.weights.sum() for row in part)) for part in parts]
        total, whole = 0.0, max(sum(weights), 1e-6)
        for part, weight in zip(parts, weights, strict=True):
            lesson = self.target.lesson(filled(part), self.recipe.layers)
            loss: Tensor = self.recipe.loss(self.teacher, lesson) * (weight / whole)
            loss.backward()
            total += float(loss.detach())
        return total

    def _next_rows(self) -> list[Row]:
        progress = self.progress
        if self._order is None or self._order[0] != progress.epoch:
            # A function of the epoch alone, so that a place in it is all a checkpoint keeps.
            order = Random(f"{self.settings.seed}/{progress.epoch}")
            batches = make_batches(self.rows.learnt, self.settings.tokens_per_batch, order)
            self._order = (progress.epoch, batches)
        batches = self._order[1]
        chosen = batches[progress.place % len(batches)]
        progress.place += 1
        if progress.place >= len(batches):
            progress.epoch, progress.place = progress.epoch + 1, 0
        return chosen

    # -- judging -----------------------------------------------------------------------------

    def held_out(self) -> Judgement:
        """What the held-out rows say of the present weights."""
        return self.held_out_of(self.recipe)

    def held_out_of(self, recipe: Recipe) -> Judgement:
        """What they say of any recipe for this target."""
        recipe.module.eval()
        rows = self.rows.held_out[: self.settings.max_held_out_rows]
        return held_out(recipe, self.target, rows, self.settings.tokens_at_once)

    def judge(self) -> None:
        """Measure, keep the weights if they are the best, lose patience if they are not."""
        found, progress = self.held_out(), self.progress
        is_better = progress.best is None or found.rank > self.judgement.rank
        if is_better:
            progress.best, self.best = asdict(found), self._copied()
        if progress.first is None:
            progress.first = asdict(found)
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
        """Go over to the falling rate, or end where it falls already."""
        schedule, progress = self.settings.schedule, self.progress
        if schedule.is_decaying(self.done):
            progress.is_over = True
            self.report("It gets no better, so the training ends here.")
            return
        progress.skipped += 1.0 - schedule.decay_fraction - self.done + 1e-6
        progress.num_worse, progress.judged_at = 0, self.done
        self.report("It gets no better, so the rate goes down now.")

    # -- the checkpoint ----------------------------------------------------------------------

    def save(self, has_ended: bool = False) -> None:
        """Write the checkpoint. Raises StoreError."""
        content = {
            "has_ended": has_ended,
            "about": self.about,
            "data": self.rows.mark,
            "trained": {name: weight.detach() for name, weight in self.trained.items()},
            "best": self.best,
            "optimiser": self.optimiser.state_dict(),
            "progress": asdict(self.progress),
        }
        keep(self.path, content)

    def resume(self) -> bool:
        """Take the checkpoint up; say whether there was one. Raises ConfigError, StoreError."""
        if not self.path.is_file():
            return False
        content = kept(self.path, self.target.device)
        is_other = content["about"] != self.about
        is_other_data = content["data"] != self.rows.mark
        if content["has_ended"] and (is_other or is_other_data):
            return False  # that training is over, and this is a new one
        if is_other:
            raise ConfigError(
                f"{self.settings.folder} holds an unfinished training with other settings "
                f"({differences(content['about'], self.about)}). Name another --work, or delete "
                "that folder to begin anew."
            )
        first = asdict(self.held_out()) if is_other_data else None
        self.put(content["trained"])
        self.best = {name: tensor.cpu() for name, tensor in content["best"].items()}
        self.optimiser.load_state_dict(content["optimiser"])
        self.progress = Progress(**content["progress"])
        if is_other_data:
            self.report("There are other answers than before; the training goes on with them.")
            self.progress.best, self.progress.first = None, first
        return True

    def _copied(self) -> dict[str, Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self.trained.items()}

    @torch.no_grad()
    def put(self, weights: dict[str, Tensor]) -> None:
        """Take over these weights."""
        for name, weight in self.trained.items():
            weight.copy_(weights[name])

    def _said(self, losses: Sequence[float]) -> str:
        progress = self.progress
        speed = progress.num_tokens / max(progress.trained_seconds, 1e-9)
        left = (
            (1.0 - self.done) * progress.trained_seconds / max(self.done - progress.skipped, 1e-9)
        )
        return (
            f"step {progress.step}: loss {sum(losses) / len(losses):.3f}, {speed:.0f} tokens/s, "
            f"{left / 60:.1f} minutes left"
        )


def trained_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of a module that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
