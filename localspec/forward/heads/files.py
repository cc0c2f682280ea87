"""Folders of heads: settings and tensors that somebody else wrote, checked before use.

Contract: a head's folder in our format holds `head.json` (kind, the target's sizes, the kind's own
settings) and `head.safetensors`; a published one holds `config.json` and tensors under its authors'
names. `read_head` refuses a folder that was made for another target. `HeadSettings` checks values
one by one. `take` refuses tensors that are missing, unknown, of another shape or not finite
floating point; `take_published` does so by a `TensorLayout`, which says how published tensors make
up ours. All refusals are ModelErrors. Pickle is never opened.

Not here: what the tensors mean (eagle, mtp, medusa).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from localspec.core.errors import ModelError
from localspec.core.files import replacing
from localspec.formats.folder_files import INDEX, SINGLE, weight_files
from localspec.formats.head_folder import CONFIG, PUBLISHED_CONFIG, own_config, read_head_object
from localspec.formats.safetensors_file import check_safetensors
from localspec.forward.model import LanguageModel

WEIGHTS = "head.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
TRAINED = ("eagle", "medusa", "mtp")  # Kinds of heads that localspec trains.
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_SIZE = 1 << 20  # of any count in settings; more is damage
MAX_FRACTION = 1e12

Shapes = dict[str, tuple[int, ...]]
# Our tensor -> the published tensors that are stacked to make it, in this order, with their shapes.
TensorLayout = dict[str, Shapes]


@dataclass(frozen=True)
class TargetSizes:
    """What a head must agree with its target in."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: LanguageModel) -> TargetSizes:
        hidden_size = target.embed([0]).shape[1]
        return cls(hidden_size, target.vocab_size, target.num_layers)


@dataclass(frozen=True)
class HeadSettings:
    """Settings of a head of this kind in `folder`; every method raises ModelError."""

    values: Mapping[str, Any]
    kind: str
    folder: Path

    def whole(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """A whole number from 1 to `most`."""
        found = self.values.get(name)
        found = default if found is None else found
        if type(found) is not int or not 1 <= found <= most:
            raise self.unfit(f"its {name} is {found!r}, but must be a number from 1 to {most}")
        return found

    def fraction(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found: Any = self.values.get(name)
        found = default if found is None else found
        if type(found) not in (int, float) or not 0 < found < MAX_FRACTION:
            raise self.unfit(f"its {name} is {found!r}, but must be a positive number")
        return float(found)

    def require(self, name: str, wanted: object) -> None:
        """The value, where there is one, must be `wanted`."""
        found = self.values.get(name, wanted)
        if found != wanted:
            raise self.unfit(f"its {name} is {found!r}, and only {wanted!r} is known here")

    def unfit(self, reason: str) -> ModelError:
        remedy = "Choose the head made for this target"
        if self.kind in TRAINED:
            remedy += f", or train one (python -m localspec train {self.kind})"
        return ModelError(
            f"The {self.kind} head in {self.folder.name} cannot be used: {reason}. {remedy}."
        )


@dataclass(frozen=True)
class HeadFiles:
    """A head of our own format as read, its settings yet unchecked."""

    settings: HeadSettings
    tensors: Mapping[str, torch.Tensor]


def write_head(
    folder: Path,
    kind: str,
    sizes: TargetSizes,
    settings: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write a whole folder, the config last and each file in one go: a folder without a config
    was never finished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as part:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part)
    content = {"kind": kind, "target": asdict(sizes), "settings": dict(settings)}
    with replacing(folder / CONFIG) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_head(folder: Path, kind: str, sizes: TargetSizes) -> HeadFiles:
    """The head in `folder`, made for a target of these sizes. Raises ModelError."""
    config = own_config(folder)
    if config.get("kind") != kind:
        raise ModelError(
            f"{folder.name} holds a head of the kind {config.get('kind')!r}, not {kind!r}. "
            "Choose another folder."
        )
    made_for, settings = config.get("target"), config.get("settings")
    if not isinstance(made_for, dict) or not isinstance(settings, dict):
        raise ModelError(
            f"{folder.name}/{CONFIG} lacks the sizes of its target or its settings. Train the head "
            "again."
        )
    for name, ours in asdict(sizes).items():
        if made_for.get(name) != ours:
            raise ModelError(
                f"The head in {folder.name} was made for a target with {name} "
                f"{made_for.get(name)}; this one has {ours}. Train one for this target "
                f"(python -m localspec train {kind}), or load the head's own target."
            )
    return HeadFiles(HeadSettings(settings, kind, folder), read_tensors(folder / WEIGHTS))


def published_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the one file or, with an index, of all parts. Raises ModelError."""
    files = weight_files(folder) if (folder / INDEX).is_file() else [folder / SINGLE]
    return {name: each for file in files for name, each in read_tensors(file).items()}


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, on the processor. Raises ModelError."""
    if not file.is_file():
        pickles = [path for kind in PICKLES for path in file.parent.glob(kind)]
        if pickles:
            raise ModelError(
                f"{file.parent.name} has its weights as pickle ({pickles[0].name}), which can run "
                "code when opened and is refused. Convert it on a machine you do not mind, in "
                f'its folder: python -c "import torch, safetensors.torch as s; '
                f"s.save_file(torch.load('{pickles[0].name}', map_location='cpu', "
                f"weights_only=True), '{file.name}')\""
            )
        raise ModelError(f"{file.parent} has no {file.name}. Fetch or train the head again.")
    check_safetensors(file)
    found: dict[str, torch.Tensor] = load_file(file)
    return found


def take(
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Exactly the tensors of these shapes, in `dtype` on `device`. Raises ModelError."""
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        if missing:
            said, remedy = f"lacks {missing[0]}", "Fetch or train it again."
        else:
            said, remedy = f"holds {extra[0]}, which no head here has", "Choose or train another."
        raise ModelError(
            f"The head in {where} {said} ({len(missing)} tensors missing, {len(extra)} too many). "
            f"{remedy}"
        )
    for name, shape in shapes.items():
        found = tensors[name]
        if tuple(found.shape) != shape or found.dtype not in FLOATS:
            kind = str(found.dtype).removeprefix("torch.")
            raise ModelError(
                f"The head in {where}: {name} is {kind} {list(found.shape)}, but must be floating "
                f"point {list(shape)}. It is another target's, or damaged."
            )
        if not bool(found.isfinite().all()):
            raise ModelError(f"The head in {where}: {name} holds values that are not finite.")
    return {name: tensors[name].to(device, dtype) for name in shapes}


def take_published(
    tensors: Mapping[str, torch.Tensor],
    layout: TensorLayout,
    where: str,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Our tensors from exactly those that the layout names. Raises ModelError."""
    shapes = {name: shape for parts in layout.values() for name, shape in parts.items()}
    held = take(tensors, shapes, where, dtype, device)
    return {
        ours: held[next(iter(parts))] if len(parts) == 1 else torch.cat([held[n] for n in parts])
        for ours, parts in layout.items()
    }


def read_published(folder: Path, kind: str) -> HeadSettings:
    """The config of a published head. Raises ModelError."""
    return HeadSettings(read_head_object(folder / PUBLISHED_CONFIG), kind, folder)
