"""Fetching a model from a hub that drops, stalls, lies about lengths and sends wrong bytes."""

from __future__ import annotations

import errno
import gzip
import hashlib
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
from localspec.machine.hub_files import survey_model
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
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = tiny_llama(num_layers=1, vocab_size=VOCAB_SIZE)
    folder = save_model(tmp_path_factory.mktemp("hub") / TARGET, module)
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("never asked for")
    return folder


@pytest.fixture
def hub(hub_folder: Path) -> Iterator[HubStub]:
    with serve_hub({TARGET: hub_folder}) as stub:
        yield stub


@pytest.fixture
def cache(hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    with client_of(hub.endpoint, tmp_path / "cache", is_offline=False):
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
        real = vars(_http)["time"]

        def sleep(seconds: float) -> None:
            assert seconds < 30.0, "nobody is left waiting so long without a word"

        quick = SimpleNamespace(sleep=sleep, time=real.time)
        monkeypatch.setattr(_http, "time", quick)
        yield tmp_path / "cache"


def fetched(reports: list[tuple[str | None, int]] | None = None) -> Path:
    said = reports if reports is not None else []
    return fetch(survey_model(TARGET), lambda *report: said.append(report))


def fault() -> DownloadFault:
    """Why it did not go; the sentence is one that can be shown."""
    with pytest.raises(Exception) as caught:
        fetched()
    found = fault_of(caught.value, TARGET)
    for text in (found.text, found.remedy):
        assert text.endswith(".") and "\n" not in text and len(text) < 300, text
    return found


def weights(cache: Path) -> list[Path]:
    """Those with a name that a program could load them by."""
    return list(cache.rglob("snapshots/*/model.safetensors"))


def kept_parts(cache: Path) -> list[Path]:
    return [part for part in cache.rglob("incomplete/*") if part.stat().st_size]


def test_what_is_fetched_is_what_the_hub_holds_and_nothing_else(
    hub: HubStub, cache: Path, hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "REPORTS_PER_S", 1e9)
    reports: list[tuple[str | None, int]] = []
    place = fetched(reports)
    for file in place.iterdir():
        assert file.read_bytes() == (hub_folder / file.name).read_bytes()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in place.iterdir()
    }
    assert not any(hub.asked_for(name) for name in UNWANTED)
    assert place.name == COMMIT
    arriving = [num_bytes for name, num_bytes in reports if name == WEIGHTS]
    assert arriving == sorted(arriving) and len(arriving) > 3
    assert arriving[-1] == (hub_folder / WEIGHTS).stat().st_size
    assert reports[-1] == (None, sum(file.stat().st_size for file in place.iterdir()))
    assert not kept_parts(cache)


WEIGHTS = "model.safetensors"


@pytest.mark.slow
def test_a_connection_lost_at_any_request_costs_no_file(
    hub: HubStub, tmp_path: Path, hub_folder: Path, tally: Tally
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
                assert file.read_bytes() == (hub_folder / file.name).read_bytes()
            assert not kept_parts(cache)


def test_a_fetched_model_is_found_offline_and_listed(hub: HubStub, cache: Path) -> None:
    from huggingface_hub import constants

    place = fetched()
    hub.requests.clear()
    constants.HF_HUB_OFFLINE = True
    assert resolve(LoadOptions(model=TARGET, fetches=False)).path == place
    assert hub.requests == []
    (listed,) = cached_models()
    assert (listed.id, listed.path) == (TARGET, place) and (listed.num_bytes or 0) > 0


def test_the_dry_run_fetches_and_writes_nothing(
    hub: HubStub, cache: Path, hub_folder: Path
) -> None:
    found = survey_model(TARGET)
    wanted = [f for f in hub_folder.iterdir() if f.is_file() and f.name not in UNWANTED]
    assert found.num_bytes == sum(file.stat().st_size for file in wanted)
    assert found.commit == COMMIT and not hub.asked_for(f"GET /{TARGET}/resolve")
    assert sum(found.held_bytes().values()) == 0 and not cache.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "reset", "stalled", "short", "long"])
def test_a_fault_that_passes_is_gone_on_from_by_range(
    hub: HubStub, cache: Path, hub_folder: Path, kind: Any
) -> None:
    hub.fault, hub.num_faults = kind, 1
    place = fetched()
    assert (place / WEIGHTS).read_bytes() == (hub_folder / WEIGHTS).read_bytes()
    if kind != "long":  # there everything had come before the connection ended
        size = (hub_folder / WEIGHTS).stat().st_size
        start = int(hub.ranges[-1].removeprefix("bytes=").removesuffix("-"))
        # A reset also takes what had arrived and was not read yet.
        assert (0 if kind == "reset" else 0.5 * size) < start <= 0.6 * size, hub.ranges


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("closed", "network"),
        ("reset", "network"),
        ("stalled", "network"),
        ("short", "file"),
        ("wrong", "file"),
        ("page", "answer"),
        ("portal", "answer"),
    ],
)
def test_a_fault_that_stays_ends_in_a_sentence_and_the_next_attempt_completes_it(
    hub: HubStub, cache: Path, hub_folder: Path, kind: Any, code: str
) -> None:
    hub.fault = kind
    assert fault().code == code
    assert not list(cache.rglob("snapshots/*")), "nothing unverified has a name in the cache"
    assert cached_models() == []
    num_requests = len(hub.requests)
    assert num_requests < 80, "a fault is retried a bounded number of times"
    has_part = any(part.name == WEIGHTS for part in kept_parts(cache))
    assert has_part is (kind in ("closed", "reset", "stalled", "short"))
    hub.fault = None
    hub.ranges.clear()
    assert (fetched() / WEIGHTS).read_bytes() == (hub_folder / WEIGHTS).read_bytes()
    assert bool(hub.ranges) is has_part, "what had arrived was not fetched again"


def test_a_page_of_the_network_takes_nothing_from_what_has_arrived(
    hub: HubStub, cache: Path
) -> None:
    hub.fault = "closed"
    assert fault().code == "network"
    (part,) = (part for part in kept_parts(cache) if part.name == WEIGHTS)
    held = part.stat().st_size
    hub.fault = "page"
    assert fault().code == "answer" and part.stat().st_size == held > 0


def test_an_empty_file_belongs_to_its_model(hub_folder: Path, tmp_path: Path) -> None:
    """It has no part to go on with, and none was made: its model could not be fetched."""
    shutil.copytree(hub_folder, tmp_path / "hub")
    (tmp_path / "hub" / "merges.txt").touch()
    with (
        serve_hub({TARGET: tmp_path / "hub"}) as stub,
        client_of(stub.endpoint, tmp_path / "cache", is_offline=False),
    ):
        assert (fetched() / "merges.txt").read_bytes() == b""


def test_a_part_with_wrong_bytes_is_found_out_and_fetched_anew(
    hub: HubStub, cache: Path, hub_folder: Path
) -> None:
    found = survey_model(TARGET)
    file = next(each for each in found.files if each.name == WEIGHTS)
    part = found.part(file)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (file.num_bytes // 2))
    assert (fetched() / WEIGHTS).read_bytes() == (hub_folder / WEIGHTS).read_bytes()


def test_what_an_earlier_version_left_of_a_file_is_gone_on_with(
    hub: HubStub, cache: Path, hub_folder: Path
) -> None:
    """It named a part by its checksum and kept it among the blobs."""
    content = (hub_folder / WEIGHTS).read_bytes()
    old = (
        survey_model(TARGET).folder / "blobs" / f"{hashlib.sha256(content).hexdigest()}.incomplete"
    )
    old.parent.mkdir(parents=True)
    old.write_bytes(content[:5000])
    assert (fetched() / WEIGHTS).read_bytes() == content
    assert "bytes=5000-" in hub.ranges and not old.exists()


def test_what_another_commit_brought_is_not_fetched_again(hub: HubStub, cache: Path) -> None:
    shutil.rmtree(fetched())
    hub.requests.clear()
    assert sum(survey_model(TARGET).held_bytes().values()) == survey_model(TARGET).num_bytes
    assert (fetched() / WEIGHTS).is_file() and not hub.asked_for("GET /cdn")


def test_a_part_longer_than_the_file_is_dropped(
    hub: HubStub, cache: Path, hub_folder: Path
) -> None:
    found = survey_model(TARGET)
    file = next(each for each in found.files if each.name == WEIGHTS)
    part = found.part(file)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (file.num_bytes + 9))
    assert (fetched() / WEIGHTS).read_bytes() == (hub_folder / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("refusal", "has_token", "code", "words"),
    [
        (Refusal(401, "GatedRepo"), False, "access", ("terms", "log in", "page")),
        (Refusal(403, "GatedRepo", only_files=True), True, "access", ("agreed yet", "page")),
        (Refusal(404, "RepoNotFound"), False, "unknown_model", ("spelling", "HF_TOKEN")),
        (Refusal(401, "RepoNotFound"), False, "unknown_model", ("spelling",)),
        (Refusal(401, "Other"), True, "access", ("token", "401")),
        (Refusal(403, "Other", only_files=True), True, "access", ("403",)),
        (Refusal(404, "EntryNotFound", only_files=True), False, "file", ("404",)),
        (Refusal(429, "", retry_after="90"), False, "hub_busy", ("90 seconds",)),
        (Refusal(429, "", only_files=True), False, "hub_busy", ("some minutes",)),
        (Refusal(429, "", True, retry_after="90"), False, "hub_busy", ("90 seconds",)),
        (Refusal(503, "Broken"), False, "hub_busy", ("503",)),
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
    if code == "access":
        assert found.page == f"{hub.endpoint}/{TARGET}"


def test_no_hub_at_all_is_said(hub_folder: Path, tmp_path: Path) -> None:
    with serve_hub({TARGET: hub_folder}) as stub:
        pass
    with client_of(stub.endpoint, tmp_path / "cache", is_offline=False):
        assert fault().code == "network"


def test_a_disk_without_room_is_said_before_the_first_byte(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=fetching.SPARE_DISK_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    found = fault()
    assert found.code == "disk" and "more are needed" in found.text
    assert not hub.asked_for(f"GET /{TARGET}/resolve")


def test_a_disk_that_fills_up_keeps_what_arrived(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    real = file_download.http_get

    def fills(url: str, stream: Any, **said: Any) -> None:
        if said.get("displayed_filename") == WEIGHTS:
            stream.write(b"x" * 1000)
            raise OSError(errno.ENOSPC, "No space left on device", stream.name)
        real(url, stream, **said)

    monkeypatch.setattr(file_download, "http_get", fills)
    found = fault()
    assert found.code == "disk" and "is full" in found.text and "kept" in found.remedy
    assert [part.stat().st_size for part in kept_parts(cache) if part.name == WEIGHTS] == [1000]


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
        assert fault().code == "format" and not stub.asked_for("GET /someone/target/resolve")


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
        assert found.code == "file" and "it is damaged on the hub itself" in found.text
        assert sum(WEIGHTS in asked for asked in stub.requests if asked.startswith("GET /cdn")) == 1
        assert not weights(tmp_path / "cache")


def test_the_token_is_the_hubs_alone(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights lie at another address; a token sent there would be given away."""
    monkeypatch.setenv("HF_TOKEN", "hf_ofatest")
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


HEAD = f"/{TARGET}/resolve/{COMMIT}/{WEIGHTS}"
KNOWN = {"X-Repo-Commit": COMMIT, "X-Linked-Size": "4", "ETag": f'"{"a" * 40}"'}


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
        (TREE, JSON, listed(path="C:config.json"), "cannot be an absolute"),
        (HEAD, {**KNOWN, "ETag": '"../../../.profile"'}, [], "in place of a hash"),
        (HEAD, {**KNOWN, "X-Linked-Size": "-1"}, [], "no size of"),
        (HEAD, {**KNOWN, "X-Linked-Size": "many"}, [], "no size of"),
        (TREE, JSON, [b'{"files": 3}'], "in no form that is known"),
        (TREE, JSON, [b'"\xff"'], "in no form that is known"),
        (REVISION, JSON, [b'{"id": "a", "sha": "../../elsewhere", "siblings": []}'], "of a hash"),
        (REVISION, JSON, [b'{"id": "a", "siblings": []}'], "in place of a hash"),
        (REVISION, JSON, [b"[]"], "in no form that is known"),
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
    assert found.code == "answer" and words in found.text
    assert not kept_parts(cache.parent)


@pytest.mark.parametrize("count", ["1e999", "-5", "NaN", '"many"', "true", "1" + "0" * 99])
def test_a_model_whose_number_of_values_is_no_count_is_listed_without_one(
    hub: HubStub, cache: Path, count: str
) -> None:
    weights = f'{{"parameters": {{"F32": {count}}}, "total": 1}}'
    entry = f'{{"id": "a/b", "config": {{"model_type": []}}, "safetensors": {weights}}}'
    hub.answers["/api/models"] = JSON, [f"[{entry}]".encode()]
    (found,) = hub_files.search("", "")
    assert (found.id, found.num_params, found.num_bytes) == ("a/b", None, None)
    assert not found.fault, "as far as the hub says"


def test_a_model_of_a_family_that_does_not_run_natively_is_listed_with_that_fault(
    hub: HubStub, cache: Path
) -> None:
    entries = (
        f'{{"id": "a/{each}", "config": {{"model_type": "{each}"}}}}' for each in ("granite", "odd")
    )
    hub.answers["/api/models"] = JSON, [f"[{', '.join(entries)}]".encode()]
    known, odd = hub_files.search("", "")
    assert (known.fault, odd.fault) == ("", "of the family odd: not yet")
    assert odd.page == "https://huggingface.co/a/odd"


def test_a_list_of_files_that_comes_too_slowly_is_given_up(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "ANSWER_S", 0.0)
    assert "no whole answer within 0 s" in fault().text


def test_a_list_of_files_without_end_is_given_up(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "ANSWER_BYTES", 2**14)
    further = f'<{hub.endpoint}{TREE}?cursor=more>; rel="next"'
    hub.answers[TREE] = {**JSON, "Link": further}, listed(path="a" * 2**12)
    assert "more than 0.015625 MiB" in fault().text


@pytest.mark.parametrize(
    "changes",
    [
        {"oid": "../../../.profile"},
        {"lfs": {"oid": "../x", "size": 4, "pointerSize": 9}},
        {"size": -1},
        {"size": "many"},
        {"path": "other.json"},
    ],
)
def test_a_file_that_is_listed_otherwise_at_its_check_gets_no_name(
    hub: HubStub, cache: Path, changes: dict[str, Any]
) -> None:
    known = survey_model(TARGET)
    hub.answers[TREE] = JSON, listed(**changes)
    with pytest.raises(DownloadError) as caught:
        fetch(known, lambda name, read: None)
    assert caught.value.fault.code == "file" and "checksum" in caught.value.fault.text
    assert not list(cache.rglob("snapshots/*")) and not list(cache.rglob("blobs/*"))


def test_the_limits_hold_for_a_session_that_the_client_makes_anew(
    hub: HubStub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes one after each connection that fails."""
    from huggingface_hub import close_session, get_session

    hub_files.limit_hub_client()
    close_session()
    hub.answers[TREE] = JSON, [b"[" * 900 + b"]" * 900]
    with pytest.raises(DownloadError, match="lists inside each other"):
        get_session().get(hub.endpoint + TREE)


def test_a_file_without_end_stops_at_the_length_that_the_hub_listed(
    hub: HubStub, cache: Path
) -> None:
    hub.fault = "endless"
    found = fault()
    assert found.code == "file"
    num_bytes = sum(part.stat().st_size for part in kept_parts(cache))
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
    assert faults[0].fault.code == "answer"
