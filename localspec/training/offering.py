"""Whether a result is offered, loaded unasked with its target, and what is said of it.

A result is offered unless it accepts nothing, or something that drafts already is better on the
same held-out rows or could not be measured. A result that is not offered is kept with the reason in
its note, and can be loaded by its folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.machine.trained import DRAFT
from localspec.training.judging import Judgement, Rival

if TYPE_CHECKING:
    from localspec.training.run import TrainResult

MIN_ACCEPTANCE = 0.005  # of the first draft token; below it the figure reads 0 %


def why_not_offered(
    judgement: Judgement, before: tuple[float, ...] | None, rivals: Sequence[Rival]
) -> str:
    """Return the reason as a sentence, "" where the result is offered. before: the acceptance of
    the draft it began with, None for a fresh result."""
    if (judgement.acceptance or (0.0,))[0] < MIN_ACCEPTANCE:
        return (
            "It is kept and not offered: the target accepted 0 % of its draft tokens on held-out "
            "answers, so drafting with it would only cost time. Run the same command with more "
            "--minutes or more prompts."
        )
    tokens, better = judgement.expected_tokens, _better_rival(judgement, rivals)
    if better is not None:
        return (
            f"It is kept and not offered: {_compared(better)}, this one {tokens:.2f}. So that one "
            "stays in use."
        )
    if before is not None and tokens <= Judgement(before, 0.0).expected_tokens:
        return "It got no better than the draft it began with, so that one stays in use."
    return ""


def summary(result: TrainResult) -> str:
    """Return what a person reads after a training."""
    artifact, judgement, folder = result.artifact, result.judgement, _quoted(result.folder)
    flag = "--draft" if artifact.kind == DRAFT else "--heads"
    better = _better_rival(judgement, result.rivals)
    rates = ", ".join(f"{rate:.0%}" for rate in artifact.acceptance)
    lines = [
        f"The {artifact.kind}{' head' * (artifact.kind != DRAFT)} is in {result.folder}.",
        f"Held out, accepted by position: {rates}; {judgement.expected_tokens:.2f} tokens a round.",
    ]
    if artifact.before is not None:
        before = Judgement(artifact.before, 0.0).expected_tokens
        lines.append(f"Before this training: {before:.2f} tokens a round.")
    others = [each for each in result.rivals if each is not better and each.folder != result.folder]
    lines += [f"{_compared(rival)}." for rival in others]
    if artifact.refusal:
        lines.append(f"{artifact.refusal} Load it all the same with {flag} {folder}.")
    else:
        lines.append(
            f"It is loaded with {artifact.target} from now on; delete that folder to withdraw it."
        )
    lines.append(f"`python -m localspec bench --heads {folder}` measures what it gains here.")
    return "\n".join(lines)


def _quoted(folder: Path) -> str:
    """As it can be pasted into the shells of all systems."""
    return f'"{folder}"' if " " in str(folder) else str(folder)


def _better_rival(judgement: Judgement, rivals: Sequence[Rival]) -> Rival | None:
    """The best of the rivals that stay before a result; unmeasured ones come last."""

    def tokens(rival: Rival) -> float:
        return 0.0 if rival.judgement is None else rival.judgement.expected_tokens

    return max((each for each in rivals if each.stays_before(judgement)), key=tokens, default=None)


def _compared(rival: Rival) -> str:
    if rival.judgement is None:
        return f"{rival.folder} could not be compared with it ({rival.reason.rstrip('.')})"
    tokens = rival.judgement.expected_tokens
    return f"{rival.folder} gets {tokens:.2f} tokens a round on the same held-out rows"
