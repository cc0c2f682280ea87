"""What other programs keep here is read within limits, whatever stands in their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localspec.machine.other_programs import FILE_BYTES, MODEL_LAYER, found_models

DIGEST = f"sha256:{'a' * 64}"


def manifest(home: Path, content: bytes, model: str = "llama") -> None:
    file = home / ".ollama/models/manifests/registry.ollama.ai/library" / model / "latest"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


def layers(**changes: Any) -> bytes:
    layer = {"mediaType": MODEL_LAYER, "digest": DIGEST, "size": 9, **changes}
    return json.dumps({"layers": [layer]}).encode()


def test_a_manifest_names_a_model(tmp_path: Path) -> None:
    manifest(tmp_path, layers())
    (found,) = found_models(tmp_path)
    blob = tmp_path / ".ollama/models/blobs" / DIGEST.replace(":", "-")
    assert (found.name, found.num_bytes, found.path) == ("llama:latest", 9, blob)


@pytest.mark.parametrize(
    "content",
    [
        b" " * FILE_BYTES + layers(),
        b"[" * 10**5,
        b"\xff\xfe",
        b"[]",
        layers(size=float("inf")),
        layers(size=-1),
        layers(size="9"),
        layers(digest="sha256:../../../../etc/passwd"),
        layers(digest=["sha256"]),
    ],
)
def test_a_manifest_that_cannot_be_read_names_no_model_and_hides_no_other(
    tmp_path: Path, content: bytes
) -> None:
    manifest(tmp_path, content, "bad")
    manifest(tmp_path, layers())
    assert [found.name for found in found_models(tmp_path)] == ["llama:latest"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (".lmstudio/settings.json", b'{"downloadsFolder": "\\u0000"}'),
        (".lmstudio/settings.json", b'{"downloadsFolder": "\\ud800"}'),
        (".lmstudio/settings.json", b"[" * 10**5),
        (".lmstudio/settings.json", b" " * FILE_BYTES + b"{}"),
        (".lmstudio-home-pointer", b"\x00"),
        (".lmstudio-home-pointer", b"a" * 2 * FILE_BYTES),
    ],
)
def test_settings_of_lm_studio_that_cannot_be_used_hide_no_model(
    tmp_path: Path, file: str, content: bytes
) -> None:
    folder = tmp_path / ".lmstudio/models/someone/model"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    (tmp_path / file).write_bytes(content)
    assert [found.name for found in found_models(tmp_path)] == ["someone/model"]


def test_a_pipe_in_the_place_of_settings_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lmstudio-home-pointer")
    assert found_models(tmp_path) == ()
