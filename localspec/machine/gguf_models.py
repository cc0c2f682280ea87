"""GGUF files as models: the file that a path names, and the folder to load it from.

Contract: `gguf_of` finds the file, `title_of` names it. `opened_gguf` writes the small files of a
model folder (config, tokenizer, chat template) from the file's settings into a folder of
localspec's own, once; the weights stay where they are, and POINTER names them, with notices of what
the file leaves unsaid and of what is not read. All that reads a model folder then reads this one.
Raises ModelError.

Not here: the settings themselves (formats), reading the weights (weights).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.core.errors import ModelError
from localspec.core.files import replacing
from localspec.core.units import enumerated
from localspec.formats.gguf_file import (
    PART,
    POINTER,
    GGUFHeader,
    is_gguf,
    parts_of,
    read_header,
)
from localspec.formats.gguf_layers import MTP_ALONE
from localspec.formats.gguf_settings import config_of, end_ids_of, tensor_names, unread_settings
from localspec.formats.gguf_tokenizer import says_no_split, tokenizer_of
from localspec.formats.noted_settings import NotedSettings

LAYOUT = "6"  # of the folders written here: another one is written anew
BLOB = "sha256-"  # how the name of a file of Ollama begins
PROJECTOR = "mmproj"  # in the name of a file with a vision tower, which is no model


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the only one in a folder that is no model folder itself,
    with or without a config.json; None where it names none. Raises ModelError where a folder holds
    several."""
    if path.is_file():
        return path if path.suffix == ".gguf" or is_gguf(path) else None
    if not path.is_dir():
        return None
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return None
    found = [each for each in sorted(path.glob("*.gguf")) if is_model_file(each)]
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ModelError(f"{path} holds {len(found)} models ({names}). Name one of the files.")
    return found[0] if found else None


def is_model_file(file: Path) -> bool:
    """Return True for a model or the first part of one: no vision tower, no module that drafts for
    a model, and no further part."""
    part = PART.match(file.stem)
    if PROJECTOR in file.name or file.name.startswith(MTP_ALONE):
        return False
    return part is None or int(part["number"]) == 1


def title_of(file: Path) -> str:
    """The name to show. Ollama names its files by a hash: of these, as the file says."""
    part = PART.match(file.stem)
    if part:
        return part["stem"]
    if not file.name.startswith(BLOB):
        return file.stem
    said = read_header(file).settings.get("general.name")
    return f"{said or 'GGUF'} ({file.name.removeprefix(BLOB)[:8]})"


def opened_gguf(file: Path, home: Path) -> Path:
    """The folder to load the model of `file` from; written where it is not there yet."""
    file = file.absolute()  # not resolved: in the hub's cache a link alone bears a part's name
    mark = hashlib.sha256(LAYOUT.encode())
    for part in parts_of(file):
        found = part.stat()
        mark.update(f"{part} {found.st_size} {found.st_mtime_ns}".encode())
    folder = home / "gguf" / f"{file.stem[:60]}-{mark.hexdigest()[:8]}"
    if not (folder / "config.json").is_file():
        _write(folder, read_header(file, with_vocabulary=True))
    return folder


def _write(folder: Path, header: GGUFHeader) -> None:
    tensor_names(header)  # raises for what could not be loaded afterwards
    header = replace(header, settings=NotedSettings(header.settings))
    config, ends = config_of(header), end_ids_of(header)
    written: dict[str, Any] = {
        "tokenizer.json": tokenizer_of(header),
        "tokenizer_config.json": _tokenizer_config(header),
        "generation_config.json": {"eos_token_id": ends},
        POINTER: {"file": str(header.file), "notices": _notices(header)},  # all keys were read
        "config.json": config,  # last: where it stands, the folder is whole
    }
    try:
        for name, content in written.items():
            with replacing(folder / name) as part:
                part.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"The settings of {header.file.name} cannot be written to {folder} ({error.strerror}). "
            "Free disk space there, or choose another folder with --home."
        ) from error


def _notices(header: GGUFHeader) -> list[str]:
    """What a person should know of a file whose settings were read."""
    name, notices = header.file.name, list[str]()
    if says_no_split(header):
        notices.append(
            f"{name} does not say how it splits text (tokenizer.ggml.pre, which files made before "
            "May 2024 lack). It is split as by GPT-2. Most models split numbers and words in "
            "another way and answer worse so. Fetch a newer file of the model."
        )
    if unread := unread_settings(header):
        notices.append(
            f"{name} holds settings that are not read here: {enumerated(unread)}. Where they "
            "matter, the model answers otherwise than in the program the file was made for."
        )
    return notices


def _tokenizer_config(header: GGUFHeader) -> dict[str, Any]:
    settings = header.settings
    words = settings["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for theirs, ours in names.items():
        place = settings.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(place, int) and 0 <= place < len(words):
            found[f"{ours}_token"] = words[place]
    template = settings.get("tokenizer.chat_template")
    return found if template is None else {**found, "chat_template": template}
