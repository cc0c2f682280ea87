"""The checkpoint of a training: one file, whole or not there.

Contract: `keep` writes beside the old file and swaps, so that a run killed meanwhile leaves the old
one; `kept` reads plain tensors and numbers only, never objects that could run code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from localspec.errors import StoreError
from localspec.files import replacing

KEYS = {"about", "data", "has_ended", "trained", "best", "optimiser", "progress"}


def keep(path: Path, content: dict[str, Any]) -> None:
    """Raises StoreError where it cannot be written; the old one is then still whole."""
    assert content.keys() == KEYS, "a checkpoint holds all that a run goes on from"
    try:
        with replacing(path) as part:
            torch.save(content, part)
    except (OSError, RuntimeError) as error:  # torch wraps a full disk in a RuntimeError
        raise StoreError(
            f"The checkpoint {path} cannot be written ({str(error).splitlines()[0]}). Free some "
            "space and run the command again: it goes on from the one before."
        ) from error


def kept(path: Path, device: torch.device) -> dict[str, Any]:
    """Raises StoreError for a file that is none of ours, or damaged."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        assert content.keys() == KEYS, "not a checkpoint of this command"
    except Exception as error:  # a damaged file can fail in any way
        first_line = (str(error).splitlines() or ["not whole"])[0]
        raise StoreError(
            f"The checkpoint {path} is damaged ({first_line}). Delete it to begin the training "
            "anew; the answers collected so far are kept."
        ) from error
    return dict(content)


def differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    """What two descriptions do not share, in words."""
    return ", ".join(
        f"{name} {there.get(name)} there, {here.get(name)} now"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )
