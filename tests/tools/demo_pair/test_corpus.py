"""What is wrong with a corpus is said by its file and line, before anything is trained."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from tools.demo_pair.corpus import CorpusError, read_rows, require_known

FINE: dict[str, Any] = {"source": "tldr", "text": "list the files"}


def packed(path: Path, *lines: str) -> Path:
    path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))
    return path


def test_a_file_that_is_not_packed_is_named_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text(json.dumps(FINE), encoding="utf-8")
    with pytest.raises(CorpusError, match=r"plain\.jsonl cannot be read .*xz FILE"):
        read_rows([file])
    with pytest.raises(CorpusError, match="cannot be read"):
        read_rows([tmp_path])


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    file = packed(tmp_path / "cut.jsonl.xz", *[json.dumps(FINE)] * 100)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CorpusError, match=r"cut\.jsonl\.xz cannot be read"):
        read_rows([file])


@pytest.mark.parametrize(
    "line",
    ["no json", "[]", '{"text": "no source"}', '{"source": "tldr"}', '{"source": 3, "text": "a"}',
     '{"source": "tldr", "text": 3}', '{"source": "tldr", "messages": [{"role": "user"}]}'],
)  # fmt: skip
def test_a_wrong_row_is_named_by_its_line(line: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="Line 2 of rows"):
        read_rows([packed(tmp_path / "rows.jsonl.xz", json.dumps(FINE), line)])


def test_a_corpus_of_unknown_sources_names_the_known_ones(tmp_path: Path) -> None:
    rows = read_rows([packed(tmp_path / "rows.jsonl.xz", json.dumps(FINE | {"source": "mine"}))])
    with pytest.raises(CorpusError, match=r"--held-out hold no row .*tldr"):
        require_known(rows, "--held-out")
    require_known({"tldr": [FINE]}, "--corpus")
