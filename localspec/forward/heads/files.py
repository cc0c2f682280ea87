"""Folders of heads: what they say of their target, and their tensors, checked before use.

Contract: a head's folder holds `head.json` (kind, the target's sizes, the kind's own settings) and
`head.safetensors`. `read_head` refuses a folder that does not fit the target, in words; `take`
refuses tensors that are missing, too many, of another shape or not floating point. Nothing is
unpickled, ever.

Not here: what the tensors mean (medusa, eagle, mtp), published layouts (each kind's own).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from localspec.errors import ModelError
from localspec.files import replacing
from localspec.forward.model import LanguageModel
from localspec.forward.weights import check_safetensors, read_object

CONFIG, WEIGHTS = "head.json", "head.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TargetSizes:
    """What a head must agree with its target in."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, target: LanguageModel) -> TargetSizes:
        hidden_size = target.embed([0]).shape[1]
        return cls(hidden_size, target.vocab_size, target.cache.shape.num_layers)


@dataclass(frozen=True)
class HeadFiles:
    """A head as read: settings of its kind, tensors by name."""

    kind: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


def write_head(
    folder: Path,
    kind: str,
    sizes: TargetSizes,
    settings: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write a whole folder, the config last and each file in one go: a folder without a config
    is one that was never finished."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    with replacing(folder / WEIGHTS) as part:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part)
    content = {"kind": kind, "target": asdict(sizes), "settings": dict(settings)}
    with replacing(folder / CONFIG) as part:
        part.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def head_kind(folder: Path) -> str:
    """What kind of head a folder holds: ours by what it says of itself, a published one by its
    marks. Raises ModelError for anything else."""
    published = folder / "config.json"
    if (folder / CONFIG).is_file() or not published.is_file():
        return str(_config(folder).get("kind"))
    config = _read_object(published)
    if "medusa_num_heads" in config:
        return "medusa"
    if config.get("num_hidden_layers") == 1:  # EAGLE's one layer goes by the name of its target's
        return "eagle"
    raise ModelError(
        f"{folder.name} is no head that localspec knows: it holds neither {CONFIG} nor the config "
        "of a Medusa or an EAGLE head. Choose another folder for --heads."
    )


def read_head(folder: Path, kind: str, sizes: TargetSizes) -> HeadFiles:
    """The head in `folder`, made for a target of these sizes. Raises ModelError."""
    config = _config(folder)
    if config.get("kind") != kind:
        raise ModelError(
            f"{folder.name} holds a head of the kind {config.get('kind')!r}, not {kind!r}. "
            "Choose another folder."
        )
    made_for = config.get("target")
    if not isinstance(made_for, dict):
        raise ModelError(f"{folder.name}/{CONFIG} does not say for which target. Train it again.")
    for name, ours in asdict(sizes).items():
        if made_for.get(name) != ours:
            raise ModelError(
                f"The head in {folder.name} was made for a target with {name} "
                f"{made_for.get(name)}; this one has {ours}. Train one for this target "
                f"(python -m localspec train {kind}), or load the head's own target."
            )
    settings = config.get("settings")
    if not isinstance(settings, dict):
        raise ModelError(f"{folder.name}/{CONFIG} has no settings. Train the head again.")
    return HeadFiles(kind, settings, read_tensors(folder / WEIGHTS))


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
        said = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which is not known"
        raise ModelError(
            f"The head in {where} {said} ({len(missing)} tensors missing, {len(extra)} too many). "
            "Fetch or train it again."
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
            raise ModelError(f"The head in {where}: {name} holds values that are no numbers.")
    return {name: tensors[name].to(device, dtype) for name in shapes}


def is_fraction(value: object) -> bool:
    """Whether it is a positive number such as an epsilon or a base of rotation; a whole one may be
    beyond what a float holds."""
    return isinstance(value, int | float) and type(value) is not bool and 0 < value < 1e12


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"There is no head at {folder} ({CONFIG} is missing).")
    return _read_object(folder / CONFIG)


def _read_object(path: Path) -> dict[str, Any]:
    unreadable = f"{path} cannot be read. Check the folder's permissions."
    return read_object(path, unreadable, "Fetch or train the head again.")
