"""Fetch one model into the hub's cache, continuing what an earlier attempt left; the process
that does it: `python -m localspec.machine.fetch MODEL_ID [--survey | --surveyed]`.

`fetch` takes a survey, checks that the disk has room, fetches file after file at the commit of the
survey, verifies all of them before any has its name in the cache, and returns the model's folder.
It may be killed at any moment: parts stay in a folder that nothing loads from, and are continued by
Range, as long as attempts bring something. Raises what the client raises, and DownloadError.

The process prints one JSON object a line: {"survey"}, {"file", "bytes"}, and last {"folder"} or
{"fault"}; at most REPORTS_PER_S lines a second while a file comes, and one at its end. It ends as
soon as nobody reads them, and imports neither torch nor the page.

huggingface_hub lists the files, verifies their checksums and names them in its cache. Its own
download of a snapshot starts an interrupted file anew, so the parts are received here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.core.errors import first_line
from localspec.core.files import free_disk, replacing
from localspec.core.units import gb
from localspec.machine.download_faults import DownloadError, fault_of
from localspec.machine.hub_files import (
    HubFile,
    Survey,
    hash_of_hub,
    limit_hub_client,
    search,
    searched,
    survey_model,
    understood,
)

# Left free beside a model, or the log and the system suffer.
SPARE_DISK_BYTES = 512 * 2**20
# Attempts at one file, in a row, that bring less than CHUNK_BYTES: a line that drops every few
# minutes still brings a large file.
MOST_IDLE_ATTEMPTS = 3
# Lines about a file that comes: the page is drawn anew no more often.
REPORTS_PER_S = 5.0
# The client's own 10 MiB would show nothing for long on a slow line, and lose as much at a kill.
CHUNK_BYTES = 64 * 1024

# Seconds for all answers to a question: the client asks again for 24 s where there is no network.
QUESTION_S = 120.0

# Called with a file's name and its bytes so far; with None when all are here and are checked.
Report = Callable[[str | None, int], None]


# -- the whole model ------------------------------------------------------------------------


def fetch(survey: Survey, report: Report) -> Path:
    """Fetch what a survey lists, and return the model's folder."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    if not any(file.name.endswith(".safetensors") for file in survey.files):
        raise DownloadError("format", model_id=survey.model_id)
    require_disk(survey)
    limit_hub_client()
    for folder in (survey.parts, survey.folder / "blobs", survey.lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(survey.lock):  # two starts of the app must not write one part
        blobs = {file: _blob(survey, file) for file in survey.files}
        absent = []
        for file, blob in blobs.items():
            if blob.exists() or survey.is_there(file):
                survey.part(file).unlink(missing_ok=True)
            else:
                absent.append(file)
        _receive_all(survey, absent, report)
        for file, blob in blobs.items():
            _give_name(survey, file, blob)
        shutil.rmtree(survey.parts)
    # Programs take this commit where a person names the model alone.
    with replacing(survey.folder / "refs" / "main") as part:
        part.write_text(survey.commit, encoding="utf-8")
    return survey.snapshot


def require_disk(survey: Survey) -> None:
    """Room for what is still to come, before the first byte of it."""
    needed = survey.num_bytes - sum(survey.held_bytes().values())
    free = free_disk(survey.folder)
    room = needed if free is None else max(0, free - SPARE_DISK_BYTES)
    if needed > room:
        reason = f"{gb(needed)} more are needed, and {gb(room)} can be used there"
        place, model_id = survey.folder.parent, survey.model_id
        raise DownloadError("disk", model_id=model_id, place=place, reason=reason)


def _blob(survey: Survey, file: HubFile) -> Path:
    """Return where the hub's cache keeps the content of a file, and take over as its part what an
    earlier version of localspec left there."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    known = get_hf_file_metadata(hf_hub_url(survey.model_id, file.name, revision=survey.commit))
    if (known.commit_hash, known.size) != (survey.commit, file.num_bytes):
        reason = "the hub serves another version than it lists"
        raise DownloadError("file", name=file.name, reason=reason)
    with understood():
        blob = survey.folder / "blobs" / hash_of_hub(known.etag)
    old = blob.with_name(f"{blob.name}.incomplete")
    if old.is_file() and not survey.part(file).is_file():
        os.replace(old, survey.part(file))
    return blob


def _receive_all(survey: Survey, files: Sequence[HubFile], report: Report) -> None:
    """Receive the files, until all their parts are what the hub lists."""
    from huggingface_hub import HfApi

    for _ in range(2):  # wrong bytes once may be an old part; twice they are what is sent
        for file in files:
            _receive(survey, file, report)
            report(file.name, file.num_bytes)
        report(None, survey.num_bytes)
        with understood():
            result = HfApi().verify_repo_checksums(
                survey.model_id, revision=survey.commit, local_dir=survey.parts
            )
        wrong_names = {mismatch["path"] for mismatch in result.mismatches} | set(result.extra_paths)
        for file in files:
            if file.name in wrong_names:
                survey.part(file).unlink()
            else:
                _require_readable(survey.part(file))
        files = [file for file in files if file.name in wrong_names]
        if not files:
            return
    reason = "its checksum is not the one that the hub lists, also after it was fetched once more"
    raise DownloadError("file", name=files[0].name, reason=reason)


def _require_readable(part: Path) -> None:
    """Raise DownloadError for weights that are as the hub lists them and damaged all the same."""
    from safetensors import SafetensorError, safe_open

    if part.suffix != ".safetensors":
        return
    try:
        with safe_open(part, framework="numpy"):
            return
    except SafetensorError as error:
        part.unlink()
        reason = f"it is damaged on the hub itself ({first_line(error)})"
        raise DownloadError("file", name=part.name, reason=reason) from error


def _give_name(survey: Survey, file: HubFile, blob: Path) -> None:
    """Move a part into the hub's cache, and give it its name in the snapshot."""
    from huggingface_hub import hf_hub_download

    if survey.part(file).is_file():
        os.replace(survey.part(file), blob)
    # The client finds the blob and fetches nothing.
    place = Path(hf_hub_download(survey.model_id, file.name, revision=survey.commit))
    if not place.is_symlink():  # where there are no links it was copied
        blob.unlink(missing_ok=True)


# -- one file -------------------------------------------------------------------------------


def _receive(survey: Survey, file: HubFile, report: Report) -> None:
    """Receive a file until its part is as long as the file. Each attempt goes on from the last
    one's end."""
    import httpx2

    part, num_idle = survey.part(file), 0
    while True:
        before = _length(part, file)
        try:
            return _ask_for_rest(survey, file, before, report)
        except (httpx2.ReadError, OSError) as error:
            # The client goes on by itself after all but a connection that is cut, for which it has
            # httpx2's error, and a length that was not the promised one, for which it has a plain
            # one. Its other errors and those of the disk are for the caller.
            is_short = type(error) is OSError and error.errno is None
            if not is_short and not isinstance(error, httpx2.ReadError):
                raise
            num_bytes = _length(part, file)
            num_idle = 0 if num_bytes - before >= CHUNK_BYTES else num_idle + 1
            if num_idle == MOST_IDLE_ATTEMPTS and is_short:
                raise _wrong_length(file, num_bytes) from error
            if num_idle == MOST_IDLE_ATTEMPTS:
                raise


def _length(part: Path, file: HubFile) -> int:
    """Bytes of the part that can be gone on from; one that is too long is none at all."""
    if not part.is_file():
        return 0
    if part.stat().st_size > file.num_bytes:
        part.unlink()
        return 0
    return part.stat().st_size


def _wrong_length(file: HubFile, num_bytes: int) -> DownloadError:
    reason = f"it has {file.num_bytes} bytes, but the server keeps sending {num_bytes}"
    return DownloadError("file", name=file.name, reason=reason)


def _ask_for_rest(survey: Survey, file: HubFile, start: int, report: Report) -> None:
    """Receive what a part lacks. The client keeps no part of a file that it fetches itself: what
    has arrived of 5 GB would be lost with the connection."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    untyped: Any = http_get
    with survey.part(file).open("ab") as stream:
        untyped(
            # It leads to where the file lies. The client takes the token to no other host.
            hf_hub_url(survey.model_id, file.name, revision=survey.commit),
            stream,
            resume_size=start,
            headers=build_hf_headers(),
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
    reported_s: float = 0.0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is held."""

    def update(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.file.num_bytes:
            raise _wrong_length(self.file, self.num_bytes)
        if time.monotonic() - self.reported_s >= 1.0 / REPORTS_PER_S:
            self.reported_s = time.monotonic()
            self.report(self.file.name, self.num_bytes)


# -- the process ----------------------------------------------------------------------------


@contextmanager
def within_time(give_up: Callable[[DownloadError], None]) -> Iterator[None]:
    """Call `give_up` from another thread where the block takes longer than QUESTION_S: a server may
    send the head of its answer letter by letter."""
    slow = DownloadError("answer", reason=f"no end of it came within {QUESTION_S:.0f} seconds")
    timer = threading.Timer(QUESTION_S, give_up, (slow,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(**data: Any) -> None:
    try:
        print(json.dumps(data), flush=True)
    except OSError:  # the app is gone
        os._exit(1)


def run(model_id: str, flag: str = "", most_params: str = "") -> int:
    """Return the exit code. Every failure is a fault that was said. model_id: with --search words.
    flag: with --surveyed the survey comes through stdin, and the hub is not asked again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    what = "The list of models" if flag == "--search" else model_id
    is_question = flag in ("--search", "--survey")

    def say_fault(error: BaseException) -> None:
        say(fault=asdict(fault_of(error, what, is_question)))

    def give_up(error: BaseException) -> None:
        say_fault(error)
        os._exit(1)

    try:
        with within_time(give_up):
            if flag == "--search":
                say(found=[searched(model) for model in search(model_id, most_params)])
                return 0
            is_known = flag == "--surveyed"
            survey = Survey.from_dict(json.load(sys.stdin)) if is_known else survey_model(model_id)
        say(survey=asdict(survey))
        if not is_question:
            say(folder=str(fetch(survey, lambda name, read: say(file=name, bytes=read))))
    except Exception as error:  # the edge of this process: whoever reads it must be told why
        say_fault(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:4]))
