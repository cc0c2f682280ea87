"""What a drafter may be built from, and the word for "not here".

Contract: machine.load fills `Parts` once; every drafter's `build(parts)` returns the drafter or
raises ModelError with the sentence the person reads beside its greyed name.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.forward.model import LanguageModel
from localspec.forward.pool import GraphPool


@dataclass(frozen=True)
class Parts:
    """target: loaded. draft: a loaded draft of the same tokens, else None and why in
    draft_refusal. free_bytes: device memory a drafter may still take, None when unknown. pool:
    where draft chunks are captured, None where nothing is."""

    target: LanguageModel
    draft: LanguageModel | None = None
    draft_refusal: str = "no draft model was chosen for this target."
    free_bytes: int | None = None
    pool: GraphPool | None = None
