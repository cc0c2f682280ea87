"""EAGLE heads from folders: our own format, and the choice between it and a published one.

Contract: `load_head` gives a head that fits the target, sharing its embedding and, in our own
format, its output head. Raises ModelError with what does not fit and what to do.

Not here: published layouts (eagle_published), the safe reading of files (files).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec.errors import ModelError
from localspec.forward.features import LAST
from localspec.forward.heads.eagle import KIND, EagleParts, EagleShape, OwnForm, Speech
from localspec.forward.heads.eagle_published import load_published
from localspec.forward.heads.files import CONFIG, TargetSizes, is_fraction, read_head, take
from localspec.forward.heads.layer import packed_parts, plain_frequencies
from localspec.forward.model import LanguageModel

FRACTIONS = ("norm_epsilon", "rope_base")


def load_head(folder: Path, target: LanguageModel) -> EagleParts:
    """The head in `folder`, of our own format or a published one. Raises ModelError."""
    is_published = (folder / "config.json").is_file() and not (folder / CONFIG).is_file()
    return load_published(folder, target) if is_published else load_own(folder, target)


def load_own(folder: Path, target: LanguageModel) -> EagleParts:
    """Raises ModelError."""
    sizes = TargetSizes.of(target)
    files = read_head(folder, KIND, sizes)
    shape = read_shape(files.settings, folder, sizes)
    dtype = target.embed([0]).dtype
    tensors = take(files.tensors, shape.shapes(), folder.name, dtype, target.device)
    parts = packed_parts(tensors, shape.norm_epsilon)
    return EagleParts(
        layers=shape.layers,
        network=OwnForm.of(shape.layer(), parts),
        speech=Speech(target.head, target.vocab_size),
        embed=target.embed,
        frequencies=plain_frequencies(shape.head_dim, shape.rope_base, target.device),
        rope_scale=1.0,
        dtype=dtype,
        weight_bytes=sum(part.weight_bytes for part in parts.values()),
    )


def read_shape(settings: Mapping[str, Any], folder: Path, sizes: TargetSizes) -> EagleShape:
    """The settings, checked. Raises ModelError."""
    odd = sorted(settings.keys() ^ set(EagleShape.__dataclass_fields__))
    if odd:
        raise _unfit(folder, f"{odd[0]} is missing from its settings or unknown there")
    layers, numbers = settings["layers"], {k: v for k, v in settings.items() if k != "layers"}
    for name, value in numbers.items():
        if not is_fraction(value) or (name not in FRACTIONS and type(value) is not int):
            raise _unfit(folder, f"its {name} is {value!r}")
    known = (LAST, *range(sizes.num_layers))
    if not isinstance(layers, list) or not layers or any(i not in known for i in layers):
        raise _unfit(
            folder, f"it reads the layers {layers!r} of a target that has {sizes.num_layers}"
        )
    shape = EagleShape(layers=tuple(layers), **numbers)
    if shape.hidden_size != sizes.hidden_size:
        raise _unfit(
            folder, f"its rows are {shape.hidden_size} wide, the target's {sizes.hidden_size}"
        )
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise _unfit(folder, "its attention heads do not divide evenly")
    return shape


def _unfit(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"The EAGLE head in {folder.name} cannot be used: {reason}. "
        "Choose the head made for this target, or train one (python -m localspec train eagle)."
    )
