"""What a folder of a head says of itself: whether it is one, and of which kind.

A folder in our own format holds head.json; a published one holds config.json. Nothing here reads a
weight (forward.heads.files).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.folder_files import read_object
from localspec.formats.native import ASSISTANTS
from localspec.formats.safetensors_file import tensor_shapes

CONFIG, PUBLISHED_CONFIG = "head.json", "config.json"


def is_head(folder: Path) -> bool:
    """Return True for a folder of a head, False for that of a model that writes by itself. Raises
    ModelError for a config that cannot be read."""
    if (folder / CONFIG).is_file():
        return True
    if not (folder / PUBLISHED_CONFIG).is_file():
        return False
    config = read_head_object(folder / PUBLISHED_CONFIG)
    if config.get("model_type") in ASSISTANTS or is_block_drafter(config):
        return True
    if "medusa_num_heads" in config or "speculators_model_type" in config:
        return True
    if unread_layout(config) is not None or any("Eagle" in name for name in architectures(config)):
        return True
    # Some EAGLE heads have the settings of their target alone.
    return config.get("num_hidden_layers") == 1 and _joins_states(folder)


def _joins_states(folder: Path) -> bool:
    """Return True if one of the weights joins hidden states with an embedding, as in EAGLE; False
    for files that cannot be read, of which a loader says more."""
    try:
        names = [name for file in folder.glob("*.safetensors") for name in tensor_shapes(file)]
    except ModelError:
        return False
    return any(name.split(".")[-2:] == ["fc", "weight"] for name in names)


def is_published(folder: Path) -> bool:
    """Whether a folder is not in our format."""
    return (folder / PUBLISHED_CONFIG).is_file() and not (folder / CONFIG).is_file()


def head_kind(folder: Path) -> str:
    """What kind of head a folder holds: ours by its `kind`, a published one by its config. Raises
    ModelError for anything else."""
    if not is_published(folder):
        return str(own_config(folder).get("kind"))
    config = read_head_object(folder / PUBLISHED_CONFIG)
    if config.get("model_type") in ASSISTANTS:
        return "assistant"
    if is_block_drafter(config):
        return "block"
    layout = unread_layout(config)
    if layout is not None:
        raise ModelError(
            f"{folder.name} holds a head in the layout of {layout}, which is not read yet. Choose "
            "a Medusa head, an EAGLE head in the layout of SafeAILab (one layer, `midlayer` or "
            "`layers.0`), an EAGLE-3 in that of SpecForge, AngelSlim, speculators or DeepSpec, or "
            "a DFlash or DSpark of z-lab, DeepSpec or speculators, or train one: "
            "python -m localspec train eagle."
        )
    if config.get("speculators_model_type") == "eagle3":
        return "eagle"
    if "medusa_num_heads" in config:
        return "medusa"
    if config.get("num_hidden_layers") == 1:  # EAGLE's one layer has the model type of its target
        return "eagle"
    raise ModelError(
        f"{folder.name} is no head that localspec knows: it holds neither {CONFIG} nor the config "
        "of a Medusa or an EAGLE head. Choose another folder for --heads."
    )


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the classes that a config names."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def is_block_drafter(config: Mapping[str, Any]) -> bool:
    """True for a published config of a drafter that guesses a block of tokens at once."""
    if config.get("speculators_model_type") in ("dflash", "dspark"):
        return True
    is_deepspec = any("DSpark" in name for name in architectures(config))
    return is_deepspec or "dflash_config" in config


def unread_layout(config: Mapping[str, Any]) -> str | None:
    """The name of a published layout that is known and not read."""
    kind = config.get("speculators_model_type")
    if kind != "eagle3" and (kind is not None or "speculators_version" in config):
        return f"speculators ({kind or 'of an old version'})"
    names = " ".join(architectures(config))
    if "DFlash" in names:
        return "DFlash without a dflash_config"
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers (the block drafter of Muse Glimmer)"
    return "P-EAGLE" if "PEagle" in names else None


def target_named(config: Mapping[str, Any]) -> str | None:
    """Return the name of the target that a published config was made for; None if it names none."""
    verifier: Any = config.get("speculators_config") or {}
    verifier = verifier.get("verifier") if isinstance(verifier, dict) else None
    names = (
        verifier.get("name_or_path") if isinstance(verifier, dict) else None,
        config.get("target_model_name_or_path"),
        config.get("base_model_name_or_path"),
    )
    return next((str(name) for name in names if name), None)


def own_config(folder: Path) -> dict[str, Any]:
    """Return what head.json of our own format says. Raises ModelError."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"There is no head at {folder} ({CONFIG} is missing).")
    return read_head_object(folder / CONFIG)


def read_head_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a head. Raises ModelError."""
    unreadable = f"{path} cannot be read. Check the folder's permissions."
    return read_object(path, unreadable, "Fetch or train the head again.")
