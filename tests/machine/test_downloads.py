"""Downloads as the page drives them: processes of their own, against a hub on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from safetensors.numpy import save_file

from localspec.core.config import PROJECT_FOLDER
from localspec.machine import downloads as module
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import (
    WORKER,
    Download,
    Downloads,
    advanced,
    in_words,
    load_unfinished,
    save_unfinished,
    so_far,
)
from localspec.machine.hub_files import HubFile, Survey
from tests.kit import waiting
from tests.kit.hub_stub import COMMIT, NO_PROXY, HubStub, Refusal, client_of, serve_hub

pytestmark = pytest.mark.slow  # starts child processes

COMMIT_OF = "GET /api/models/someone/model/revision/main"
MODEL, OTHER = "someone/model", "someone/other"
wait = waiting.until


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    for number, each in enumerate((MODEL, OTHER)):
        (root / each).mkdir(parents=True)
        (root / each / "config.json").write_text('{"model_type": "llama"}')
        (root / each / "tokenizer.json").write_text("{}")
        rows = numpy.random.default_rng(number).random((512, 256), numpy.float32)
        save_file({"weight": rows}, root / each / "model.safetensors")
    return {each: root / each for each in (MODEL, OTHER)}


@pytest.fixture
def hub_of_two(two_models: dict[str, Path]) -> Iterator[HubStub]:
    with serve_hub(two_models) as stub:
        yield stub


@pytest.fixture
def download_cache(hub_of_two: HubStub, tmp_path: Path) -> Iterator[Path]:
    with client_of(hub_of_two.endpoint, tmp_path / "cache"):  # this process looks at the same cache
        yield tmp_path / "cache"


@pytest.fixture
def environment(hub_of_two: HubStub, download_cache: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub_of_two.endpoint,
        "HF_HUB_CACHE": str(download_cache),
        "HF_HOME": str(download_cache.parent / "hf"),
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
        "NO_PROXY": NO_PROXY,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "downloads.json"


@pytest.fixture
def downloads(path: Path, environment: dict[str, str]) -> Iterator[Downloads]:
    downloads = Downloads(path, environment)
    try:
        yield downloads
    finally:
        downloads.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """The processes that the downloads of this test started."""
    found, real = list[subprocess.Popen[str]](), subprocess.Popen

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[str]:
        found.append(real(*arguments, **more))
        return found[-1]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    return found


def state(downloads: Downloads, model_id: str = MODEL) -> str:
    found = downloads.find(model_id)
    return found.state if found is not None else "absent"


def in_part(downloads: Downloads) -> Download:
    """Once a good part of the weights is here."""

    def look() -> Download | None:
        found = downloads.find(MODEL)
        assert found is not None and found.state != "failed", found
        return found if found.state == "fetching" and found.have_bytes > 200_000 else None

    return wait(look)  # type: ignore[no-any-return]


def test_two_models_come_one_after_the_other_and_are_whole(
    downloads: Downloads, download_cache: Path, two_models: dict[str, Path]
) -> None:
    downloads.ask(MODEL)
    downloads.ask(OTHER)
    downloads.ask(MODEL)  # a second click
    assert [each.model_id for each in downloads.downloads] == [MODEL, OTHER]
    wait(lambda: state(downloads, OTHER) == "done")
    for each in downloads.downloads:
        assert each.state == "done" and each.have_bytes == each.num_bytes
        assert each.survey is not None
        assert each.held == {file.name: file.num_bytes for file in each.survey.files}
    for model_id, folder in two_models.items():
        place = download_cache / f"models--{model_id.replace('/', '--')}" / "snapshots" / COMMIT
        weights = "model.safetensors"
        assert (place / weights).read_bytes() == (folder / weights).read_bytes()


def test_a_paused_download_goes_on_from_where_it_was_and_a_cancelled_one_leaves_nothing(
    downloads: Downloads, hub_of_two: HubStub, download_cache: Path, path: Path
) -> None:
    hub_of_two.pace_s = 0.1
    downloads.ask(MODEL)
    seen = in_part(downloads)
    assert seen.num_bytes is not None and "of" in in_words(seen)
    if hasattr(signal, "SIGSTOP"):  # even one that stands still
        max(psutil.Process().children(), key=lambda child: child.create_time()).suspend()
    downloads.pause(MODEL)
    assert state(downloads) == "paused"
    (part,) = wait(lambda: list(download_cache.rglob("incomplete/*.safetensors")))
    held = part.stat().st_size
    downloads.ask(MODEL)
    wait(lambda: hub_of_two.ranges)
    (asked,) = hub_of_two.ranges
    assert int(asked.removeprefix("bytes=").removesuffix("-")) >= held > 100_000
    assert hub_of_two.requests.count(COMMIT_OF) == 1, (
        "what is being fetched does not change meanwhile"
    )
    downloads.cancel(MODEL)
    assert downloads.downloads == () and not part.exists()
    assert load_unfinished(path) == {}


def test_what_an_ended_process_still_says_changes_nothing(path: Path) -> None:
    """Its last lines may be read after a click on Pause."""
    save_unfinished(path, {MODEL: Survey(MODEL, COMMIT, (HubFile("a", 9),))})
    downloads = Downloads(path)
    known = downloads.find(MODEL)
    assert known is not None and known.state == "paused"
    for line in (
        {"file": "a", "bytes": 7},
        {"folder": "/somewhere"},
        {"fault": {"code": "other", "text": "No.", "remedy": "None."}},
    ):
        downloads.take_line(MODEL, line)
    assert downloads.find(MODEL) == known


def test_after_a_kill_the_next_start_offers_to_continue(
    downloads: Downloads,
    hub_of_two: HubStub,
    path: Path,
    environment: dict[str, str],
    started: list[subprocess.Popen[str]],
) -> None:
    hub_of_two.pace_s = 0.1
    downloads.ask(MODEL)
    in_part(downloads)
    started[0].kill()
    failed = wait(lambda: (found := downloads.find(MODEL)) and found.state == "failed" and found)
    assert failed.fault.code == "other" and "Continue" in failed.fault.remedy
    again = Downloads(path, environment)
    try:
        (found,) = again.downloads
        assert found.state == "paused" and found.num_bytes is not None
        assert 100_000 < found.have_bytes < found.num_bytes, "read from the cache, not remembered"
        hub_of_two.pace_s = 0.0
        again.ask(MODEL)
        wait(lambda: state(again) == "done")
        assert hub_of_two.ranges, "what had arrived was not fetched again"
    finally:
        again.close()
    assert load_unfinished(path) == {}


def test_the_worker_ends_when_the_app_is_gone(
    hub_of_two: HubStub, environment: dict[str, str]
) -> None:
    hub_of_two.pace_s = 0.1
    worker = subprocess.Popen(
        [*WORKER, MODEL],
        cwd=PROJECT_FOLDER,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    worker.stdout.close()
    assert worker.wait(30) != 0


def test_a_download_that_fails_says_so_and_keeps_what_arrived(
    downloads: Downloads, hub_of_two: HubStub
) -> None:
    hub_of_two.fault = "short"  # one that the hub's client does not try again seconds later
    downloads.ask(MODEL)
    failed = wait(lambda: (found := downloads.find(MODEL)) and found.state == "failed" and found)
    assert failed.fault.code == "file"
    assert 0.4 * failed.num_bytes < failed.have_bytes < 0.7 * failed.num_bytes
    hub_of_two.fault = None
    downloads.ask(MODEL)
    wait(lambda: state(downloads) == "done")
    assert hub_of_two.requests.count(COMMIT_OF) == 2, "the list may have been out of date"
    downloads.forget(MODEL)
    assert downloads.find(MODEL) is None and downloads.downloads == ()


def test_the_dry_run_gives_the_exact_size_and_fetches_nothing(
    downloads: Downloads, hub_of_two: HubStub, two_models: dict[str, Path]
) -> None:
    found = downloads.survey(MODEL)
    assert isinstance(found, Survey)
    assert found.num_bytes == sum(file.stat().st_size for file in two_models[MODEL].iterdir())
    assert downloads.downloads == () and not hub_of_two.asked_for(f"GET /{MODEL}/resolve")
    downloads.ask(MODEL)
    wait(lambda: state(downloads) == "done")
    assert hub_of_two.requests.count(COMMIT_OF) == 1, "what is fetched is what was shown"
    hub_of_two.refusal = Refusal(401, "GatedRepo")
    refused = downloads.survey(MODEL)
    assert isinstance(refused, DownloadFault) and refused.code == "access"


def test_nothing_starts_by_itself(path: Path, started: list[subprocess.Popen[str]]) -> None:
    save_unfinished(path, {MODEL: None})
    again = Downloads(path)
    assert [each.state for each in again.downloads] == ["paused"]
    again.close()
    assert started == []


@pytest.mark.parametrize("text", ["", "[", '{"a": 1}', "[1]", '[{"model_id": "a/b"}]'])
def test_a_list_that_cannot_be_read_is_empty(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    assert load_unfinished(path) == {}


def test_the_list_keeps_what_belongs_to_a_download(path: Path) -> None:
    kept = {MODEL: Survey(MODEL, COMMIT, (HubFile("a", 3),)), OTHER: None}
    save_unfinished(path, kept)
    assert load_unfinished(path) == kept


def test_a_list_of_an_earlier_version_is_read(path: Path) -> None:
    file = {"name": "a", "num_bytes": 3, "etag": "0" * 40, "is_large": False}
    survey = {"model_id": MODEL, "commit": COMMIT, "files": [file]}
    path.parent.mkdir()
    path.write_text(json.dumps([{"model_id": MODEL, "survey": survey}]))
    assert load_unfinished(path) == {MODEL: Survey(MODEL, COMMIT, (HubFile("a", 3),))}


# -- in words -------------------------------------------------------------------------------


def of_size(num_bytes: int) -> Survey:
    return Survey(MODEL, COMMIT, (HubFile("a", num_bytes),))


def fetching(known: Download, name: str, have_bytes: int, now_s: float) -> Download:
    return advanced(known, {"file": name, "bytes": have_bytes}, now_s)


def test_speed_and_time_left_are_those_of_the_last_seconds() -> None:
    known = Download(MODEL, "fetching", {"a": 0}, of_size(9_000_000))
    for second, have in ((0.0, 0), (100.0, 1_000_000), (102.0, 5_000_000)):
        known = fetching(known, "a", have, second)
    assert (known.bytes_per_s, known.seconds_left) == (2e6, 2.0), "older ones are dropped"
    assert in_words(known) == "5 of 9 MB, 2.0 MB/s, 2 s left"
    unknown = Download(MODEL, "fetching", known.held, None)
    assert unknown.bytes_per_s is None and unknown.seconds_left is None
    assert in_words(unknown) == "5 MB of unknown size"


def test_small_files_one_after_the_other_have_no_speed() -> None:
    """Asking for each takes longer than its bytes: it was "0.0 MB/s, 3 h left" at every start."""
    sizes = {"a": 100, "b": 200}
    known = Download(MODEL, "fetching")
    for second, name in enumerate(("a", "b")):
        known = fetching(known, name, sizes[name], second)
        assert known.bytes_per_s is None
    for second, have in ((7.0, 500_000), (8.0, 1_000_000)):
        known = fetching(known, "large", have, second)
    assert known.bytes_per_s == 500_000.0
    assert "500 kB/s" in in_words(known)


def test_how_much_is_here_is_said_in_one_unit_where_it_can_be() -> None:
    def said(have: int, total: int | None) -> str:
        survey = None if total is None else of_size(total)
        return so_far(Download(MODEL, "paused", {"a": have}, survey))

    assert said(3_100_000_000, 5_000_000_000) == "3.1 of 5.0 GB"
    assert said(900_000_000, 5_000_000_000) == "900 MB of 5.0 GB"
    assert said(0, None) == "0 kB of unknown size"
