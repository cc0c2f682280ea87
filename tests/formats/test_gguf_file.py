"""A GGUF file's header is read as the gguf package wrote it, and a damaged one is named."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter

from localspec.core.errors import ModelError
from localspec.formats.gguf_file import is_gguf, read_header
from tests.kit.gguf_files import vocabulary_of, write_gguf
from tests.kit.tiny import tiny_llama

VOCABULARY = vocabulary_of(
    {"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}, "added_tokens": []}, "gpt-2"
)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0", describe=VOCABULARY)
    return tmp_path / "tiny.gguf"


def test_settings_and_tensors_are_those_of_the_packages_own_reader(gguf_file: Path) -> None:
    header, reader = read_header(gguf_file, with_vocabulary=True), GGUFReader(gguf_file)
    own = {key: field.contents() for key, field in reader.fields.items() if "GGUF." not in key}
    assert header.settings == own
    assert [(t.name, t.kind, t.start, t.num_bytes) for t in header.tensors] == [
        (t.name, t.tensor_type.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]
    assert [t.shape for t in header.tensors] == [tuple(t.shape[::-1]) for t in reader.tensors]


def test_lists_of_words_are_only_counted_unless_asked_for(gguf_file: Path) -> None:
    assert read_header(gguf_file).settings["tokenizer.ggml.tokens"] == 3
    assert read_header(gguf_file, with_vocabulary=True).settings["tokenizer.ggml.merges"] == ["a b"]


def test_the_kinds_are_named_by_the_weights_they_hold(gguf_file: Path) -> None:
    assert list(read_header(gguf_file).kinds) == ["Q8_0"]


def test_a_file_that_changed_is_read_again(gguf_file: Path) -> None:
    first = read_header(gguf_file)
    write_gguf(gguf_file, tiny_llama(num_layers=1), describe=VOCABULARY)
    assert len(read_header(gguf_file).tensors) < len(first.tensors)


def test_a_file_is_known_by_its_first_bytes(gguf_file: Path, tmp_path: Path) -> None:
    blob = gguf_file.rename(tmp_path / "sha256-0123")
    assert is_gguf(blob)
    (tmp_path / "other").write_bytes(b"PK\x03\x04")
    assert not is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "is damaged: it has 0 bytes"),
        (b"GGUF" + b"\xff" * 40, "is GGUF of version 4294967295"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\xff" * 40, "header cannot be read"),
        (b"nothing of the kind, but long enough", "is no GGUF file"),
    ],
)
def test_a_damaged_header_is_named(raw: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match=fault):
        read_header(tmp_path / "bad.gguf")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


LIST_OF_NUMBERS, LIST_OF_WORDS = struct.pack("<II", 9, 0), struct.pack("<II", 9, 8)
NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
NO_ALIGNMENT = string("general.alignment") + struct.pack("<II", 4, 0)
NEGATIVE = string("general.alignment") + struct.pack("<Ii", 5, -32)


@pytest.mark.parametrize(
    ("num_tensors", "num_settings", "rest"),
    [
        (0, 2**40, b""),
        (2**40, 0, b""),
        (0, 1, string("a") + LIST_OF_NUMBERS + struct.pack("<Q", 2**25)),
        (0, 1, string("a") + LIST_OF_WORDS + struct.pack("<Q", 2**25)),
        (0, 1, struct.pack("<Q", 2**25)),
        (0, 1, string("a") + NESTED),
        (1, 0, string("a") + struct.pack("<I", 2**20)),
        (0, 1, NO_ALIGNMENT),
        (0, 1, NEGATIVE),
    ],
    ids=[
        "settings",
        "tensors",
        "numbers",
        "words",
        "letters",
        "lists in lists",
        "axes",
        "alignment",
        "negative alignment",
    ],
)
def test_counts_that_no_file_has_are_damage(
    num_tensors: int, num_settings: int, rest: bytes, tmp_path: Path
) -> None:
    """The file is as long as they say, so that nothing else refuses them."""
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_settings) + rest)
    with file.open("r+b") as stream:
        stream.truncate(2**28)
    with pytest.raises(ModelError, match="header cannot be read"):
        read_header(file, with_vocabulary=True)


def tensor(name: str, axes: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


FP32, Q8_0 = 0, 8


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ([tensor("a", (8,), FP32, 0), tensor("b", (8,), FP32, 16)], "a and b share bytes"),
        ([tensor("a", (8,), FP32, 0), tensor("a", (8,), FP32, 32)], "it holds a twice"),
        ([tensor("a", (40, 2), Q8_0, 0)], r"a holds \[2, 40\] weights in blocks of 32"),
        ([tensor("a", (0, 2**40), FP32, 0)], r"a holds \[1099511627776, 0\] weights"),
        ([tensor("a", (), FP32, 0)], "a holds .. weights"),
    ],
    ids=["overlap", "name", "block", "nothing", "no axes"],
)
def test_tensors_that_no_file_has_are_damage(
    table: list[bytes], fault: str, tmp_path: Path
) -> None:
    """Each lies within the file: read as they are, weights would be those of another tensor."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(table), 0)
    (tmp_path / "bad.gguf").write_bytes(head + b"".join(table) + bytes(4096))
    with pytest.raises(ModelError, match=fault):
        read_header(tmp_path / "bad.gguf")


def test_a_file_cut_short_is_damaged(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="fewer than its header promises"):
        read_header(gguf_file)


def test_the_parts_of_a_model_are_read_as_one(gguf_file: Path, tmp_path: Path) -> None:
    one = gguf_file.rename(tmp_path / "big-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"1 of the 2 parts of big are missing.*00002-of-00002"):
        read_header(one)
    write_gguf(tmp_path / "big-00002-of-00002.gguf", tiny_llama(num_layers=1))
    header = read_header(one)
    assert {tensor.file.name for tensor in header.tensors} == {
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
    }


def test_a_part_by_another_name_is_told(tmp_path: Path) -> None:
    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_uint16("split.count", 3)

    write_gguf(tmp_path / "mine.gguf", tiny_llama(), describe=describe)
    with pytest.raises(ModelError, match=r"mine.gguf is one of 3 parts .*-00001-of-00003 and so"):
        read_header(tmp_path / "mine.gguf")
