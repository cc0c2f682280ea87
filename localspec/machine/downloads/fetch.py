"""Fetch one model into the hub's cache, going on from whatever an earlier attempt left.

Contract: `fetch` surveys, checks that the disk has room, fetches file after file at the pinned
commit, verifies each before it is given its name in the cache, and returns the model's folder. It
may be killed at any moment: parts stay as `<hash>.incomplete` and are gone on from by Range. Each
file is attempted again a bounded number of times, and never without having gained a byte more
than MOST_IDLE_ATTEMPTS times. Raises what the client raises, and DownloadError.

huggingface_hub does the talking (survey, metadata, `http_get` with Range and retries, links in
its cache). Its own snapshot download starts a file anew when it was interrupted, so the parts are
kept here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localspec.files import replacing
from localspec.machine.downloads.faults import (
    PORTAL,
    DownloadError,
    Fault,
    changed,
    wrong_bytes,
    wrong_size,
)
from localspec.machine.downloads.listing import (
    HubFile,
    Shelfmark,
    Survey,
    held_bytes,
    shelfmark,
    survey,
)
from localspec.machine.downloads.verify import is_web_page, objection

# Left free beside a model, or the log and the system suffer.
SPARE_DISK_BYTES = 512 * 2**20
MOST_IDLE_ATTEMPTS = 3
MOST_ATTEMPTS = 50

# Called with a file's name, its bytes so far, and "fetching", "checking" or "done".
Report = Callable[[str, int, str], None]


def fetch(model_id: str, on_survey: Callable[[Survey], None], report: Report) -> Path:
    found = survey(model_id)
    on_survey(found)
    require_weights(found)
    require_disk(found)
    place = shelfmark(found)
    (place.folder / "blobs").mkdir(parents=True, exist_ok=True)
    for file in found.files:
        if not place.is_there(file):
            _fetch_file(found, place, file, report)
        report(file.name, file.num_bytes, "done")
    _write_ref(place)
    return place.snapshot


def require_weights(found: Survey) -> None:
    if not any(file.name.endswith(".safetensors") for file in found.files):
        raise DownloadError(
            Fault(
                "no_safetensors",
                f"{found.model_id} has no .safetensors weights, and other kinds can run code when "
                "opened.",
                "Choose a copy of the model that has them.",
            )
        )


def require_disk(found: Survey) -> None:
    """Room for what is still to come, before the first byte of it."""
    needed = found.num_bytes - sum(held_bytes(found).values())
    folder = _existing(shelfmark(found).folder)
    free = shutil.disk_usage(folder).free
    if needed and needed + SPARE_DISK_BYTES > free:
        raise DownloadError(
            Fault(
                "too_little_disk",
                f"{found.model_id} needs {gb(needed)} more on the disk of {folder}, and "
                f"{gb(max(0, free - SPARE_DISK_BYTES))} can be used there.",
                "Nothing was fetched. Free some space, or choose a smaller model.",
            )
        )


def gb(num_bytes: float) -> str:
    """Bytes as disks and the hub count them, in powers of ten."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.is_dir())


# -- one file -------------------------------------------------------------------------------


def _fetch_file(found: Survey, place: Shelfmark, file: HubFile, report: Report) -> None:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    name = repo_folder_name(repo_id=found.model_id, repo_type="model")
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # two starts of the app must not write one part
        if not place.blob(file).exists():
            _fetch_blob(found, place, file, report)
    _link(found, place, file)


def _fetch_blob(found: Survey, place: Shelfmark, file: HubFile, report: Report) -> None:
    part, why = place.part(file), None
    for _ in range(2):  # wrong bytes once may be an old part; twice they are what is sent
        _receive(found, part, file, report)
        why = objection(part, file, lambda read: report(file.name, read, "checking"))
        if why is None:
            os.replace(part, place.blob(file))
            return
        part.unlink()
    raise DownloadError(wrong_bytes(file.name, str(why)))


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
            raise DownloadError(PORTAL)
        idle = 0 if _length(part, file) > before else idle + 1
        if idle == MOST_IDLE_ATTEMPTS:
            break
    if isinstance(last, httpx2.TransportError):
        raise last
    raise DownloadError(wrong_size(file.name, file.num_bytes, _length(part, file))) from last


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
        raise DownloadError(PORTAL)
    if (known.etag, known.commit_hash) != (file.etag, found.commit):
        raise DownloadError(changed(file.name))
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
            tqdm_class=lambda **said: _Bar(file.name, said["initial"], report),
        )


@dataclass
class _Bar:
    """What http_get takes for its progress bar."""

    name: str
    num_bytes: int
    report: Report

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *raised: object) -> None:
        """Nothing is held."""

    def update(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.report(self.name, self.num_bytes, "fetching")


# -- its place in the cache -----------------------------------------------------------------


def _link(found: Survey, place: Shelfmark, file: HubFile) -> None:
    """The file's name in the snapshot. The client finds the blob and fetches nothing."""
    from huggingface_hub import hf_hub_download

    shown = Path(hf_hub_download(found.model_id, file.name, revision=found.commit))
    if not shown.is_symlink():  # where there are no links it was copied
        place.blob(file).unlink(missing_ok=True)


def _write_ref(place: Shelfmark) -> None:
    """Make this commit the one that is found by the model's name alone."""
    with replacing(place.folder / "refs" / "main") as part:
        part.write_text(place.commit, encoding="utf-8")
