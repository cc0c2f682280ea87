"""Random heads of every kind for a tiny target; each kind's own file says what they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localspec.forward.model import LanguageModel
from tests.drafters import random_eagle, random_medusa, random_mtp

KINDS = {"medusa": random_medusa, "mtp": random_mtp, "eagle": random_eagle}


def write_heads(
    folder: Path, target: LanguageModel, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Path]:
    """A folder for each of the kinds inside `folder`, by kind."""
    heads = {kind: folder / kind for kind in kinds}
    for kind, place in heads.items():
        KINDS[kind].write_random(place, target)
    return heads
