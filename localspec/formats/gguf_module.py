"""A GGUF file that holds a module for multi-token prediction alone, beside its model's own file.

llama.cpp's converter writes such a file as mtp-NAME.gguf. It holds the last block of its model and
the settings of the whole, so that its model can be told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError
from localspec.core.prefix import common_prefix_length
from localspec.formats.gguf_file import read_header
from localspec.formats.gguf_layers import MTP_ALONE, MTP_COUNT, count_layers
from localspec.formats.noted_settings import NotedSettings


def module_near(file: Path) -> Path | None:
    """Return the file of a module beside a model's file that holds none: of several the one named
    most like the model. Raises ModelError."""
    header = read_header(file)
    if int(header.settings.get(f"{header.family}.{MTP_COUNT}") or 0):
        return None
    ours = list(file.name.lower().encode())

    def likeness(other: Path) -> int:
        return common_prefix_length(list(other.name.removeprefix(MTP_ALONE).lower().encode()), ours)

    alone = sorted(file.parent.glob(f"{MTP_ALONE}*.gguf"))
    return max(alone, key=likeness, default=None)


def require_module_of(file: Path, module: Path) -> None:
    """Raise ModelError for the module of another model than the one in `file`. A name that a file
    does not say is no reason."""
    ours, theirs = _marks(file), _marks(module)
    for mark, here in ours.items():
        there = theirs[mark]
        if here != there and (mark != "name" or (here and there)):
            raise ModelError(
                f"{module.name} was made for a model of the {mark} {there}, and {file.name} has "
                f"{here}. Fetch the module of this model, or move the file away."
            )


def _marks(file: Path) -> dict[str, Any]:
    """What a module and its model have in common. Names are written in several ways."""
    header = read_header(file)
    own = NotedSettings(header.settings, f"{header.family}.")
    name = str(header.settings.get("general.name") or "").lower()
    return {
        "name": "".join(letter for letter in name if letter.isalnum()),
        "family": header.family,
        "width": own.get("embedding_length"),
        "number of layers": count_layers(own),
    }
