"""Fetch one model into the hub's cache, continuing what an earlier attempt left; the process
that does it: `python -m localspec.machine.fetch MODEL_ID [--survey]`.

Contract: `fetch` surveys, checks that the disk has room, fetches file after file at the commit that
was found, verifies each before it is given its name in the cache, and returns the model's folder.
It may be killed at any moment: parts stay as `<hash>.incomplete` and are continued by Range. A file
is tried a bounded number of times, and at most MOST_IDLE_ATTEMPTS times without gaining a byte.
Raises what the client raises, and DownloadError.

The process prints one JSON object a line: {"survey"}, {"file", "bytes", "phase"}, and last
{"folder"} or {"fault"}; at most REPORTS_PER_S lines a second besides changes of phase. It ends as
soon as nobody reads them, and imports neither torch nor the page.

huggingface_hub does the talking (metadata, `http_get` with Range and retries, links in its cache).
Its own snapshot download starts an interrupted file anew, so the parts are kept here.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localspec.core.errors import first_line
from localspec.core.files import free_disk, replacing
from localspec.machine.download_faults import DownloadError, fault_of
from localspec.machine.hub_files import HubFile, Survey, gb, search, survey

# Left free beside a model, or the log and the system suffer.
SPARE_DISK_BYTES = 512 * 2**20
MOST_IDLE_ATTEMPTS = 3
MOST_ATTEMPTS = 50
READ_BYTES = 4 * 2**20
PAGE_STARTS = (b"<!doctype html", b"<html")
REPORTS_PER_S = 5.0
# The client's own 10 MiB would show nothing for long on a slow line, and lose as much at a kill.
CHUNK_BYTES = 64 * 1024

# Seconds for all answers to a question: the client asks again for 24 s where there is no network.
QUESTION_S = 120.0

# Called with a file's name, its bytes so far, and "fetching", "checking" or "done".
Report = Callable[[str, int, str], None]


# -- the whole model ------------------------------------------------------------------------


def fetch(model_id: str, on_survey: Callable[[Survey], None], report: Report) -> Path:
    found = survey(model_id)
    on_survey(found)
    if not any(file.name.endswith(".safetensors") for file in found.files):
        raise DownloadError("no_safetensors", model_id=model_id)
    require_disk(found)
    (found.folder / "blobs").mkdir(parents=True, exist_ok=True)
    for file in found.files:
        if not found.is_there(file):
            _fetch_file(found, file, report)
        report(file.name, file.num_bytes, "done")
    # This commit is the one that is found by the model's name alone.
    with replacing(found.folder / "refs" / "main") as part:
        part.write_text(found.commit, encoding="utf-8")
    return found.snapshot


def require_disk(found: Survey) -> None:
    """Room for what is still to come, before the first byte of it."""
    needed = found.num_bytes - sum(found.held_bytes().values())
    free = free_disk(found.folder)
    room = needed if free is None else max(0, free - SPARE_DISK_BYTES)
    if needed > room:
        said = {"needed": gb(needed), "free": gb(room), "place": found.folder.parent}
        raise DownloadError("too_little_disk", model_id=found.model_id, **said)


# -- one file -------------------------------------------------------------------------------


def _fetch_file(found: Survey, file: HubFile, report: Report) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    lock, blob = found.lock(file), found.blob(file)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # two starts of the app must not write one part
        if not blob.exists():
            _fetch_blob(found, file, report)
    # The client finds the blob, fetches nothing and gives it its name in the snapshot.
    shown = Path(hf_hub_download(found.model_id, file.name, revision=found.commit))
    if not shown.is_symlink():  # where there are no links it was copied
        blob.unlink(missing_ok=True)


def _fetch_blob(found: Survey, file: HubFile, report: Report) -> None:
    part, reason = found.part(file), None
    for _ in range(2):  # wrong bytes once may be an old part; twice they are what is sent
        part.touch()  # of an empty file nothing is received
        _receive(found, part, file, report)
        reason = objection(part, file, lambda read: report(file.name, read, "checking"))
        if reason is None:
            _require_readable(part, file)
            os.replace(part, found.blob(file))
            return
        part.unlink()
    raise DownloadError("wrong_bytes", name=file.name, reason=reason)


def _receive(found: Survey, part: Path, file: HubFile, report: Report) -> None:
    """Until the part is as long as the file. Each attempt goes on from the last one's end."""
    import httpx2

    idle, last = 0, None  # type: int, Exception | None
    for _ in range(MOST_ATTEMPTS):
        before = _length(part, file)
        if before == file.num_bytes:
            return
        try:
            _ask_for_rest(found, part, file, before, report)
        except httpx2.ReadError as error:  # the one that the client does not retry itself
            last = error
        except OSError as error:
            # The client's own types and the disk's errors are for the caller; a plain one says
            # that the length was not the promised one.
            if type(error) is not OSError or error.errno is not None:
                raise
            last = error
        if is_web_page(part):
            part.unlink()
            raise DownloadError("captive_portal")
        idle = 0 if _length(part, file) > before else idle + 1
        if idle == MOST_IDLE_ATTEMPTS:
            break
    if isinstance(last, httpx2.TransportError):
        raise last
    got = _length(part, file)
    raise DownloadError("wrong_size", name=file.name, expected=file.num_bytes, got=got) from last


def _length(part: Path, file: HubFile) -> int:
    """Bytes of the part that can be gone on from; one that is too long is none at all."""
    if not part.is_file():
        return 0
    if part.stat().st_size > file.num_bytes:
        part.unlink()
        return 0
    return part.stat().st_size


def _ask_for_rest(found: Survey, part: Path, file: HubFile, start: int, report: Report) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(found.model_id, file.name, revision=found.commit)
    known = get_hf_file_metadata(url)
    if known.commit_hash is None:  # only the hub sends one
        raise DownloadError("captive_portal")
    if (known.etag, known.commit_hash) != (file.etag, found.commit):
        raise DownloadError("changed", name=file.name)
    headers = build_hf_headers()
    if urlsplit(known.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is the hub's alone
    with part.open("ab") as stream:
        untyped: Any = http_get
        untyped(
            known.location,
            stream,
            resume_size=start,
            headers=headers,
            expected_size=file.num_bytes,
            displayed_filename=file.name,
            tqdm_class=lambda **said: _Bar(file, said["initial"], report),
        )


@dataclass(eq=False)
class _Bar:
    """What http_get takes for its progress bar. Raises DownloadError once more bytes came than the
    hub listed."""

    file: HubFile
    num_bytes: int
    report: Report

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is held."""

    def update(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        name, expected = self.file.name, self.file.num_bytes
        if self.num_bytes > expected:
            raise DownloadError("wrong_size", name=name, expected=expected, got=self.num_bytes)
        self.report(name, self.num_bytes, "fetching")


# -- whether a file is what the hub listed ------------------------------------------------------


def objection(path: Path, file: HubFile, report: Callable[[int], None]) -> str | None:
    """report: called with the number of bytes read so far."""
    num_bytes = path.stat().st_size
    if num_bytes != file.num_bytes:
        return f"it has {num_bytes} bytes, not {file.num_bytes}"
    return None if hash_of(path, file.is_large, report) == file.etag else "its checksum differs"


def hash_of(path: Path, is_large: bool, report: Callable[[int], None]) -> str:
    digest = hashlib.sha256() if is_large else hashlib.sha1(usedforsecurity=False)
    if not is_large:  # as git names a blob
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            report(stream.tell())
    return digest.hexdigest()


def is_web_page(path: Path) -> bool:
    """Whether a page of HTML came in place of a file."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(64).lstrip().lower().startswith(PAGE_STARTS)


def _require_readable(part: Path, file: HubFile) -> None:
    """Raises DownloadError for weights that are as the hub lists them and damaged all the same."""
    from safetensors import SafetensorError, safe_open

    if not file.name.endswith(".safetensors"):
        return
    try:
        with safe_open(part, framework="numpy"):
            return
    except SafetensorError as error:
        part.unlink()
        raise DownloadError("damaged", name=file.name, reason=first_line(error)) from error


# -- the process ----------------------------------------------------------------------------


class Throttle:
    """Passes on reports, at most REPORTS_PER_S a second and at changes of phase."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._last_s = 0.0
        self._last: tuple[str, str] = ("", "")

    def __call__(self, name: str, num_bytes: int, phase: str) -> None:
        now = time.monotonic()
        if (name, phase) == self._last and now - self._last_s < 1.0 / REPORTS_PER_S:
            return
        self._last, self._last_s = (name, phase), now
        self._report(name, num_bytes, phase)


@contextmanager
def within_time(give_up: Callable[[DownloadError], None]) -> Iterator[threading.Timer]:
    """Yield the clock of a question, which may be cancelled. Call `give_up` from another thread
    where the block takes longer than QUESTION_S: a server may send the head of its answer letter by
    letter."""
    slow = DownloadError("slow_answer", seconds=f"{QUESTION_S:.0f}")
    timer = threading.Timer(QUESTION_S, give_up, (slow,))
    timer.daemon = True
    timer.start()
    try:
        yield timer
    finally:
        timer.cancel()


def say(**data: Any) -> None:
    try:
        print(json.dumps(data), flush=True)
    except OSError:  # the app is gone
        os._exit(1)


def run(model_id: str, flag: str = "", most_params: str = "") -> int:
    """The exit code. Every failure is a fault that was said. model_id: with --search words."""
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    report = Throttle(lambda name, read, phase: say(file=name, bytes=read, phase=phase))
    what = "The list of models" if flag == "--search" else model_id

    def give_up(error: BaseException) -> None:
        say(fault=asdict(fault_of(error, what, is_question=bool(flag))))
        os._exit(1)

    try:
        with within_time(give_up) as question:
            if flag == "--search":
                say(found=[asdict(each) for each in search(model_id, most_params)])
                return 0
            if flag == "--survey":
                say(survey=asdict(survey(model_id)))
                return 0

            def answered(found: Survey) -> None:
                question.cancel()
                say(survey=asdict(found))

            say(folder=str(fetch(model_id, answered, report)))
    except Exception as error:  # the edge of this process: whoever reads it must be told why
        say(fault=asdict(fault_of(error, what, is_question=bool(flag))))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:4]))
