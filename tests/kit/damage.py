"""Model folders that are damaged or stored in another way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from localspec.formats.folder_files import (
    INDEX,
    SINGLE,
)


def truncated_file(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])


def with_config(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def in_shards(folder: Path) -> None:
    """The same weights in two files with an index."""
    tensors = load_file(str(folder / SINGLE))
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({n: tensors[n] for n in held}, str(folder / file), metadata={"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()


def own_code(folder: Path) -> None:
    with_config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
