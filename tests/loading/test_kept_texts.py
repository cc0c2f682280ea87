"""A loaded model reads a text once: after a restart it goes on from the disk, with the same reply,
and so does its draft model. A model that differs reads anew."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.local import LocalBackend
from localspec.core.backend import Chunk, Message, Request
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from tests.kit.hybrids import num_rows_read
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import agreeing_draft, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]
CHAT = 7
LIMIT = 10**9
TEXT = " ".join(("hello", "abc", "hello world")[place % 3] for place in range(150))


@pytest.fixture(scope="module")
def kept_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    module.config.max_position_embeddings = 2048
    draft = agreeing_draft(module)
    draft.config.max_position_embeddings = 2048
    return save_model(root / "target", module), save_model(root / "draft", draft)


def opened(pair: tuple[Path, Path], folder: Path | None, **more: Any) -> LocalBackend:
    target, draft = map(str, pair)
    wanted = {"context": 2048, "dtype": "float32", "parallel": 1, **more}
    options = LoadOptions(model=target, draft=draft, **wanted)
    return open_local_backend(options, None, lambda phrase: None, prefix_folder=folder)


def reply(backend: LocalBackend, text: str, drafter: str = OFF, chat: int | None = CHAT) -> Chunk:
    sampling = SamplingParams(0.8, seed=3)
    request = Request((Message("user", text),), sampling, 12, drafter=drafter, kept_with=chat)
    chunks = list(backend.generate(request, threading.Event()))
    assert chunks[-1].error is None
    written = tuple(token for chunk in chunks for token in chunk.tokens)
    return Chunk("done", chunks[-1].stats, tokens=written)


def keep(backend: LocalBackend, disk_bytes: int | None = LIMIT) -> None:
    for _ in backend.keep_read(disk_bytes, threading.Event()):
        pass


def files_in(folder: Path) -> list[Path]:
    return [*folder.glob("*.prefix")]


def test_after_a_restart_target_and_draft_go_on_from_the_disk(
    kept_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(kept_pair, tmp_path)
    assert reply(first, TEXT, "draft_model").stats.reading_by["draft_model"] > 0
    keep(first)
    assert files_in(tmp_path)
    second, fresh = opened(kept_pair, tmp_path), opened(kept_pair, None)
    draft: Any = second.loaded.engine.drafters["draft_model"]
    sizes, known = num_rows_read(monkeypatch, draft.model), dict[str, int]()
    catch_up = second.loaded.controller.catch_up
    monkeypatch.setattr(catch_up, "know", lambda name, _, count: known.update({name: count}))
    more = f"{TEXT} and more"
    found, wanted = reply(second, more, "draft_model"), reply(fresh, more, "draft_model")
    assert found.tokens == wanted.tokens
    stats = found.stats
    assert stats.num_reused_tokens == stats.num_disk_tokens
    assert stats.num_prompt_tokens - stats.num_disk_tokens < 40
    assert sum(sizes) < 100, "the draft model reads what is new as well"
    assert known["draft_model"] == stats.num_disk_tokens, "and the controller knows"
    assert wanted.stats.num_reused_tokens == wanted.stats.num_disk_tokens == 0


def test_another_chat_in_between_costs_no_reading(
    kept_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    backend = opened(kept_pair, tmp_path)
    reply(backend, TEXT)
    keep(backend)
    reply(backend, TEXT[::-1], chat=CHAT + 1)
    stats = reply(backend, f"{TEXT} and more").stats
    assert stats.num_prompt_tokens - stats.num_reused_tokens < 40
    assert stats.num_disk_tokens == 0, "it is in memory still"


def test_other_kernels_or_another_context_read_anew(
    kept_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    first = opened(kept_pair, tmp_path)
    reply(first, TEXT)
    keep(first)
    for more in ({"kernels": "fastest"}, {"context": 1500}):
        assert reply(opened(kept_pair, tmp_path, **more), TEXT).stats.num_reused_tokens == 0


@pytest.mark.parametrize(("disk_bytes", "chat"), [(None, CHAT), (0, CHAT), (LIMIT, None)])
def test_nothing_is_written_where_it_may_not_be(
    disk_bytes: int | None, chat: int | None, kept_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """With texts that are not logged, with the disk switched off, and of a text of no chat."""
    backend = opened(kept_pair, tmp_path / "prefixes")
    reply(backend, TEXT, chat=chat)
    keep(backend, disk_bytes)
    assert not (tmp_path / "prefixes").exists()


def test_a_chat_that_was_deleted_while_it_was_kept_leaves_nothing(
    kept_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    backend = opened(kept_pair, tmp_path)
    reply(backend, TEXT)
    steps = backend.keep_read(LIMIT, threading.Event())
    next(steps)
    backend.forget(CHAT)
    for _ in steps:
        pass
    assert files_in(tmp_path) == []


def test_a_message_ends_the_keeping_after_the_step_under_way(
    kept_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    backend, cancel = opened(kept_pair, tmp_path), threading.Event()
    reply(backend, TEXT)
    steps = backend.keep_read(LIMIT, cancel)
    next(steps)
    cancel.set()
    num_files = len(files_in(tmp_path))
    assert list(steps) == []
    assert len(files_in(tmp_path)) == num_files == 1
