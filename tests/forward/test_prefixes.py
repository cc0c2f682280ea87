"""A text that a cache has read is not read again, by another cache, after a restart or on another
branch; and what goes on from it has the bits of a text that was read afresh. Counts of rows, no
times."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.decoding import SamplingParams
from localspec.engine.engine import Engine
from localspec.formats.prefix_files import PrefixFiles
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.one_width import OneWidthDecoder
from localspec.forward.prefix_store import PrefixStore
from localspec.forward.prefixes import Prefixes
from localspec.weights.precision import Precision
from tests.kit.decoders import weights_of
from tests.kit.families import SHAPE, small
from tests.kit.hybrids import num_rows_read
from tests.kit.tiny import CPU, GREEDY, Plans, play, tiny_llama, with_cache, with_plain_cache
from tests.kit.tracing import TracingPool

CHAT = 3  # The number of a logged chat.
MEMORY = 2**28
WINDOW, ROOM = 6, 640
VOCAB_SIZE = SHAPE["vocab_size"]
TEXT = tuple((7 * place + place * place // 3 + 3) % (VOCAB_SIZE - 2) + 1 for place in range(ROOM))
# A family by how much of a text it can be given up to: rings are longer than the others' texts.
LENGTHS = {
    "llama": 90,
    "qwen3_5": 90,
    "qwen3_5_moe": 90,
    "gpt_oss": 560,
    "gemma4": 560,
    "gemma4, keys of earlier layers": 560,
}
BF16 = ("llama", "qwen3_5", "gpt_oss")
KINDS = [
    *((family, torch.float32) for family in LENGTHS),
    *((family, torch.bfloat16) for family in BF16),
]
SAMPLED = SamplingParams(0.8, seed=5)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.forward.prefixes.BLOCK", 16)
    monkeypatch.setattr("localspec.forward.prefixes.LEAST_REST", 2)
    monkeypatch.setattr("localspec.forward.cache.LEAST_SHARED", 8)


@cache
def module(family: str, dtype: torch.dtype = torch.float32) -> Any:
    if family == "llama":
        return tiny_llama(vocab_size=VOCAB_SIZE).to(dtype)
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    window = {"sliding_window": WINDOW} if LENGTHS[family] > ROOM // 2 else {}
    made = small(family, max_position_embeddings=1024, **window, **(sizes if window else {}))
    made.set_attn_implementation("eager")
    return made.to(dtype)


def decoder(
    family: str,
    prefixes: Prefixes | None = None,
    dtype: torch.dtype = torch.float32,
    make: Callable[..., Decoder] = with_cache,
) -> Decoder:
    made = make(module(family, dtype), LENGTHS[family] + 60)
    made.cache.prefixes = prefixes
    return made


def store_of(folder: Path | None = None, most_bytes: int = MEMORY) -> PrefixStore:
    return PrefixStore(most_bytes, None if folder is None else PrefixFiles(folder))


def saved(model: Decoder, owner: int | None = None) -> None:
    prefixes = model.cache.prefixes
    assert prefixes is not None
    for _ in prefixes.save(model.cache, owner):
        pass


def prefill(model: Decoder, prompt: Sequence[int]) -> int:
    """Read a prompt as a turn does; returns how many tokens of it were held."""
    engine = Engine(model, {})
    turn = engine.start(tuple(prompt), GREEDY, 4, frozenset())
    return engine.prefill(turn, threading.Event()).num_reused_tokens


def check_goes_on(model: Decoder, prompt: Sequence[int], dtype: torch.dtype, family: str) -> None:
    """The rows after a prompt have the bits that they have in a fresh cache."""
    fresh = decoder(family, dtype=dtype)
    prefill(fresh, prompt)
    for token in (prompt[-1], 3, 4):
        assert torch.equal(model.forward([token]), fresh.forward([token]))


@pytest.mark.parametrize(("family", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("is_restart", [False, True], ids=["another chat", "a restart"])
def test_a_reopened_chat_reads_what_is_new_and_says_the_same(
    family: str,
    dtype: torch.dtype,
    is_restart: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TEXT[: LENGTHS[family]]
    store = store_of(tmp_path)
    model = decoder(family, Prefixes(store, family), dtype)
    prefill(model, (*text, 5))
    saved(model, CHAT)
    if is_restart:
        model = decoder(family, Prefixes(store_of(tmp_path), family), dtype)
    else:
        prefill(model, (*TEXT[::-1][: len(text)], 5))  # another chat takes the place
    sizes = num_rows_read(monkeypatch, model)
    prompt = (*text, 5, 9, 8, 7)
    assert prefill(model, prompt) == len(text)
    assert sum(sizes) == len(prompt) - 1 - len(text)
    assert model.cache.num_from_disk == (len(text) if is_restart else 0)
    check_goes_on(model, prompt, dtype, family)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["T = 0", "T = 0.8"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss"])
def test_a_reply_after_a_restored_prefix_is_that_after_a_fresh_one(
    family: str, sampling: SamplingParams, tmp_path: Path
) -> None:
    text = TEXT[: LENGTHS[family]]
    first = decoder(family, Prefixes(store_of(tmp_path), family))
    prefill(first, (*text, 5))
    saved(first, CHAT)
    found, wanted = (
        play(Engine(decoder(family, prefixes), {}), (*text, 5, 9), Plans(("off", 0)), 24, sampling)
        for prefixes in (Prefixes(store_of(tmp_path), family), None)
    )
    assert found.tokens == wanted.tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_cache_as_on_a_card_goes_on_too(family: str) -> None:
    prefixes = Prefixes(store_of(), family)
    first, second = (decoder(family, prefixes, make=with_plain_cache) for _ in "ab")
    prefill(first, (*TEXT[:80], 5))
    saved(first)
    assert prefill(second, (*TEXT[:80], 5)) == 80
    for token in (5, 6):
        assert torch.equal(second.forward([token]), first.forward([token]))


def test_with_one_width_whole_pieces_alone_are_brought_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the bits of a row would depend on the turns before."""
    monkeypatch.setattr("localspec.forward.one_width.PREFILL_CHUNK", 32)
    prefixes = Prefixes(store_of(), "llama")
    models = [
        OneWidthDecoder(decoder("llama", prefixes, make=like_a_card), TracingPool()) for _ in "ab"
    ]
    prefill(models[0], (*TEXT[:80], 5))
    for token in TEXT[80:100]:
        models[0].forward([token])
    saved(models[0])
    assert prefill(models[1], (*TEXT[:100], 5)) == 64
    fresh = OneWidthDecoder(decoder("llama", make=like_a_card), TracingPool())
    prefill(fresh, (*TEXT[:100], 5))
    assert torch.equal(models[1].forward([5]), fresh.forward([5]))


def like_a_card(module: Any, capacity: int) -> Decoder:
    weights = weights_of(module, Precision(torch.float32, CPU), capacity)
    shape = kv_shape_of(weights, capacity)
    return Decoder(weights, KVCache(shape, torch.float32, CPU, num_spare=16))


def test_hidden_states_beside_the_cache_come_back_with_it() -> None:
    prefixes = Prefixes(store_of(), "llama")
    first, second = decoder("llama", prefixes), decoder("llama", prefixes)
    features = [model.follow((0, 1)) for model in (first, second)]
    prefill(first, (*TEXT[:60], 5))
    saved(first)
    assert prefill(second, (*TEXT[:60], 5)) == 60
    for layer in (0, 1):
        assert torch.equal(*(each.rows(layer, 0, 60) for each in features))


def test_a_cache_that_keeps_other_hidden_states_takes_none_of_it() -> None:
    prefixes = Prefixes(store_of(), "llama")
    first, second = decoder("llama", prefixes), decoder("llama", prefixes)
    second.follow((1,))
    prefill(first, (*TEXT[:60], 5))
    saved(first)
    assert prefill(second, (*TEXT[:60], 5)) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_beginning_that_chats_share_is_kept_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chat reads the shared prompt again where only a state would go on from it, and
    leaves one there for the third."""
    store = store_of()
    prefixes = Prefixes(store, family)
    model, shared = decoder(family, prefixes), TEXT[:64]
    read, sizes = list[int](), list[int]()
    for number in range(3):
        text = (*shared, *(1 + (number + place * (number + 2)) % 40 for place in range(32)))
        read.append(prefill(model, (*text, 5)))
        saved(model)
        sizes.append(store.nbytes)
    assert read == ([0, 64, 64] if family == "llama" else [0, 0, 64])
    if family == "llama":
        assert sizes[1] - sizes[0] == sizes[2] - sizes[1] < sizes[0] // 2


def test_an_old_branch_goes_on_from_where_it_left() -> None:
    """Regenerated, edited and back again, in a model with states."""
    model = decoder("qwen3_5", Prefixes(store_of(), "qwen3_5"))
    branches = [(*TEXT[:40], *([number] * 30)) for number in (2, 3)]
    for branch in branches:
        prefill(model, (*branch, 5))
        saved(model)
    for branch in branches:
        assert prefill(model, (*branch, 5, 6)) == 70


def test_what_was_not_saved_in_time_is_kept_in_memory_before_it_is_written_over() -> None:
    model = decoder("llama", Prefixes(store_of(), "llama"))
    prefill(model, (*TEXT[:60], 5))
    prefill(model, (*TEXT[::-1][:60], 5))
    assert prefill(model, (*TEXT[:60], 5)) == 60


def test_memory_keeps_to_its_budget_and_lets_go_of_the_oldest() -> None:
    store = store_of()
    texts = [tuple((number + place * 3) % 40 + 1 for place in range(60)) for number in range(3)]
    model = decoder("llama", Prefixes(store, "llama"))
    prefill(model, (*texts[0], 5))
    saved(model)
    store.most_bytes = int(2.4 * store.nbytes)
    for text in texts[1:]:
        prefill(model, (*text, 5))
        saved(model)
        assert store.nbytes <= store.most_bytes
    store.most_bytes = MEMORY
    other = decoder("llama", Prefixes(store, "llama"))
    found = [prefill(other, (*text, 5)) for text in texts]
    assert found == [16, 60, 60], "and of the oldest the end goes before the beginning"


# -- the disk ---------------------------------------------------------------------------------


def kept_on_disk(
    folder: Path, text: Sequence[int], owner: int | None, family: str = "llama"
) -> int:
    """Read and save a text; returns how many files there are then."""
    model = decoder(family, Prefixes(store_of(folder), family))
    prefill(model, (*text, 5))
    saved(model, owner)
    return len(files_in(folder))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.prefix"))


def num_restored(folder: Path, text: Sequence[int], family: str = "llama") -> int:
    """How much of a text a later start need not read."""
    return prefill(decoder(family, Prefixes(store_of(folder), family)), (*text, 5))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_text_without_a_logged_chat_is_never_written(family: str, tmp_path: Path) -> None:
    assert kept_on_disk(tmp_path / "prefixes", TEXT[:60], None, family) == 0
    assert not (tmp_path / "prefixes").exists()


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    assert kept_on_disk(folder, TEXT[:60], CHAT)
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in (*folder.rglob("*.*"),) if path.is_file()}
    assert modes == {0o600}


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    """Other weights, types or kernels, by their names in the identity; or another context."""
    kept_on_disk(tmp_path, TEXT[:60], CHAT)
    other = decoder("llama", Prefixes(store_of(tmp_path), "llama trained again"))
    assert prefill(other, (*TEXT[:60], 5)) == 0
    longer = with_cache(module("llama"), 300)
    longer.cache.prefixes = Prefixes(store_of(tmp_path), "llama")
    assert prefill(longer, (*TEXT[:60], 5)) == 0
    assert num_restored(tmp_path, TEXT[:60]) == 60


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04K\x01." * 99)


DAMAGE = (_cut, _empty, _flip, _flip_header, _foreign)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_damaged_file_is_left_out_with_one_notice(
    family: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    kept_on_disk(tmp_path, TEXT[:60], CHAT, family)
    for path in files_in(tmp_path):
        damage(path)
    store = store_of(tmp_path)
    model = decoder(family, Prefixes(store, family))
    assert prefill(model, (*TEXT[:60], 5)) == 0
    check_goes_on(model, (*TEXT[:60], 5), torch.float32, family)
    assert store.files is not None
    assert len(store.files.notices) == 1


def test_an_entry_with_the_numbers_of_another_model_is_left_out(tmp_path: Path) -> None:
    """Its checksums fit; its sizes do not."""
    kept_on_disk(tmp_path / "a", TEXT[:60], CHAT)
    kept_on_disk(tmp_path / "b", TEXT[:60], CHAT, "qwen3_5")
    rows = [path for path in files_in(tmp_path / "b") if path.name.startswith("rows")]
    for path in files_in(tmp_path / "a"):
        path.write_bytes(rows[0].read_bytes())
    assert num_restored(tmp_path / "a", TEXT[:60]) == 0


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    kept_on_disk(tmp_path, TEXT[:60], CHAT)
    PrefixFiles(tmp_path).shrink(0)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["notes.txt"]


def test_beyond_the_limit_the_oldest_go_first_and_a_chain_from_its_end(tmp_path: Path) -> None:
    texts = [tuple((number + place * 3) % 40 + 1 for place in range(60)) for number in range(3)]
    for text in texts:
        kept_on_disk(tmp_path, text, CHAT)
    assert num_restored(tmp_path, texts[0]) == 60, "which counts as used"
    total = PrefixFiles(tmp_path).num_bytes
    PrefixFiles(tmp_path).shrink(total // 2)
    found = [num_restored(tmp_path, text) for text in texts]
    assert found[0] == 60
    assert found[1] == 0
    assert found[2] in range(1, 60), "its last blocks go before its first"


def test_a_deleted_chat_leaves_what_others_use(tmp_path: Path) -> None:
    """And gets nothing new, unless it comes back."""
    shared = TEXT[:32]
    texts = {1: (*shared, *([2] * 32)), 2: (*shared, *([3] * 32))}
    for owner, text in texts.items():
        kept_on_disk(tmp_path, text, owner)
    store = store_of(tmp_path)
    assert store.files is not None
    store.files.forget(1)
    assert num_restored(tmp_path, texts[1]) == 32
    assert num_restored(tmp_path, texts[2]) == 64
    model = decoder("llama", Prefixes(store, "llama"))
    prefill(model, (*texts[1], 5))
    saved(model, 1)
    assert num_restored(tmp_path, texts[1]) == 32
    store.files.welcome(1)
    saved(model, 1)
    assert num_restored(tmp_path, texts[1]) == 64
    store.files.keep_only([2])
    assert num_restored(tmp_path, texts[1]) == 32
    store.files.forget(2)
    assert files_in(tmp_path) == []


def test_a_full_disk_is_a_notice_and_gone_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path)
    model = decoder("llama", Prefixes(store, "llama"))
    prefill(model, (*TEXT[:60], 5))
    assert store.files is not None
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", _no_space)
        saved(model, CHAT)
        assert "no space left" in store.files.notices[0]
        assert files_in(tmp_path) == []
    saved(model, CHAT)
    assert store.files.notices == ()
    assert num_restored(tmp_path, TEXT[:60]) == 60


def _no_space(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_chat_keeps_few_copies_of_states_on_the_disk(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    model = decoder("qwen3_5", Prefixes(store, "qwen3_5"))
    for length in range(20, 90, 10):
        prefill(model, (*TEXT[:length], 5))
        saved(model, CHAT)
    copies = [path for path in files_in(tmp_path) if path.name.startswith("copies")]
    assert len(copies) == 4
    assert len(files_in(tmp_path)) - len(copies) == 5, "a longer rest takes the place of a shorter"
    assert num_restored(tmp_path, TEXT[:80], "qwen3_5") == 80


@pytest.mark.parametrize("at", [1, 4])
def test_a_process_killed_while_it_writes_leaves_what_was_whole(at: int, tmp_path: Path) -> None:
    """at: which file is the last, of lists and entries in turn."""
    child = os.fork()
    if not child:
        _die_at(at)
        kept_on_disk(tmp_path, TEXT[:60], CHAT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [*tmp_path.rglob("*.part")]
    store = store_of(tmp_path)
    model = decoder("llama", Prefixes(store, "llama"))
    assert prefill(model, (*TEXT[:60], 5)) == (0 if at == 1 else 16)
    check_goes_on(model, (*TEXT[:60], 5), torch.float32, "llama")
    saved(model, CHAT)
    assert store.files is not None
    assert store.files.notices == ()
    assert num_restored(tmp_path, TEXT[:60]) == 60
    assert not [*tmp_path.rglob("*.part")]


def _die_at(number: int) -> None:
    """Kill this process before a file gets its name."""
    numbers = iter(range(1, number + 1))

    def fsync(_: int) -> None:
        if next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
