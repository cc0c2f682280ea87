"""What a trained draft or head would gain on this machine: `train report`.

Contract: held-out acceptance comes from the result's note; costs are measured here with the target
loaded and the drafter built (engine.calibrate, and the drafter's own `propose` at each length). The
estimate is of greedy chains: a drafter that builds trees accepts more tokens a round than this, at
the cost stated. Where no length gains, the report says so.

Not here: training; choosing while chatting (controller.controller measures again as it runs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from localspec.core.backend import Report
from localspec.core.decoding import Drafter, DraftPlan, SamplingParams
from localspec.core.errors import ModelError
from localspec.core.speculation import expected_tokens
from localspec.core.units import took
from localspec.drafters.parts import Parts
from localspec.drafters.registry import drafter_class
from localspec.engine.calibrate import REPEATS, StandIn, made_up_text, verify_ms_of, width_turns
from localspec.engine.engine import Engine
from localspec.formats.folder_files import check_folder
from localspec.forward.fingerprint import require_trained_for
from localspec.forward.model import LanguageModel
from localspec.loading.placement import Place, load_at
from localspec.training.artifact import Artifact, read_artifact

CACHE_LENGTH = 1024  # tokens the cache holds while measuring, at most
TEXT_LENGTH = 128  # tokens of text after which costs are measured, at most
MIN_SPEEDUP = 1.03  # smaller gains are within the error of measuring


@dataclass(frozen=True)
class LengthGain:
    """One draft length. tokens: expected of a round. round_ms: what it costs here."""

    num_draft_tokens: int
    tokens: float
    round_ms: float
    speedup: float


@dataclass(frozen=True)
class ResultGain:
    """What a result would gain here, by draft length. plain_ms: one token without it."""

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
        return {**asdict(self), "best": asdict(self.best), "pays": self.best.speedup >= MIN_SPEEDUP}


def measure_gains(
    target: Path, place: Place, folders: Sequence[Path], report: Report, leaves_out: bool = False
) -> tuple[list[ResultGain], list[str]]:
    """Measure every result for the target, loaded at `place`. leaves_out: give the reason why one
    cannot be measured with the others' gains. Raises ModelError for such a result otherwise, and
    where none can be measured."""
    model, found, refusals = None, list[ResultGain](), list[str]()
    for folder in folders:
        try:
            note = _note(folder, target)
            if model is None:
                report("Loading the target.")
                longest = check_folder(target).config.get("max_position_embeddings") or CACHE_LENGTH
                short = replace(place, context_length=min(CACHE_LENGTH, int(longest)))
                model = load_at(target, short).model
            found.append(_gain(model, place, folder, note, report))
        except ModelError as error:
            if not leaves_out:
                raise
            refusals.append(str(error))
    if refusals and not found:
        raise ModelError("\n".join(refusals))
    return found, refusals


def _note(folder: Path, target: Path) -> Artifact:
    note = read_artifact(folder)
    require_trained_for(folder, target)
    if not note.acceptance:
        raise ModelError(f"{folder} has no held-out acceptance. Train it again.")
    return note


def _gain(
    model: LanguageModel, place: Place, folder: Path, note: Artifact, report: Report
) -> ResultGain:
    name, drafter = _drafter(model, place, folder, note.kind)
    report(f"measuring {name} in {folder}")
    widths, capacity = [1 + n for n in range(len(note.acceptance) + 1)], model.cache.shape.capacity
    context = min(TEXT_LENGTH, capacity // 2, capacity - 4 * len(widths))  # each leaves two tokens
    stage = Engine(model, {StandIn.name: StandIn()})
    turns = [*width_turns(stage, widths, context, SamplingParams())]
    verify_ms = verify_ms_of(widths, turns)
    model.cache.rollback(0)
    plain_ms = verify_ms[1]
    lengths = list[LengthGain]()
    for length in range(1, len(widths)):
        round_ms = verify_ms[length + 1] + _draft_ms(model, drafter, length, context)
        tokens = expected_tokens(note.acceptance, length)
        lengths.append(LengthGain(length, tokens, round_ms, tokens * plain_ms / round_ms))
    return ResultGain(
        str(folder),
        name,
        note.target,
        note.acceptance,
        note.before,
        plain_ms,
        tuple(lengths),
        drafter.shapes_itself,
    )


def _drafter(model: LanguageModel, place: Place, folder: Path, kind: str) -> tuple[str, Drafter]:
    if kind != "draft":
        head: Drafter = drafter_class(kind).build(Parts(model, heads={kind: folder}))
        return kind, head
    there = replace(place, bits=None, context_length=model.cache.shape.capacity)
    draft = load_at(folder, there).model
    return "draft_model", drafter_class("draft_model").build(Parts(model, draft))


def _draft_ms(model: LanguageModel, drafter: Drafter, length: int, context: int) -> float:
    """Median time of a draft of this length. The drafter has seen all but the newest tokens."""
    sequence = made_up_text(Engine(model, {}), context, SamplingParams())
    model.cache.rollback(0)
    model.forward(sequence.tokens[:-1], num_logits=1)
    plan, times = DraftPlan(drafter.name, length), list[float]()
    for _ in range(REPEATS + 1):
        started = perf_counter()
        drafter.propose(sequence, plan)
        times.append(1000.0 * (perf_counter() - started))
        model.cache.rollback(len(sequence.tokens) - 1)
    model.cache.rollback(0)
    return median(times[1:])


def render(gain: ResultGain) -> str:
    lines = [
        f"{gain.drafter} in {gain.folder}, for {gain.target}",
        "accepted by position (held out): " + ", ".join(f"{r:.0%}" for r in gain.acceptance),
    ]
    if gain.before is not None:
        before = ", ".join(f"{r:.0%}" for r in gain.before)
        lines.append(f"before this training:             {before}")
    lines.append("length  tokens a round      round  speedup")
    lines += [
        f"{each.num_draft_tokens:6d}  {each.tokens:14.2f}  {took(each.round_ms):>9}  "
        f"{each.speedup:6.2f}x"
        for each in gain.lengths
    ]
    best = gain.best
    if best.speedup >= MIN_SPEEDUP:
        lines.append(
            f"Expected here: {best.speedup:.2f} times the speed of plain decoding, with "
            f"{best.num_draft_tokens} draft tokens a round."
        )
    else:
        lines.append(
            f"It would not pay here: at best {best.speedup:.2f} times the speed of plain decoding. "
            f"A round of {best.num_draft_tokens} costs as much as "
            f"{best.round_ms / gain.plain_ms:.2f} tokens without drafting and yields "
            f"{best.tokens:.2f}. Automatic choice will leave it off."
        )
    if gain.shapes_trees:
        lines[-1] += " Its trees accept more tokens a round than this chain."
    return "\n".join(lines)
