"""What a trained head or draft would gain on this machine: `train report`.

Contract: held-out acceptance comes from the result's own note, costs are measured here with the
target loaded and the drafter built (engine.calibrate, and the drafter's own `propose` at each
length). The estimate is of greedy chains: a drafter that shapes trees brings more tokens a round
than is said, and costs what is said. Where every length loses, that is the answer.

Not here: training, choosing while chatting (engine.controller measures again as it runs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from localspec.core import Drafter, DraftPlan, SamplingParams
from localspec.drafters.parts import Parts
from localspec.drafters.registry import drafter_class
from localspec.engine.acceptance import Acceptance
from localspec.engine.calibrate import REPEATS, calibrate, made_up_text
from localspec.engine.controller import Controller
from localspec.engine.costs import Costs
from localspec.engine.engine import Engine
from localspec.errors import ModelError
from localspec.forward.model import LanguageModel
from localspec.forward.weights import Bits, load_model
from localspec.training.artifact import Made, read_made

Report = Callable[[str], None]
CONTEXT = 1024  # slots of the cache while measuring
AT_CONTEXT = 128  # tokens of text behind which costs are compared
MARGIN = 1.03  # a gain below it is within what measuring can tell


@dataclass(frozen=True)
class LengthGain:
    """One draft length. tokens: expected of a round. round_ms: what it costs here."""

    num_draft_tokens: int
    tokens: float
    round_ms: float
    speedup: float


@dataclass(frozen=True)
class Gain:
    """What a result would bring here, by draft length; plain_ms: one token without it."""

    folder: str
    drafter: str
    target: str
    acceptance: tuple[float, ...]
    before: tuple[float, ...] | None
    plain_ms: float
    lengths: tuple[LengthGain, ...]
    shapes_trees: bool

    @property
    def best(self) -> LengthGain:
        return max(self.lengths, key=lambda each: each.speedup)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": asdict(self.best), "pays": self.best.speedup >= MARGIN}


@dataclass(frozen=True)
class Bench:
    """The target to measure with, and how it is loaded."""

    target: Path
    mark: str
    dtype: torch.dtype
    device: torch.device
    bits: Bits | None = None


def gains(bench: Bench, folders: Sequence[Path], report: Report) -> list[Gain]:
    """Measure every result. Raises ModelError for one of another target."""
    notes = {folder: _note(bench, folder) for folder in folders}
    target = _loaded_target(bench, report)
    return [_gain(bench, target, folder, made, report) for folder, made in notes.items()]


def gains_of_all(
    bench: Bench, folders: Sequence[Path], report: Report
) -> tuple[list[Gain], list[str]]:
    """Measure every result that can be, and say of each other why it cannot. Raises ModelError
    where none can."""
    notes, found, refusals = dict[Path, Made](), list[Gain](), list[str]()
    for folder in folders:
        try:
            notes[folder] = _note(bench, folder)
        except ModelError as error:
            refusals.append(str(error))
    target = _loaded_target(bench, report) if notes else None
    for folder, made in notes.items():
        assert target is not None, "it is loaded for what can be measured"
        try:
            found.append(_gain(bench, target, folder, made, report))
        except ModelError as error:
            refusals.append(str(error))
    if not found:
        raise ModelError("\n".join(refusals))
    return found, refusals


def _loaded_target(bench: Bench, report: Report) -> LanguageModel:
    context = min(CONTEXT, _longest(bench.target))
    report("Loading the target.")
    return load_model(bench.target, bench.dtype, bench.device, context, bench.bits).model


def _note(bench: Bench, folder: Path) -> Made:
    made = read_made(folder)
    if made.mark != bench.mark:
        raise ModelError(
            f"{folder} was trained for {made.target} with other weights than {bench.target.name} "
            "has now. Name that target with --model, or train it again."
        )
    if not made.acceptance:
        raise ModelError(f"{folder} has no held-out acceptance. Train it again.")
    return made


def _gain(bench: Bench, target: LanguageModel, folder: Path, made: Made, report: Report) -> Gain:
    name, drafter = _drafter(bench, target, folder, made.kind)
    controller = Controller({name: drafter}, Costs(), Acceptance(), Costs())
    engine = Engine(target, {name: drafter})
    for phrase in calibrate(engine, controller):
        report(phrase)
    costs = controller.costs
    context = min(AT_CONTEXT, target.cache.shape.capacity // 2)
    plain_ms = costs.plain_ms(context)
    assert plain_ms is not None, "calibrate measures plain decoding"
    lengths = list[LengthGain]()
    for length in range(1, len(made.acceptance) + 1):
        verify_ms = costs.verify_ms(length + 1, context)
        assert verify_ms is not None, "calibrate measures verification"
        round_ms = verify_ms + _draft_ms(target, drafter, length, context)
        tokens = expected_tokens(made.acceptance, length)
        lengths.append(LengthGain(length, tokens, round_ms, tokens * plain_ms / round_ms))
    return Gain(
        str(folder),
        name,
        made.target,
        made.acceptance,
        made.before,
        plain_ms,
        tuple(lengths),
        drafter.shapes_itself,
    )


def expected_tokens(acceptance: Sequence[float], length: int) -> float:
    """Of a round: the target's own token, and each draft token's chance to survive."""
    total, survives = 1.0, 1.0
    for rate in acceptance[:length]:
        survives *= rate
        total += survives
    return total


def _drafter(bench: Bench, target: LanguageModel, folder: Path, kind: str) -> tuple[str, Drafter]:
    if kind != "draft":
        built: Drafter = drafter_class(kind).build(Parts(target, heads={kind: folder}))
        return kind, built
    draft = load_model(folder, bench.dtype, bench.device, target.cache.shape.capacity).model
    built = drafter_class("draft_model").build(Parts(target, draft))
    return "draft_model", built


def _draft_ms(target: LanguageModel, drafter: Drafter, length: int, context: int) -> float:
    """Median time of a draft of this length, the drafter caught up but for the newest tokens."""
    sequence = made_up_text(context, SamplingParams())
    target.cache.rollback(0)
    target.forward(sequence.tokens[:-1], num_logits=1)
    drafter.prepare(sequence)
    plan, times = DraftPlan(drafter.name, length), list[float]()
    for _ in range(REPEATS + 1):
        started = perf_counter()
        drafter.propose(sequence, plan)
        times.append(1000.0 * (perf_counter() - started))
        target.cache.rollback(len(sequence.tokens) - 1)
    target.cache.rollback(0)
    return median(times[1:])


def _longest(folder: Path) -> int:
    from localspec.forward.weights import check_folder

    return int(check_folder(folder).get("max_position_embeddings") or CONTEXT)


def render(gain: Gain) -> str:
    """A table of lengths and a sentence."""
    lines = [
        f"{gain.drafter} in {gain.folder}, for {gain.target}",
        "accepted by position (held out): " + ", ".join(f"{r:.0%}" for r in gain.acceptance),
    ]
    if gain.before is not None:
        before = ", ".join(f"{r:.0%}" for r in gain.before)
        lines.append(f"before this training:             {before}")
    lines.append("length  tokens a round  round ms  speedup")
    lines += [
        f"{each.num_draft_tokens:6d}  {each.tokens:14.2f}  {each.round_ms:8.2f}  "
        f"{each.speedup:6.2f}x"
        for each in gain.lengths
    ]
    return "\n".join([*lines, sentence(gain)])


def sentence(gain: Gain) -> str:
    """What it comes to, losses included."""
    best = gain.best
    trees = " Its trees bring more tokens a round than this chain." if gain.shapes_trees else ""
    if best.speedup >= MARGIN:
        return (
            f"Expected here: {best.speedup:.2f} times plain decoding, with "
            f"{best.num_draft_tokens} draft tokens a round.{trees}"
        )
    needed = best.round_ms / gain.plain_ms
    return (
        f"It would not pay here: at best {best.speedup:.2f} times plain decoding. A round of "
        f"{best.num_draft_tokens} costs {needed:.2f} plain tokens and brings {best.tokens:.2f}. "
        f"Automatic choice will leave it off.{trees}"
    )
