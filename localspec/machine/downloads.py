"""Downloads of the app: one model at a time, in a process that fetches (see fetch).

`ask` queues a model or goes on with one, `pause` ends its process and keeps what arrived, `cancel`
also deletes the parts. `downloads` is a snapshot, safe to take from any thread. Unfinished ones are
kept in a file and listed again, paused, at the next start; none starts by itself, and how much is
here is read from the cache. `survey` asks the hub and writes nothing; a download of what was
surveyed fetches just that, but after a failure the hub is asked anew.

It is a process, not a thread, because the hub's client is offline for a whole process, and the
app's must stay so.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from localspec.core.config import PROJECT_FOLDER
from localspec.core.files import read_json, replacing
from localspec.core.units import clock, gb
from localspec.machine.download_faults import OF_QUESTION, DownloadFault, fault
from localspec.machine.hub_files import Survey
from localspec.machine.model import Model

WORKER = (sys.executable, "-m", "localspec.machine.fetch")
# The one place that may call out. Xet's own transfers cannot be continued after a crash, plain
# ones with Range can.
ONLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_XET": "1",
}
SPEED_WINDOW_S = 8.0

State = Literal["waiting", "asking", "fetching", "checking", "paused", "failed", "done"]
# States of the one whose process runs; one that was paused and resumed meanwhile is waiting.
RUNNING = ("asking", "fetching", "checking")
UNDER_WAY = ("waiting", *RUNNING)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Download:
    """One model as it is now. held: bytes that are here, by file. survey: None until the hub was
    asked. asks_anew: a survey may be out
    of date. samples: (file, seconds, bytes) of the last seconds and of the file that is being
    fetched, oldest first."""

    model_id: str
    state: State
    held: Mapping[str, int] = field(default_factory=dict)
    survey: Survey | None = None
    asks_anew: bool = False
    fault: DownloadFault | None = None
    samples: tuple[tuple[str, float, int], ...] = ()

    @property
    def num_bytes(self) -> int | None:
        return None if self.survey is None else self.survey.num_bytes

    @property
    def have_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def is_under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def bytes_per_s(self) -> float | None:
        if self.state != "fetching" or len(self.samples) < 2:
            return None
        (_, first_s, first), (_, last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s and last > first else None

    @property
    def seconds_left(self) -> float | None:
        speed = self.bytes_per_s
        if speed is None or self.num_bytes is None:
            return None
        return (self.num_bytes - self.have_bytes) / speed


class Downloads:
    """All downloads of one app. path: of the list of unfinished ones. environment: added to that of
    the process that fetches."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._environment = dict(environment or {})
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._running: str | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._surveys = dict[str, Survey]()
        self._downloads = {
            model_id: with_held_bytes(Download(model_id, "paused", survey=found))
            for model_id, found in load_unfinished(path).items()
        }

    @property
    def downloads(self) -> tuple[Download, ...]:
        with self._changed:
            return tuple(self._downloads.values())

    def find(self, model_id: str) -> Download | None:
        with self._changed:
            return self._downloads.get(model_id)

    @property
    def surveys(self) -> dict[str, Survey]:
        """What is known of each model that the hub was asked for."""
        with self._changed:
            listed = self._downloads.values()
            return self._surveys | {one.model_id: one.survey for one in listed if one.survey}

    def survey(self, model_id: str) -> Survey | DownloadFault:
        """Exactly what would be fetched; asks the hub, in a process of its own, and waits."""
        said = self._asked(model_id, "--survey")
        if isinstance(said, DownloadFault):
            return said
        with self._changed:
            self._surveys[model_id] = Survey.from_dict(said["survey"])
            return self._surveys[model_id]

    def search(self, words: str, most_params: str) -> tuple[Model, ...] | DownloadFault:
        """As hub_files.search, in a process of its own."""
        said = self._asked(words, "--search", most_params)
        if isinstance(said, DownloadFault):
            return said
        return tuple(Model(**each) for each in said["found"])

    def _asked(self, about: str, *flags: str) -> dict[str, Any] | DownloadFault:
        """The answer of a process that asks the hub once."""
        with self._start(about, *flags) as process:
            lines = list(_said_by(process))
        for line in lines:
            if "fault" in line:
                return DownloadFault(**line["fault"])
            if "survey" in line or "found" in line:
                return line
        return ended(about, process, **OF_QUESTION)

    def ask(self, model_id: str) -> None:
        """Queue a model, or go on with one. Harmless while it is under way."""
        with self._changed:
            new = Download(model_id, "paused", survey=self._surveys.get(model_id))
            known = self._downloads.get(model_id, with_held_bytes(new))
            if known.is_under_way:
                return
            anew = known.state == "failed"
            self._put(replace(known, state="waiting", asks_anew=anew, fault=None, samples=()))
            self._keep()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="downloads", daemon=True)
                self._thread.start()

    def pause(self, model_id: str) -> None:
        """What arrived stays."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is None or not known.is_under_way:
                return
            self._put(stopped(known, "paused"))
            if self._running == model_id and self._process is not None:
                self._process.kill()  # a stopped process takes no other signal

    def cancel(self, model_id: str) -> None:
        """Forget it, and delete the parts; files that are whole stay in the cache."""
        self.pause(model_id)
        with self._changed:
            self._changed.wait_for(lambda: self._running != model_id)
            known = self._downloads.pop(model_id, None)
            self._keep()
        if known is not None and known.survey is not None:
            shutil.rmtree(known.survey.parts, ignore_errors=True)

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
            thread = self._thread
            if self._process is not None:
                self._process.kill()  # a stopped process takes no other signal
        if thread is not None:
            thread.join(timeout=10.0)

    # the thread that runs one process after the other

    def _work(self) -> None:
        while True:
            with self._changed:
                waiting = [one for one in self._downloads.values() if one.state == "waiting"]
                if self._is_closed or not waiting:
                    self._thread = None  # a later `ask` starts another
                    return
                model_id = self._running = waiting[0].model_id
                self._put(replace(waiting[0], state="asking"))
                survey = None if waiting[0].asks_anew else waiting[0].survey
                flags = () if survey is None else ("--surveyed",)
                process = self._process = self._start(model_id, *flags)
            try:
                with process:
                    if survey is not None:
                        _send(process, survey)
                    for line in _said_by(process):
                        self.take_line(model_id, line)
                self._settle(model_id, process)
            finally:
                with self._changed:
                    self._process = self._running = None
                    self._changed.notify_all()

    def _start(self, model_id: str, *flags: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*WORKER, model_id, *flags],
            cwd=PROJECT_FOLDER,
            env={**os.environ, **ONLINE, **self._environment},
            stdin=subprocess.PIPE,
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
                self._put(with_held_bytes(replace(known, survey=found, state="fetching")))
                self._keep()
            elif "file" in line:
                self._put(advanced(known, line))
            elif "fault" in line:
                self._put(stopped(known, "failed", DownloadFault(**line["fault"])))
            elif "folder" in line:
                self._put(replace(known, state="done"))
                self._keep()

    def _settle(self, model_id: str, process: subprocess.Popen[str]) -> None:
        """The process is over; if it did not say how, it died."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is not None and known.state in RUNNING and not self._is_closed:
                self._put(stopped(known, "failed", ended(model_id, process)))

    def _put(self, download: Download) -> None:
        self._downloads[download.model_id] = download

    def _keep(self) -> None:
        unfinished = [each for each in self._downloads.values() if each.state != "done"]
        try:
            save_unfinished(self._path, {each.model_id: each.survey for each in unfinished})
        except OSError as error:  # the parts are kept all the same; a new click finds them
            log.warning("unfinished downloads cannot be remembered: %s", error)


def ended(about: str, process: subprocess.Popen[str], **ending: str) -> DownloadFault:
    """Return the fault of a process that ended without saying why."""
    reason = f"the program that fetches ended without saying why (exit code {process.returncode})"
    return fault("other", model_id=about, reason=reason, **ending)


def _send(process: subprocess.Popen[str], survey: Survey) -> None:
    """Give a process the survey that it would else ask the hub for."""
    assert process.stdin is not None, "it was started with a pipe"
    with suppress(OSError), process.stdin:  # it was killed
        json.dump(asdict(survey), process.stdin)


def _said_by(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None, "it was started with a pipe"
    for line in process.stdout:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # killed in the middle of a line
            continue


# -- how a download changes -----------------------------------------------------------------


def with_held_bytes(known: Download) -> Download:
    """With the bytes that are really on this disk."""
    if known.survey is None:
        return known
    return replace(known, held=known.survey.held_bytes())


def stopped(known: Download, state: State, why: DownloadFault | None = None) -> Download:
    """The last report may be old, so what is here is read from the disk."""
    return replace(with_held_bytes(known), state=state, fault=why, samples=())


def advanced(known: Download, line: Mapping[str, Any], now_s: float | None = None) -> Download:
    """Return a download after one report of progress; now_s: None reads the clock. A report without
    a file says that all are here and the check begins."""
    name = line["file"]
    if name is None:
        return replace(known, state="checking", samples=())
    moved = replace(known, state="fetching", held={**known.held, name: int(line["bytes"])})
    now_s = time.monotonic() if now_s is None else now_s
    recent = [one for one in known.samples if one[0] == name and now_s - one[1] <= SPEED_WINDOW_S]
    return replace(moved, samples=(*recent, (name, now_s, moved.have_bytes)))


# -- kept over restarts ---------------------------------------------------------------------


def load_unfinished(path: Path) -> dict[str, Survey | None]:
    """By model; None where the hub was never reached. A file that cannot be read is an empty one:
    the parts are in the hub's cache, and a new click continues them."""
    try:
        entries = read_json(path)
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


WORDS: Mapping[State, str] = {
    "waiting": "waiting for the download before it",
    "asking": "asking the hub what belongs to it",
    "checking": "checking what arrived, {amount} here",
    "paused": "paused, {amount} here",
    "failed": "stopped, {amount} here",
    "done": "complete, {have}, every file checked",
}


def so_far(download: Download) -> str:
    """ "3.1 of 5.0 GB": how much of it is here."""
    have = gb(download.have_bytes)
    if download.num_bytes is None:
        return f"{have} of unknown size"
    total = gb(download.num_bytes)
    return f"{have.removesuffix(total[-3:])} of {total}"


def in_words(download: Download) -> str:
    """One line: how far, how fast, how long."""
    amount = so_far(download)
    if download.state == "failed" and download.num_bytes is None:
        return "stopped"
    if download.state != "fetching":
        return WORDS[download.state].format(amount=amount, have=gb(download.have_bytes))
    speed, left = download.bytes_per_s, download.seconds_left
    parts = [amount]
    if speed is not None:
        parts.append(f"{speed / 1e6:.1f} MB/s" if speed >= 1e6 else f"{gb(speed)}/s")
    if left is not None:
        parts.append(f"{clock(left)} left")
    return ", ".join(parts)
