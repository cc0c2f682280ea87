"""What a source names becomes parts of drafters; what cannot be used is said, with its reason."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from localspec.core.backend import Message, Request
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.drafters import draft_vocabulary
from localspec.formats.fingerprint import fingerprint
from localspec.loading.local_backend import open_local_backend
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.random_medusa import write_random
from tests.kit.tiny import agreeing_draft, tiny_llama, with_cache

# They load models with all that drafts for them.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]


def opened(
    target: Path,
    *heads: Path,
    past: tuple[str, ...] = (),
    replies: tuple[str, ...] | None = None,
    **more: Any,
) -> Any:
    options = LoadOptions(
        model=str(target), context=128, dtype="float32", heads=tuple(map(str, heads)), **more
    )
    return open_local_backend(options, None, lambda phrase: None, past, replies=replies)


@pytest.fixture(scope="module")
def plain_backend(saved_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target without anything else, for tests that change nothing of it."""
    return opened(saved_target, home=tmp_path_factory.mktemp("home"))


def status_of(backend: Any, name: str) -> Any:
    return next(each for each in backend.describe().drafters if each.name == name)


def reason_of(backend: Any, name: str) -> str | None:
    """Why a drafter cannot be used; None if it can."""
    found = status_of(backend, name)
    return None if found.is_available else found.reason


def text_of(backend: Any, drafter: str) -> str:
    request = Request((Message("user", "hello hello"),), max_tokens=16, drafter=drafter)
    chunks = list(backend.generate(request, threading.Event()))
    assert chunks[-1].error is None
    return "".join(chunk.text for chunk in chunks)


def write_misfit(folder: Path) -> None:
    """A head for a target of another width."""
    write_random(folder, with_cache(tiny_llama(vocab_size=VOCAB_SIZE), 128))
    config = json.loads((folder / "head.json").read_text())
    config["target"]["hidden_size"] += 8
    (folder / "head.json").write_text(json.dumps(config))


def test_a_head_that_is_named_drafts_and_changes_nothing(
    saved_target: Path, tmp_path: Path
) -> None:
    write_random(tmp_path / "head", with_cache(tiny_llama(vocab_size=VOCAB_SIZE), 128))
    backend = opened(saved_target, tmp_path / "head")
    assert reason_of(backend, "medusa") is None
    assert text_of(backend, "medusa") == text_of(backend, "off")


def test_a_folder_that_is_no_head_is_named_with_its_reason(
    saved_target: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd").mkdir()
    backend = opened(saved_target, tmp_path / "odd")
    assert "no head" in (reason_of(backend, "head odd") or "")
    assert "train medusa" in (reason_of(backend, "medusa") or "")


def test_heads_that_were_named_and_cannot_be_used_are_said_and_the_chat_goes_on(
    saved_target: Path, tmp_path: Path
) -> None:
    """They were passed over without a word, and another drafted in their place."""
    write_misfit(tmp_path / "head")
    (tmp_path / "odd").mkdir()
    backend = opened(saved_target, tmp_path / "head", tmp_path / "odd")
    assert "hidden_size" in (reason_of(backend, "medusa") or "")
    notices = backend.describe().notices
    assert any("hidden_size" in notice for notice in notices)
    assert any("no head at" in notice for notice in notices)
    assert not any("EAGLE" in notice for notice in notices), "of kinds that were not named nothing"
    assert text_of(backend, "ngram") == text_of(backend, "off")


def note(head: Path, mark: str) -> None:
    (head / "made.json").write_text(json.dumps({"target": "someone's", "mark": mark}))


def test_a_head_trained_for_other_weights_of_these_sizes_is_refused_in_words(
    saved_target: Path, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    write_random(head, with_cache(tiny_llama(vocab_size=VOCAB_SIZE), 128))
    note(head, fingerprint(saved_target))
    assert reason_of(opened(saved_target, head), "medusa") is None
    note(head, "another")
    backend = opened(saved_target, head)
    reason = reason_of(backend, "head head") or ""
    assert "trained for someone's with other weights" in reason and "--model" in reason
    assert reason_of(backend, "medusa") is not None
    assert text_of(backend, "ngram") == text_of(backend, "off")


def test_a_damaged_note_beside_a_head_is_a_reason(saved_target: Path, tmp_path: Path) -> None:
    write_random(tmp_path / "head", with_cache(tiny_llama(vocab_size=VOCAB_SIZE), 128))
    (tmp_path / "head" / "made.json").write_text("{")
    assert "made.json" in (reason_of(opened(saved_target, tmp_path / "head"), "head head") or "")


def test_what_was_learnt_with_one_head_is_not_another_s(
    saved_target: Path, plain_backend: Any, tmp_path: Path
) -> None:
    head = tmp_path / "head"
    write_random(head, with_cache(tiny_llama(vocab_size=VOCAB_SIZE), 128))
    first = opened(saved_target, head).loaded.identity
    tensors = load_file(head / "head.safetensors")
    save_file({name: 2.0 * each for name, each in tensors.items()}, head / "head.safetensors")
    second = opened(saved_target, head).loaded.identity
    assert len({first, second, plain_backend.loaded.identity}) == 3


def test_what_was_learnt_with_one_draft_is_not_another_s(
    saved_target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    found = set()
    for seed in (1, 2):
        save_model(draft, tiny_llama(seed, num_layers=1, vocab_size=VOCAB_SIZE))
        found.add(opened(saved_target, draft=str(draft)).loaded.identity)
    assert len(found) == 2


def test_a_draft_with_other_tokens_drafts_across_vocabularies(
    saved_target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(saved_target, draft)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    swapped = sorted(vocabulary, key=lambda token: vocabulary[token])[5:7]
    vocabulary[swapped[0]], vocabulary[swapped[1]] = vocabulary[swapped[1]], vocabulary[swapped[0]]
    (draft / "tokenizer.json").write_text(json.dumps(content))
    backend = opened(saved_target, draft=str(draft))
    assert "cannot draft for" in (reason_of(backend, "draft_model") or "")
    assert reason_of(backend, "cross_tokenizer") is None
    assert text_of(backend, "cross_tokenizer") == text_of(backend, "off")


def test_earlier_conversations_are_looked_up(saved_target: Path, plain_backend: Any) -> None:
    said = text_of(plain_backend, "off")
    backend = opened(saved_target, past=(f"hello hello {said}",))
    assert text_of(backend, "ngram") == said


def test_a_draft_as_large_as_its_target_is_used_and_said(
    saved_target: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved_target, tmp_path / "draft")
    backend = opened(saved_target, draft=str(tmp_path / "draft"))
    assert reason_of(backend, "draft_model") is None
    assert any("smaller draft" in notice for notice in backend.describe().notices)


def test_a_drafter_that_fails_in_a_way_of_its_own_does_not_end_the_start(
    saved_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(parts: object) -> None:
        raise TypeError("a number of another kind")

    monkeypatch.setattr("localspec.drafters.lookahead.LookaheadDrafter.build", build)
    backend = opened(saved_target)
    assert "TypeError: a number of another kind" in (reason_of(backend, "lookahead") or "")
    assert text_of(backend, "ngram") == text_of(backend, "off")


def test_a_draft_that_was_named_and_cannot_be_used_is_said_at_the_start(
    saved_target: Path, tmp_path: Path
) -> None:
    """It was to be found in the list of what drafts alone."""
    draft = save_model(tmp_path / "draft", tiny_llama(vocab_size=VOCAB_SIZE))
    usable = opened(saved_target, draft=str(draft)).describe().notices
    assert not any("asked for" in notice for notice in usable)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (said,) = opened(saved_target, draft=str(draft)).describe().notices
    assert said.startswith("The draft model that was asked for is not used: model.safetensors in")


def test_a_folder_of_a_head_that_is_not_there_is_refused(
    saved_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"no folder of a head at .*nowhere"):
        opened(saved_target, tmp_path / "nowhere")


def test_draft_model_and_head_choose_among_the_tokens_of_earlier_replies(
    saved_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    draft = save_model(tmp_path / "draft", agreeing_draft(module))
    write_random(tmp_path / "head", with_cache(module, 128))
    plain = opened(saved_target, home=tmp_path)
    written = text_of(plain, "off")
    whole = opened(saved_target, tmp_path / "head", draft=str(draft), home=tmp_path, replies=())
    assert "chooses among all tokens: 264 are few" in status_of(whole, "draft_model").reason
    monkeypatch.setattr(draft_vocabulary, "SMALLEST", VOCAB_SIZE)
    for replies, words in (
        ((), "all tokens: the log holds too few replies"),
        ((written * 200,) * 20, f"of {VOCAB_SIZE} tokens"),
    ):
        backend = opened(
            saved_target, tmp_path / "head", draft=str(draft), home=tmp_path, replies=replies
        )
        for name in ("draft_model", "draft_tree", "chained", "medusa"):
            assert words in status_of(backend, name).reason
            assert text_of(backend, name) == written
        assert "tokens" not in status_of(backend, "ngram").reason
