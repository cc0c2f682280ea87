"""Whether what was trained is offered from now on, and what is said of it.

Contract: a result goes into the target's profile where nothing that drafts there already is better
on the same held-out rows, nor might be; else it is kept where it lies, and the sentence says both
figures and how to load it all the same.

Not here: judging (heads.rivals), the profile's file (heads.registry).
"""

from __future__ import annotations

from pathlib import Path

from localspec.config import Settings
from localspec.errors import LocalspecError
from localspec.training.judging import Judgement
from localspec.training.registry import register_draft, register_head
from localspec.training.rivals import Rival
from localspec.training.run import Trained


def register(
    settings: Settings, name: str, target: Path, trained: Trained
) -> tuple[str | None, str | None]:
    """The profile that offers the result, or why none does."""
    made, ahead = trained.made, _ahead(trained)
    if ahead is not None:
        return None, _why_not(trained, ahead)
    if made.before is not None and _tokens(made.acceptance) <= _tokens(made.before):
        return None, "It got no better than the draft it began with, so that one stays in use."
    try:
        write = register_draft if made.kind == "draft" else register_head
        return str(write(settings, name, target, trained.folder)), None
    except LocalspecError as error:
        return None, f"It is not offered by a profile yet: {error}"


def said(trained: Trained, profile: str | None, notice: str | None) -> str:
    """What a person reads at the end of a training."""
    made, ahead = trained.made, _ahead(trained)
    rates = ", ".join(f"{rate:.0%}" for rate in made.acceptance)
    lines = [
        f"The {made.kind} is in {trained.folder}.",
        f"Held out, accepted by position: {rates}; {_tokens(made.acceptance):.2f} tokens a round.",
    ]
    if made.before is not None:
        lines.append(f"Before this training: {_tokens(made.before):.2f} tokens a round.")
    lines += [_beside(rival) for rival in trained.rivals if rival is not ahead]
    if profile is not None:
        lines.append(
            f"The profile {Path(profile).stem} offers it from now on ({profile}). "
            "`python -m localspec train report` says what it gains here."
        )
    return "\n".join([*lines, *([] if notice is None else [notice])])


def _ahead(trained: Trained) -> Rival | None:
    """The best of those that stay before the result; one that could not be judged comes last."""
    found = [rival for rival in trained.rivals if rival.stays_before(trained.judgement)]
    return max(found, key=_rank, default=None)


def _rank(rival: Rival) -> float:
    return 0.0 if rival.judgement is None else rival.judgement.expected_tokens


def _why_not(trained: Trained, ahead: Rival) -> str:
    flag = "--draft" if trained.made.kind == "draft" else "--heads"
    held = (
        f"could not be judged beside it ({ahead.reason.rstrip('.')})"
        if ahead.judgement is None
        else f"gets {ahead.judgement.expected_tokens:.2f} tokens a round on the same held-out rows"
    )
    return (
        f"It is kept and not offered: {ahead.folder} {held}, this one "
        f"{trained.judgement.expected_tokens:.2f}. So that one stays as it is; load this one all "
        f"the same with {flag} {trained.folder}."
    )


def _beside(rival: Rival) -> str:
    if rival.judgement is None:
        return f"{rival.folder} could not be judged beside it: {rival.reason}"
    tokens = rival.judgement.expected_tokens
    return f"On the same held-out rows {rival.folder} gets {tokens:.2f} tokens a round."


def _tokens(acceptance: tuple[float, ...]) -> float:
    return Judgement(acceptance, 0.0).expected_tokens
