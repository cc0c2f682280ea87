"""Draft and target must share every token's id; equal sizes prove nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localspec.core.errors import DraftMismatch, ModelError
from localspec.machine.compatibility import (
    compare_folders,
    compare_token_maps,
    read_token_map,
    require_compatible,
    size_warning,
)

WORDS = {f"word{index}": index for index in range(200)}


def _write(folder: Path, tokens: dict[str, int], added: dict[str, int] | None = None) -> Path:
    folder.mkdir()
    special = [{"content": token, "id": index} for token, index in (added or {}).items()]
    content = {"model": {"type": "BPE", "vocab": tokens}, "added_tokens": special}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_equal_maps_are_compatible_in_any_order() -> None:
    found = compare_token_maps(WORDS, dict(reversed(WORDS.items())))
    assert found.is_compatible and "all 200 tokens" in found.reason


def test_one_swapped_pair_is_refused_with_its_ids_named() -> None:
    swapped = {**WORDS, "word7": 8, "word8": 7}
    assert len(swapped) == len(WORDS) and set(swapped.values()) == set(WORDS.values())
    found = compare_token_maps(WORDS, swapped)
    assert found.is_compatible is False
    assert "'word7' has id 7 in the target and 8 in the draft" in found.reason
    assert "2 of 200" in found.reason


def test_one_other_token_in_the_last_place_is_refused() -> None:
    other = {token: index for token, index in WORDS.items() if index < 199} | {"else": 199}
    found = compare_token_maps(WORDS, other)
    assert found.is_compatible is False and "'word199' (id 199" in found.reason


def test_a_longer_draft_vocabulary_is_refused() -> None:
    found = compare_token_maps(WORDS, {**WORDS, "extra": 200})
    assert found.is_compatible is False and "'extra' (id 200)" in found.reason


def test_added_tokens_count(tmp_path: Path) -> None:
    target = _write(tmp_path / "target", WORDS, {"<|end|>": 200})
    same = _write(tmp_path / "same", WORDS, {"<|end|>": 200})
    moved = _write(tmp_path / "moved", WORDS, {"<|end|>": 201})
    assert compare_folders(target, same).is_compatible
    assert "'<|end|>' has id 200" in compare_folders(target, moved).reason


def test_a_mismatch_at_load_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    target = _write(tmp_path / "target", WORDS)
    draft = _write(tmp_path / "draft", {**WORDS, "word3": 4, "word4": 3})
    require_compatible(target, target)
    with pytest.raises(DraftMismatch, match=r"'word3' has id 3.*Choose a draft"):
        require_compatible(target, draft)


def test_older_files_give_the_same_map_as_the_new_one(tmp_path: Path) -> None:
    new = _write(tmp_path / "new", WORDS, {"<|a|>": 200, "<|b|>": 201})
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(WORDS))
    (old / "added_tokens.json").write_text(json.dumps({"<|a|>": 200}))
    decoder = {"added_tokens_decoder": {"201": {"content": "<|b|>"}}}
    (old / "tokenizer_config.json").write_text(json.dumps(decoder))
    assert read_token_map(old) == read_token_map(new)


def test_a_unigram_vocabulary_is_read_by_its_places(tmp_path: Path) -> None:
    folder = tmp_path / "unigram"
    folder.mkdir()
    content = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert read_token_map(folder) == {"<unk>": 0, "a": 1}


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"vocab": 3}}', "[]"])
def test_a_damaged_tokenizer_is_a_plain_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_token_map(tmp_path)


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json", "tokenizer_config.json"])
def test_a_damaged_file_of_an_older_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(WORDS))
    (tmp_path / name).write_text("[1]")
    with pytest.raises(ModelError, match=rf"{name} is not a JSON object"):
        read_token_map(tmp_path)


def test_a_folder_without_a_tokenizer_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither tokenizer\.json nor vocab\.json"):
        read_token_map(tmp_path)


@pytest.mark.slow
def test_real_tokenizers_are_read_as_the_library_reads_them(shared_data: Path) -> None:
    from tokenizers import Tokenizer

    for name in ("smollm", "llama2", "gpt2"):
        folder = shared_data / "tokenizers" / name
        library = Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert read_token_map(folder) == library.get_vocab(with_added_tokens=True)


@pytest.mark.slow
def test_real_families_do_not_mix(shared_data: Path) -> None:
    names = ("smollm", "llama2", "qwen1.5")
    maps = [read_token_map(shared_data / "tokenizers" / name) for name in names]
    for target in maps:
        for draft in maps:
            assert compare_token_maps(target, draft).is_compatible is (target is draft)


@pytest.mark.slow
def test_one_swapped_id_in_a_real_tokenizer_is_found(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "tokenizers" / "smollm"
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[30_000:30_002]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    found = compare_folders(source, tmp_path)
    assert found.is_compatible is False and repr(first) in found.reason


def test_a_mismatch_says_what_would_do(tmp_path: Path) -> None:
    target = _write(tmp_path / "target", WORDS)
    draft = _write(tmp_path / "draft", {word: index + 1 for word, index in WORDS.items()})
    wanted = "By its text it may still, as cross_tokenizer. Choose a draft of the same family"
    with pytest.raises(DraftMismatch, match=wanted):
        require_compatible(target, draft)


def test_a_draft_as_large_as_its_target_is_a_warning() -> None:
    assert size_warning("big", 1000, "small", 999) is None
    for size in (1000, 2000):
        warning = size_warning("big", 1000, "small", size)
        assert warning is not None and "small is as large as big or larger" in warning
