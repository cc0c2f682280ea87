"""Downloads of the app: one model at a time, in a process that fetches (see fetch).

Contract: `ask` queues a model, `pause` ends its process and keeps what arrived, `resume` continues,
`cancel` also deletes the parts. `downloads` is a snapshot, safe to take at any moment and from any
thread. Unfinished ones are kept in a file and listed again, paused, at the next start; none starts
by itself, and how much is here is read from the cache. `close` ends the process that runs.
`survey` asks the hub and writes nothing. `in_words` says how far a download is, how fast and how
long it will take; speed is measured over the last SPEED_WINDOW_S seconds of fetching, in one file.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from localspec.config import PROJECT_FOLDER
from localspec.files import replacing
from localspec.machine.download_faults import TRY_AGAIN, DownloadFault
from localspec.machine.hub_files import Survey, gb

WORKER = "localspec.machine.fetch"
# The app keeps the hub's client offline; this process is the one place that may call out. Xet's
# own transfers cannot be continued after a crash, plain ones with Range can.
ONLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
SPEED_WINDOW_S = 8.0

State = Literal["waiting", "asking", "fetching", "checking", "paused", "failed", "done"]
# States of the one whose process runs; one that was paused and resumed meanwhile is waiting.
RUNNING = ("asking", "fetching", "checking")
UNDER_WAY = ("waiting", *RUNNING)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileProgress:
    name: str
    num_bytes: int
    have_bytes: int
    is_checked: bool = False


@dataclass(frozen=True)
class Download:
    """One model as it is now. survey: None until the hub was asked. samples: (seconds, bytes) of
    the last seconds and of the file that is being fetched, oldest first."""

    model_id: str
    state: State
    files: tuple[FileProgress, ...] = ()
    survey: Survey | None = None
    fault: DownloadFault | None = None
    samples: tuple[tuple[float, int], ...] = ()

    @property
    def num_bytes(self) -> int | None:
        return None if self.survey is None else self.survey.num_bytes

    @property
    def have_bytes(self) -> int:
        return sum(file.have_bytes for file in self.files)

    @property
    def is_under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def bytes_per_s(self) -> float | None:
        if self.state != "fetching" or len(self.samples) < 2:
            return None
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None

    @property
    def seconds_left(self) -> float | None:
        speed = self.bytes_per_s
        if speed is None or self.num_bytes is None:
            return None
        return (self.num_bytes - self.have_bytes) / speed


def with_sample(
    samples: tuple[tuple[float, int], ...], now_s: float, have_bytes: int
) -> tuple[tuple[float, int], ...]:
    kept = tuple(each for each in samples if now_s - each[0] <= SPEED_WINDOW_S)
    return (*kept, (now_s, have_bytes))


class Downloads:
    """All downloads of one app. path: of the list of unfinished ones. environment: added to that of
    the process that fetches."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._environment = dict(environment or {})
        self._changed = threading.Condition()
        self._downloads: dict[str, Download] = {}
        self._process: subprocess.Popen[str] | None = None
        self._running: str | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        for model_id, found in load_unfinished(path).items():
            self._downloads[model_id] = _as_held(Download(model_id, "paused", survey=found))

    @property
    def downloads(self) -> tuple[Download, ...]:
        with self._changed:
            return tuple(self._downloads.values())

    def find(self, model_id: str) -> Download | None:
        with self._changed:
            return self._downloads.get(model_id)

    def survey(self, model_id: str) -> Survey | DownloadFault:
        """Exactly what would be fetched; asks the hub, in a process of its own, and waits."""
        lines: list[dict[str, Any]] = []
        with self._start(model_id, "--survey") as process:
            _read(process, lines.append)
        for line in lines:
            if "survey" in line:
                return Survey.from_dict(line["survey"])
            if "fault" in line:
                return DownloadFault(**line["fault"])
        return _vanished(process)

    def ask(self, model_id: str) -> None:
        """Queue a model, or go on with one. Harmless while it is under way."""
        with self._changed:
            known = self._downloads.get(model_id) or Download(model_id, "waiting")
            if known.is_under_way and model_id in self._downloads:
                return
            self._downloads[model_id] = replace(known, state="waiting", fault=None, samples=())
            self._keep()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="downloads", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    resume = ask

    def pause(self, model_id: str) -> None:
        """What arrived stays."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is None or not known.is_under_way:
                return
            self._put(_stopped(known, "paused", None))
            if self._running == model_id and self._process is not None:
                self._process.terminate()

    def cancel(self, model_id: str) -> None:
        """Forget it, and delete the parts; files that are whole stay in the cache."""
        self.pause(model_id)
        with self._changed:
            while self._running == model_id:
                self._changed.wait(0.1)
            known = self._downloads.pop(model_id, None)
            self._keep()
        if known is not None and known.survey is not None:
            for file in known.survey.files:
                known.survey.place.part(file).unlink(missing_ok=True)

    def forget(self, model_id: str) -> None:
        """Take one that is over off the list."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is not None and not known.is_under_way:
                del self._downloads[model_id]
                self._keep()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            if self._process is not None:
                self._process.terminate()
            self._changed.notify_all()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=10.0)

    # the thread that runs one process after the other

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                waiting = [one for one in self._downloads.values() if one.state == "waiting"]
                if not waiting:
                    self._thread = None  # a later `ask` starts another
                    return
                model_id = self._running = waiting[0].model_id
                self._put(replace(waiting[0], state="asking"))
                process = self._process = self._start(model_id)
            try:
                with process:
                    _read(process, lambda line, name=model_id: self.take_line(name, line))  # type: ignore[misc]
                self._settle(model_id, process)
            finally:
                with self._changed:
                    self._process = self._running = None
                    self._changed.notify_all()

    def _start(self, model_id: str, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, model_id, *flags],
            cwd=PROJECT_FOLDER,
            env={**os.environ, **ONLINE, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )

    def take_line(self, model_id: str, line: dict[str, Any]) -> None:
        """Take in one line of the process that fetches."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is None or known.state not in RUNNING:  # paused: what still comes is old
                return
            if "survey" in line:
                found = Survey.from_dict(line["survey"])
                self._put(_as_held(replace(known, survey=found, state="fetching")))
                self._keep()
            elif "file" in line:
                self._put(advanced(known, line))
            elif "fault" in line:
                self._put(_stopped(known, "failed", DownloadFault(**line["fault"])))
            elif "folder" in line:
                self._put(replace(known, state="done"))
                self._keep()

    def _settle(self, model_id: str, process: subprocess.Popen[str]) -> None:
        """The process is over; if it did not say how, it died."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is not None and known.state in RUNNING and not self._is_closed:
                self._put(_stopped(known, "failed", _vanished(process)))

    def _put(self, download: Download) -> None:
        self._downloads[download.model_id] = download

    def _keep(self) -> None:
        unfinished = [each for each in self._downloads.values() if each.state != "done"]
        try:
            save_unfinished(self._path, {each.model_id: each.survey for each in unfinished})
        except OSError as error:  # the parts are kept all the same; a new click finds them
            log.warning("unfinished downloads cannot be remembered: %s", error)


def _read(process: subprocess.Popen[str], take: Callable[[dict[str, Any]], object]) -> None:
    assert process.stdout is not None, "it was started with a pipe"
    for line in process.stdout:
        try:
            take(json.loads(line))
        except json.JSONDecodeError:  # killed in the middle of a line
            continue


def _vanished(process: subprocess.Popen[str]) -> DownloadFault:
    return DownloadFault(
        "worker_ended",
        f"The program that fetches ended without saying why (exit code {process.returncode}).",
        TRY_AGAIN,
    )


def _as_held(known: Download) -> Download:
    """With the bytes that are really on this disk."""
    if known.survey is None:
        return known
    held = known.survey.held_bytes()
    files = [FileProgress(e.name, e.num_bytes, held[e.name]) for e in known.survey.files]
    return replace(known, files=tuple(files))


def _stopped(known: Download, state: State, fault: DownloadFault | None) -> Download:
    """The last report may be old, so what is here is read from the disk."""
    return replace(_as_held(known), state=state, fault=fault, samples=())


def advanced(known: Download, line: Mapping[str, Any]) -> Download:
    """After one report of progress. While a file is checked, its bytes are all here."""
    phase = line["phase"]
    files = tuple(
        replace(
            each,
            have_bytes=int(line["bytes"]) if phase == "fetching" else each.num_bytes,
            is_checked=phase == "done",
        )
        if each.name == line["file"]
        else each
        for each in known.files
    )
    state: State = "checking" if phase == "checking" else "fetching"
    moved = replace(known, files=files, state=state)
    if phase != "fetching":
        return replace(moved, samples=())
    return replace(moved, samples=with_sample(known.samples, time.monotonic(), moved.have_bytes))


# -- kept over restarts ---------------------------------------------------------------------


def load_unfinished(path: Path) -> dict[str, Survey | None]:
    """By model; None where the hub was never reached. A file that cannot be read is an empty one:
    the parts are in the hub's cache, and a new click continues them."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(each["model_id"]): Survey.from_dict(each["survey"]) if each["survey"] else None
            for each in entries
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        log.warning("the list of unfinished downloads in %s cannot be read", path)
        return {}


def save_unfinished(path: Path, unfinished: Mapping[str, Survey | None]) -> None:
    """Raises OSError."""
    data = [
        {"model_id": model_id, "survey": None if found is None else asdict(found)}
        for model_id, found in unfinished.items()
    ]
    with replacing(path) as part:
        part.write_text(json.dumps(data), encoding="utf-8")


# -- in words -------------------------------------------------------------------------------


def so_far(download: Download) -> str:
    """ "3.1 of 5.0 GB": how much of it is here."""
    if download.num_bytes is None:
        return f"{gb(download.have_bytes)} of unknown size"
    have, total = gb(download.have_bytes), gb(download.num_bytes)
    same_unit = have.split(" ")[1] == total.split(" ")[1]
    return f"{have.split(' ')[0] if same_unit else have} of {total}"


def in_words(download: Download) -> str:
    """One line: how far, how fast, how long."""
    amount = so_far(download)
    if download.state == "waiting":
        return "waiting for the download before it"
    if download.state == "asking":
        return "asking the hub what belongs to it"
    if download.state == "paused":
        return f"paused, {amount} here"
    if download.state == "failed":
        return f"stopped, {amount} here" if download.num_bytes is not None else "stopped"
    if download.state == "done":
        return f"complete, {gb(download.have_bytes)}, every file checked"
    if download.state == "checking":
        return f"checking what arrived, {amount} here"
    speed, left = download.bytes_per_s, download.seconds_left
    parts = [amount]
    if speed is not None:
        parts.append(pace(speed))
    if left is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def pace(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s >= 1e6 else f"{gb(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
