"""A damaged .safetensors file is told by its header, before any tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.errors import ModelError
from localspec.formats.safetensors_file import check_safetensors
from tests.kit.damage import truncated_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    save_file({f"{name}.weight": torch.ones(4, 6) for name in "abc"}, made, {"format": "pt"})
    return made


def with_header(file: Path, header: bytes, length: int | None = None) -> None:
    raw = file.read_bytes()
    body = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)


def header_of(file: Path) -> bytes:
    raw = file.read_bytes()
    return raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]


def empty(file: Path) -> None:
    file.write_bytes(b"")


def huge_header(file: Path) -> None:
    with_header(file, b"{}", length=2**62)


def header_beyond_the_file(file: Path) -> None:
    """A promise of 90 MiB is held against the file's size before anything is read."""
    with_header(file, b"{}", length=90 * 1024**2)


def header_of_no_json(file: Path) -> None:
    with_header(file, b"\xff\xfe not json")


def header_without_offsets(file: Path) -> None:
    with_header(file, b'{"a": {"dtype": "F32"}}')


def header_of_a_list(file: Path) -> None:
    with_header(file, b"[1, 2, 3]")


def header_nested_for_ever(file: Path) -> None:
    with_header(file, b"[" * 200_000)


def header_with_endless_offsets(file: Path) -> None:
    with_header(file, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}')


def unknown_dtype(file: Path) -> None:
    """A head's file met it as a traceback that ended the start."""
    with_header(file, header_of(file).replace(b'"F32"', b'"Q32"'))


def shape_that_does_not_fill_its_bytes(file: Path) -> None:
    entries = json.loads(header_of(file))
    entries["a.weight"]["shape"] = [1]
    with_header(file, json.dumps(entries).encode())


def whole_numbers(file: Path) -> None:
    """As many bytes, named as a type that no weights have."""
    entries = json.loads(header_of(file))
    for name, entry in entries.items():
        if name != "__metadata__":
            entry["dtype"], entry["shape"] = "I16", [*entry["shape"][:-1], 2 * entry["shape"][-1]]
    with_header(file, json.dumps(entries).encode())


def eight_bits(file: Path) -> None:
    save_file({"a.weight": torch.ones(4, 6, dtype=torch.int8)}, file)


def pointer(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456\n")


FAULTS: tuple[tuple[Callable[[Path], None], str], ...] = (
    (truncated_file, "header does not fit"),
    (empty, "header does not fit"),
    (huge_header, "header does not fit"),
    (header_beyond_the_file, "header does not fit"),
    (header_of_no_json, "header does not fit"),
    (header_without_offsets, "header does not fit"),
    (header_of_a_list, "header does not fit"),
    (header_nested_for_ever, "header does not fit"),
    (header_with_endless_offsets, "header does not fit"),
    (unknown_dtype, "header does not fit"),
    (shape_that_does_not_fill_its_bytes, "header does not fit"),
    (whole_numbers, "holds whole numbers"),
    (pointer, "pointer of Git LFS"),
    (eight_bits, "holds whole numbers"),
)


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_damage_is_a_model_error_that_names_the_file(
    fault: Callable[[Path], None], said: str, file: Path
) -> None:
    check_safetensors(file, is_packed=False)
    fault(file)
    with pytest.raises(ModelError, match=rf"model\.safetensors in .* is damaged: .*{said}"):
        check_safetensors(file, is_packed=False)


def test_quantised_weights_may_be_kept_in_8_bits(file: Path) -> None:
    whole_numbers(file)
    with pytest.raises(ModelError, match="holds whole numbers"):
        check_safetensors(file, is_packed=True)
    eight_bits(file)
    check_safetensors(file, is_packed=True)
