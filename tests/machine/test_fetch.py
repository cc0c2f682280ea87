"""Fetching a model from a hub that drops, stalls, lies about lengths and sends wrong bytes."""

from __future__ import annotations

import errno
import gzip
import json
import shutil
import threading
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localspec.core import http_limits
from localspec.core.options import LoadOptions
from localspec.machine import fetch as fetching
from localspec.machine import hub_files
from localspec.machine.download_faults import DownloadError, DownloadFault, fault_of
from localspec.machine.fetch import fetch
from localspec.machine.hub_files import Survey, survey
from localspec.machine.sources import cached_models, resolve
from tests.kit.hub_stub import COMMIT, HubStub, Refusal, client_of, serve_hub
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tally import Tally
from tests.kit.tiny import tiny_llama
from tests.kit.waiting import WAIT_S

TARGET = "someone/target"
UNWANTED = (
    "pytorch_model.bin", "modeling_target.py", "README.md", "consolidated.safetensors",
    "onnx/model.safetensors", "original/config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = tiny_llama(num_layers=1, vocab_size=VOCAB_SIZE)
    folder = save_model(tmp_path_factory.mktemp("hub") / TARGET, module)
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("never asked for")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[HubStub]:
    with serve_hub({TARGET: folder}) as stub:
        yield stub


@pytest.fixture
def cache(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with client_of(hub.endpoint, tmp_path / "cache", is_offline=False):
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        real = vars(_http)["time"]
        quick = SimpleNamespace(sleep=lambda seconds: None, time=real.time)
        monkeypatch.setattr(_http, "time", quick)
        yield tmp_path / "cache"


def fetched(reports: list[tuple[str, int, str]] | None = None) -> Path:
    kept: list[Survey] = []
    said = reports if reports is not None else []
    return fetch(TARGET, kept.append, lambda *report: said.append(report))


def fault() -> DownloadFault:
    """Why it did not go; the sentence is one that can be shown."""
    with pytest.raises(Exception) as caught:
        fetched()
    found = fault_of(caught.value, TARGET)
    for text in (found.text, found.remedy):
        assert text.endswith(".") and "\n" not in text and len(text) < 300, text
    return found


def weights(cache: Path) -> list[Path]:
    return list(cache.rglob("model.safetensors"))


def test_what_is_fetched_is_what_the_hub_holds_and_nothing_else(
    hub: HubStub, cache: Path, folder: Path
) -> None:
    reports: list[tuple[str, int, str]] = []
    place = fetched(reports)
    for file in place.iterdir():
        assert file.read_bytes() == (folder / file.name).read_bytes()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in place.iterdir()
    }
    assert not any(hub.asked_for(name) for name in UNWANTED)
    assert place.name == COMMIT
    arriving = [num for name, num, phase in reports if (name, phase) == (WEIGHTS, "fetching")]
    assert arriving == sorted(arriving) and len(arriving) > 3
    assert arriving[-1] == (folder / WEIGHTS).stat().st_size
    assert {phase for _, _, phase in reports} == {"fetching", "checking", "done"}
    assert not list(cache.rglob("*.incomplete"))


WEIGHTS = "model.safetensors"


@pytest.mark.slow
def test_a_connection_lost_at_any_request_costs_no_file(
    hub: HubStub, tmp_path: Path, folder: Path, tally: Tally
) -> None:
    with client_of(hub.endpoint, tmp_path / "counted", is_offline=False):
        fetched()
    requests = range(1, len(hub.requests) + 1)
    tally.figures.append(f"{len(requests)} requests")
    for at in tally.some(requests, quick=3):
        cache = tmp_path / str(at)
        with tally.case(f"request {at}"), client_of(hub.endpoint, cache, is_offline=False):
            hub.requests.clear()
            hub.fails_at = at
            try:
                fetched()
            except Exception as error:
                found = fault_of(error, TARGET)
                assert found.text.endswith(".") and found.remedy.endswith("."), found
            hub.fails_at = None
            place = fetched()
            for file in place.iterdir():
                assert file.read_bytes() == (folder / file.name).read_bytes()
            assert not list(cache.rglob("*.incomplete"))


def test_a_fetched_model_is_found_offline_and_listed(hub: HubStub, cache: Path) -> None:
    from huggingface_hub import constants

    place = fetched()
    hub.requests.clear()
    constants.HF_HUB_OFFLINE = True
    assert resolve(LoadOptions(model=TARGET, fetches=False)).target == place
    assert hub.requests == []
    (listed,) = cached_models()
    assert (listed.id, listed.folder) == (TARGET, place) and listed.num_bytes > 0


def test_the_dry_run_fetches_and_writes_nothing(hub: HubStub, cache: Path, folder: Path) -> None:
    found = survey(TARGET)
    wanted = [f for f in folder.iterdir() if f.is_file() and f.name not in UNWANTED]
    assert found.num_bytes == sum(file.stat().st_size for file in wanted)
    assert found.commit == COMMIT and not hub.asked_for("resolve")
    assert sum(found.held_bytes().values()) == 0 and not weights(cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "reset", "stalled", "short", "long"])
def test_a_fault_that_passes_is_gone_on_from_by_range(
    hub: HubStub, cache: Path, folder: Path, kind: Any
) -> None:
    hub.fault, hub.num_faults = kind, 1
    place = fetched()
    assert (place / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    if kind != "long":  # there everything had come before the connection ended
        size = (folder / WEIGHTS).stat().st_size
        start = int(hub.ranges[-1].removeprefix("bytes=").removesuffix("-"))
        # A reset also takes what had arrived and was not read yet.
        assert (0 if kind == "reset" else 0.5 * size) < start <= 0.6 * size, hub.ranges


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("closed", "dropped"),
        ("reset", "dropped"),
        ("stalled", "stalled"),
        ("short", "wrong_size"),
        ("wrong", "wrong_bytes"),
        ("page", "captive_portal"),
        ("portal", "captive_portal"),
    ],
)
def test_a_fault_that_stays_ends_in_a_sentence_and_the_next_attempt_completes_it(
    hub: HubStub, cache: Path, folder: Path, kind: Any, code: str
) -> None:
    hub.fault = kind
    assert fault().code == code
    assert not weights(cache), "nothing unverified has a name in the cache"
    assert cached_models() == []
    num_requests = len(hub.requests)
    assert num_requests < 80, "a fault is retried a bounded number of times"
    parts = list(cache.rglob("*.incomplete"))
    assert bool(parts) is (kind in ("closed", "reset", "stalled", "short"))
    hub.fault = None
    hub.ranges.clear()
    assert (fetched() / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert bool(hub.ranges) is bool(parts), "what had arrived was not fetched again"


def test_an_empty_file_belongs_to_its_model(folder: Path, tmp_path: Path) -> None:
    """It has no part to go on with, and none was made: its model could not be fetched."""
    shutil.copytree(folder, tmp_path / "hub")
    (tmp_path / "hub" / "merges.txt").touch()
    with (
        serve_hub({TARGET: tmp_path / "hub"}) as stub,
        client_of(stub.endpoint, tmp_path / "cache", is_offline=False),
    ):
        assert (fetched() / "merges.txt").read_bytes() == b""


def test_a_part_with_wrong_bytes_is_found_out_and_fetched_anew(
    hub: HubStub, cache: Path, folder: Path
) -> None:
    found = survey(TARGET)
    file = next(each for each in found.files if each.name == WEIGHTS)
    part = found.part(file)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (file.num_bytes // 2))
    assert (fetched() / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_a_part_longer_than_the_file_is_dropped(hub: HubStub, cache: Path, folder: Path) -> None:
    found = survey(TARGET)
    file = next(each for each in found.files if each.name == WEIGHTS)
    part = found.part(file)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (file.num_bytes + 9))
    assert (fetched() / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("refusal", "has_token", "code", "words"),
    [
        (Refusal(401, "GatedRepo"), False, "gated", ("terms", "log in", "page")),
        (Refusal(403, "GatedRepo", only_files=True), True, "gated", ("agreed yet", "page")),
        (Refusal(404, "RepoNotFound"), False, "unknown_model", ("spelling", "HF_TOKEN")),
        (Refusal(401, "RepoNotFound"), False, "unknown_model", ("spelling",)),
        (Refusal(401, "Other"), True, "unauthorised", ("token", "401")),
        (Refusal(403, "Other", only_files=True), True, "forbidden", ("403",)),
        (Refusal(404, "EntryNotFound", only_files=True), False, "missing_file", ("404",)),
        (Refusal(429, "", retry_after="90"), False, "too_many_requests", ("90 seconds",)),
        (Refusal(429, "", only_files=True), False, "too_many_requests", ("some minutes",)),
        (Refusal(503, "Broken"), False, "hub_down", ("503",)),
    ],
)
def test_a_refusal_is_said_with_its_remedy(
    hub: HubStub,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
    has_token: bool,
    code: str,
    words: tuple[str, ...],
) -> None:
    hub.refusal = refusal
    if has_token:
        monkeypatch.setenv("HF_TOKEN", "hf_ofatest")
    found = fault()
    assert found.code == code
    assert all(word in str(found) for word in words), str(found)
    if code == "gated":
        assert found.page == f"{hub.endpoint}/{TARGET}"


def test_no_hub_at_all_is_said(folder: Path, tmp_path: Path) -> None:
    with serve_hub({TARGET: folder}) as stub:
        pass
    with client_of(stub.endpoint, tmp_path / "cache", is_offline=False):
        assert fault().code == "no_network"


def test_a_disk_without_room_is_said_before_the_first_byte(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=fetching.SPARE_DISK_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = fault()
    assert found.code == "too_little_disk" and "Nothing was fetched" in found.remedy
    assert not hub.asked_for("resolve")


def test_a_disk_that_fills_up_keeps_what_arrived(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    real = file_download.http_get

    def fills(url: str, stream: Any, **said: Any) -> None:
        if said["displayed_filename"] == WEIGHTS:
            stream.write(b"x" * 1000)
            raise OSError(errno.ENOSPC, "No space left on device", stream.name)
        real(url, stream, **said)

    monkeypatch.setattr(file_download, "http_get", fills)
    found = fault()
    assert found.code == "disk_full" and "is full" in found.text and "kept" in found.remedy
    assert [part.stat().st_size for part in cache.rglob("*.incomplete")] == [1000]


def test_a_model_in_pickle_alone_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    with (
        serve_hub({TARGET: folder}) as stub,
        client_of(stub.endpoint, tmp_path / "cache", is_offline=False),
    ):
        assert fault().code == "no_safetensors" and not stub.asked_for("resolve")


def test_weights_whose_header_does_not_fit_are_refused_though_the_checksum_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(b"\xff" * 4096)
    with (
        serve_hub({TARGET: folder}) as stub,
        client_of(stub.endpoint, tmp_path / "cache", is_offline=False),
    ):
        found = fault()
        assert found.code == "damaged" and f"{WEIGHTS} is damaged on the hub itself" in found.text
        assert sum(WEIGHTS in asked for asked in stub.requests if asked.startswith("GET")) == 1
        assert not weights(tmp_path / "cache")


def test_the_token_is_the_hubs_alone(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights lie at another address; a token sent there would be given away."""
    monkeypatch.setenv("HF_TOKEN", "hf_ofatest")
    elsewhere = hub.endpoint.replace("127.0.0.1", "localhost")
    hub.cdn = elsewhere
    fetched()
    assert any("resolve" in path for path in hub.tokens)
    assert not any(path.startswith("/cdn/") for path in hub.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.json", WEIGHTS, "tokenizer.json"])
def test_an_incomplete_model_is_not_listed_as_ready(hub: HubStub, cache: Path, name: str) -> None:
    (fetched() / name).unlink()
    assert cached_models() == []
    assert fetched().is_dir() and len(cached_models()) == 1, "and the next attempt completes it"


REVISION, TREE = (f"/api/models/{TARGET}/{part}" for part in ("revision/main", f"tree/{COMMIT}"))
JSON = {"Content-Type": "application/json"}


def listed(**changes: Any) -> list[bytes]:
    entry = {"type": "file", "path": WEIGHTS, "size": 4, "oid": "a" * 40}
    return [json.dumps([{**entry, **changes}]).encode()]


@pytest.mark.parametrize(
    ("path", "headers", "parts", "words"),
    [
        (TREE, JSON, repeat(b" " * 2**16), "more than 0.25 MiB"),
        (TREE, JSON, [b"[" * 900 + b"]" * 900], "lists inside each other"),
        (TREE, JSON, [b"[" * 10**5], "lists inside each other"),
        (TREE, {"Content-Encoding": "gzip"}, [gzip.compress(b"[]")], "a packed answer"),
        (TREE, JSON, listed(oid="../../../.profile"), "in place of a hash"),
        (TREE, JSON, listed(lfs={"oid": "../x", "size": 4, "pointerSize": 9}), "place of a hash"),
        (TREE, JSON, listed(size=-1), "a file of -1 bytes"),
        (TREE, JSON, listed(size="many"), "a file of 'many' bytes"),
        (TREE, JSON, [b'{"files": 3}'], "was not read"),
        (TREE, JSON, [b'"\xff"'], "was not read"),
        (REVISION, JSON, [b'{"id": "a", "sha": "../../elsewhere", "siblings": []}'], "of a hash"),
        (REVISION, JSON, [b'{"id": "a", "siblings": []}'], "in place of a hash"),
        (REVISION, JSON, [b"[]"], "was not read"),
    ],
)
def test_a_list_of_files_that_cannot_be_read_is_a_sentence(
    hub: HubStub,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    headers: dict[str, str],
    parts: Iterable[bytes],
    words: str,
) -> None:
    monkeypatch.setattr(http_limits, "ANSWER_BYTES", 2**18)
    hub.answers[path] = headers, parts
    found = fault()
    assert found.code == "strange_answer" and words in found.text
    assert not list(cache.parent.rglob("*.incomplete"))


@pytest.mark.parametrize("count", ["1e999", "-5", "NaN", '"many"', "true", "1" + "0" * 99])
def test_a_model_whose_number_of_values_is_no_count_is_listed_without_one(
    hub: HubStub, cache: Path, count: str
) -> None:
    weights = f'{{"parameters": {{"F32": {count}}}, "total": 1}}'
    entry = f'{{"id": "a/b", "config": {{"model_type": []}}, "safetensors": {weights}}}'
    hub.answers["/api/models"] = JSON, [f"[{entry}]".encode()]
    (found,) = hub_files.search("", "")
    assert (found.id, found.num_params, found.num_bytes) == ("a/b", None, None)
    assert found.is_known, "as far as the hub says"


def test_a_list_of_files_that_comes_too_slowly_is_given_up(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "ANSWER_S", 0.0)
    assert "no whole answer within 0 s" in fault().text


def test_more_files_than_a_model_has_are_not_listed(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "MOST_FILES", 2)
    assert "more than 2 files" in fault().text


def test_a_file_without_end_stops_at_the_length_that_the_hub_listed(
    hub: HubStub, cache: Path
) -> None:
    hub.fault = "endless"
    found = fault()
    assert found.code == "wrong_size"
    num_bytes = sum(file.stat().st_size for file in cache.rglob("*.incomplete"))
    assert num_bytes < 2**20
    hub.fault = None
    assert (fetched() / WEIGHTS).is_file()


def test_a_question_that_takes_too_long_is_given_up() -> None:
    faults = list[DownloadError]()
    is_late = threading.Event()

    def give_up(error: DownloadError) -> None:
        faults.append(error)
        is_late.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetching, "QUESTION_S", 0.0)
        with fetching.within_time(give_up):
            assert is_late.wait(WAIT_S)
    assert faults[0].fault.code == "slow_answer"
