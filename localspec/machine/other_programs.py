"""Models that other programs keep on this machine: LM Studio's folders and Ollama's.

Contract: `found_models` reads names and sizes, never weights, and raises nothing: a folder that
cannot be read holds nothing. A model is a folder with config.json and .safetensors, or a GGUF file;
whether it can be loaded is not told here.

Source: LM Studio keeps PUBLISHER/NAME/FILES below its models folder, which its settings may have
moved; Ollama keeps a manifest (JSON) for each name and tag, whose layer of the type MODEL_LAYER is
a GGUF file in blobs/.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from localspec.core.files import read_json, read_text
from localspec.machine.gguf_models import is_model_file, title_of
from localspec.machine.model import Model

MODEL_LAYER = "application/vnd.ollama.image.model"
OF_THE_SERVICE = Path("/usr/share/ollama/.ollama/models")  # where Linux runs it as a service
OLLAMA_HOST, OLLAMA_USER = "registry.ollama.ai", "library"  # left out of names
MAX_FOUND = 200
# Bytes of the largest settings or manifest that is read. Those in use have a few KiB.
FILE_BYTES = 2**20
# How Ollama names a file in blobs/. Whatever else a manifest says would lead elsewhere.
DIGEST = re.compile(r"sha256:[0-9a-f]+")


def found_models(home: Path | None = None) -> tuple[Model, ...]:
    """By program and name, without their shapes. home: of the person, None for that of this
    process."""
    home = home or Path.home()
    named = os.environ.get("OLLAMA_MODELS")
    ollama = [Path(named)] if named else [home / ".ollama" / "models", OF_THE_SERVICE]
    found = [each for place in _lm_studio_folders(home) for each in _of_lm_studio(place)]
    models = {model.id: model for model in found}
    for model in (model for place in ollama for model in _of_ollama(place)):
        known = models.get(model.id)  # several tags may name one file
        title = model.title if known is None else f"{known.title}, {model.title}"
        models[model.id] = replace(model, title=title)
    return tuple(models.values())[:MAX_FOUND]


def _model(program: str, title: str, num_bytes: int, path: Path) -> Model:
    return Model(str(path), title, path, num_bytes=num_bytes, origin=program)


def _lm_studio_folders(home: Path) -> list[Path]:
    """With models: in each folder that is or was its own, and where its settings moved them."""
    own, found = [home / ".lmstudio", home / ".cache" / "lm-studio"], list[Path]()
    with suppress(OSError, ValueError):
        own.insert(0, Path(read_text(home / ".lmstudio-home-pointer", FILE_BYTES).strip()))
    for folder in own:
        found.append(folder / "models")
        with suppress(OSError, ValueError, LookupError, TypeError):
            settings = read_json(folder / "settings.json", FILE_BYTES)
            found.append(Path(settings["downloadsFolder"]))
    return list(dict.fromkeys(found))


def _of_lm_studio(place: Path) -> Iterator[Model]:
    for folder in _children(place, depth=2):
        name = f"{folder.parent.name}/{folder.name}"
        weights = [each for each in _children(folder) if each.suffix == ".safetensors"]
        if weights and (folder / "config.json").is_file():
            yield _model("LM Studio", name, sum(map(_size, weights)), folder)
            continue
        for file in _children(folder):
            if file.suffix == ".gguf" and is_model_file(file):
                yield _model("LM Studio", f"{name}/{title_of(file)}", _size(file), file)


def _of_ollama(place: Path) -> Iterator[Model]:
    for manifest in _children(place / "manifests", depth=4):
        found = _layer(manifest)
        if found is not None:
            digest, num_bytes = found
            name = _name_in_ollama(*manifest.parts[-4:])
            blob = place / "blobs" / digest.replace(":", "-")
            yield _model("Ollama", name, num_bytes, blob)


def _name_in_ollama(host: str, user: str, model: str, tag: str) -> str:
    """As its own list shows it."""
    parts = [host] * (host != OLLAMA_HOST) + [user] * (user != OLLAMA_USER or host != OLLAMA_HOST)
    return "/".join([*parts, f"{model}:{tag}"])


def _layer(manifest: Path) -> tuple[str, int] | None:
    """Digest and size of the layer with the weights."""
    try:
        layers = read_json(manifest, FILE_BYTES)["layers"]
        found = next(one for one in layers if one["mediaType"] == MODEL_LAYER)
        digest, num_bytes = found["digest"], found["size"]
        is_one = type(num_bytes) is int and num_bytes >= 0 and DIGEST.fullmatch(digest)
        return (digest, num_bytes) if is_one else None
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def _children(folder: Path, depth: int = 1) -> list[Path]:
    try:
        found = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except (OSError, ValueError):  # ValueError: no name of a folder, as one with a NUL
        return []
    if depth == 1:
        return found
    return [below for each in found for below in _children(each, depth - 1)]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
