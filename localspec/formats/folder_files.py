"""The files of a model folder, checked before anything of them is loaded.

Contract: weights come from .safetensors files or one GGUF file, all of which are there and whole;
pickle is refused, and so is code that a folder brings. Each failure is a ModelError that names the
file and the remedy.

Not here: reading the weights (weights), what a header says (safetensors_file).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError
from localspec.core.files import read_json
from localspec.formats.gguf_file import POINTER, parts_of
from localspec.formats.native import KNOWN_AS
from localspec.formats.safetensors_file import check_safetensors, has_separate_head
from localspec.formats.stored import Stored, stored_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TOKENIZERS, SENTENCEPIECE = ("tokenizer.json", "vocab.json"), "tokenizer.model"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
ONNX = ("*.onnx", "onnx/*.onnx")
# What a folder without config.json is, by a file of it.
NO_MODELS = {
    "model_index.json": "is of diffusers, which makes images. Choose a model that chats.",
    "mtp-*.gguf": "holds only a module that drafts for a model (mtp-). Name the model's own file.",
    "mmproj*.gguf": "holds only what a model has for images (mmproj). Name the model's own file.",
    "params.json": (
        "is in the layout of its makers (params.json), which is not read. Choose its copy in the "
        "layout of transformers, with config.json, or as GGUF."
    ),
}
# The families' names for the most tokens that a model takes, the usual one first.
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len",
                "seq_length", "n_ctx")  # fmt: skip
CLASSIFIERS = ("ForSequenceClassification']", "ForTokenClassification']")  # end of a printed list


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that was checked. config: of config.json. stored: how its files keep the
    weights, where that is another way than they are computed in. files: with the weights."""

    path: Path
    config: dict[str, Any]
    stored: Stored | None
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        return name_of(self.path)

    @property
    def is_kept(self) -> bool:
        """Whether the model stays in the bits of its files."""
        return self.stored is not None and self.stored.stays is not None


def check_folder(folder: Path) -> ModelFolder:
    """Check what can be checked without loading. Raises ModelError."""
    if not folder.is_dir():
        raise ModelError(f"There is no model folder at {folder}. Check the path.")
    config = read_config_json(folder)
    if "auto_map" in config and config.get("model_type") not in KNOWN_AS:
        raise ModelError(
            f"{name_of(folder)} needs code of its own, which localspec never runs. Choose a model "
            "of a family that transformers knows."
        )
    architectures = str(config.get("architectures"))
    if architectures.endswith(CLASSIFIERS):
        raise ModelError(
            f"{name_of(folder)} judges texts and continues none: its config.json says "
            f"{architectures}. Choose a model that chats."
        )
    stored = stored_of(config, name_of(folder))  # raises for what is not read here
    if "quantization_config" not in config and (folder / "quant_config.json").is_file():
        raise ModelError(
            f"{name_of(folder)} is an AWQ model of the first kind: quant_config.json says how its "
            "weights are kept, and config.json does not. Choose a copy whose config.json does."
        )
    files = weight_files(folder)
    if gguf_file(folder) is None:
        for file in files:
            check_safetensors(file, is_packed=stored is not None)
        config = with_true_head(config, files)
    return ModelFolder(folder, config, stored, tuple(files))


def with_true_head(config: dict[str, Any], files: Sequence[Path]) -> dict[str, Any]:
    """Return the settings with an untied head if the .safetensors files hold a head of its own.
    Some programs train a head apart and leave the config.json of the model they began with."""
    text = config.get("text_config")
    settings = [part.get("tie_word_embeddings") for part in (config, text or {})]
    if (False in settings and True not in settings) or not has_separate_head(files):
        return config
    untied = {**config, "tie_word_embeddings": False}
    return {**untied, "text_config": {**text, "tie_word_embeddings": False}} if text else untied


def name_of(folder: Path) -> str:
    """The name to show. The hub's cache names a snapshot by a hash, in the folder of its model."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file that a folder's weights are in; None where they are in the folder."""
    if not (folder / POINTER).is_file():
        return None
    return Path(str(read_object(folder / POINTER).get("file")))


def notices_of(folder: Path) -> list[str]:
    """Return what a person should know of the GGUF file that a folder was made from."""
    if gguf_file(folder) is None:
        return []
    return [str(notice) for notice in read_object(folder / POINTER).get("notices") or ()]


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model, all present. Raises ModelError naming what is missing."""
    elsewhere = gguf_file(folder)
    if elsewhere is not None:
        return parts_of(elsewhere)
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file() and not single.is_file():
        raise ModelError(_why_no_weights(folder))
    if single.is_file():  # transformers opens it first as well
        return [single]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} names no weights. Fetch the file again.")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not os.path.isfile(folder / name)]  # of any length
    if outside:
        raise ModelError(f"{index.name} points outside its folder ({outside[0]}). Not opened.")
    if missing:
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing from {name_of(folder)}, "
            f"first {missing[0]}. Fetch them to complete the model."
        )
    return [folder / name for name in names]


def _why_no_weights(folder: Path) -> str:
    """What a folder holds instead, with the remedy."""
    name = name_of(folder)
    if pickles := sorted(path.name for kind in PICKLES for path in folder.glob(kind)):
        return (
            f"{name} has its weights as pickle ({pickles[0]}), which can run code when opened and "
            "is refused. Choose a copy of the model with .safetensors files."
        )
    if onnx := sorted(path.name for kind in ONNX for path in folder.glob(kind)):
        return (
            f"{name} has its weights as ONNX ({onnx[0]}), which is not read. Choose a copy of the "
            "model with .safetensors files, or as GGUF."
        )
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return (
            f"{name} has no {SINGLE}, nor an index of its parts, but {others[0]}, which is not "
            "read. Choose a copy of the model in the layout of transformers."
        )
    return f"{folder} holds no weights (no .safetensors file). Fetch it again."


def _require_no_adapter(folder: Path) -> None:
    """Raises ModelError for a LoRA adapter without the model that it changes."""
    path = folder / ADAPTER
    if path.is_file() and not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        base = read_object(path).get("base_model_name_or_path")
        raise ModelError(
            f"{name_of(folder)} is an adapter (LoRA) for {base}, and no model. Merge it into its "
            "model (merge_and_unload of peft, then save_pretrained), and name the merged folder."
        )


def require_tokenizer(folder: Path) -> None:
    """Raises ModelError where a folder holds no tokenizer that is read here."""
    if any((folder / name).is_file() for name in TOKENIZERS):
        return
    instead = "no tokenizer"
    if (folder / SENTENCEPIECE).is_file():
        instead = f"{SENTENCEPIECE} alone, which is not read"
    raise ModelError(
        f"{name_of(folder)} has {instead}. Fetch the tokenizer.json of the same model, which the "
        "hub has for almost every one, into its folder."
    )


def require_whole(folder: Path) -> None:
    """Raises ModelError where a folder lacks a part of a model."""
    read_config_json(folder)
    require_tokenizer(folder)
    weight_files(folder)


def template_of_processor(folder: Path) -> str | None:
    """The chat template that models for images have in a file of their own; None without one.
    Raises ModelError."""
    path = folder / "chat_template.json"
    found = read_object(path).get("chat_template") if path.is_file() else None
    return found if isinstance(found, str) else None


def read_object(
    path: Path, unreadable: str = "", remedy: str = "Fetch the file again."
) -> dict[str, Any]:
    """The JSON object in a file. unreadable: the message where it cannot be read; remedy: the end
    of the message where it holds something else. Raises ModelError."""
    try:
        found = read_json(path)
    except OSError as error:
        raise ModelError(unreadable or f"{path} cannot be read. Check the path.") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON. {remedy}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object. {remedy}")
    return found


def read_config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder, which names a family. Raises ModelError."""
    _require_no_adapter(folder)
    path = folder / "config.json"
    if not path.is_file():
        for pattern, what in NO_MODELS.items():
            if any(folder.glob(pattern)):
                raise ModelError(f"{name_of(folder)} {what}")
        raise ModelError(
            f"{folder} has no config.json, so it is not a model folder. Name the folder that holds "
            "config.json and the .safetensors files."
        )
    config = read_object(path)
    if not isinstance(config.get("model_type", ""), str):
        raise ModelError(f"The model_type in {path} is no name. Fetch the file again.")
    if not isinstance(config.get("text_config") or {}, dict):
        raise ModelError(f"The text_config in {path} is no JSON object. Fetch the file again.")
    return config


def longest_of(config: Mapping[str, Any]) -> int | None:
    """The most tokens that a config.json says the model takes, in the part that reads text; None
    where it does not say."""
    text = config.get("text_config") or {}
    return first_size(config, LENGTH_NAMES) or first_size(text, LENGTH_NAMES)


def first_size(config: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The number that a config has under the first of these names; None where it has none."""
    found = (config.get(name) for name in names)
    return next((each for each in found if isinstance(each, int) and each > 0), None)
