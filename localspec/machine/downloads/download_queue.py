"""The app's side of downloads: starts and stops the process that fetches, one model at a time.

Contract: `ask` queues a model, `pause` ends its process and keeps what arrived, `resume` goes on,
`cancel` also deletes what arrived and is of no use yet. `downloads` is a snapshot, safe to take at
any moment and from any thread. Unfinished ones are listed again, paused, at the next start; none
goes on by itself. `close` ends the process that runs. `survey` is a dry run: it asks, and writes
nothing.

Not here: what is fetched and checked (fetch), words (progress).
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from localspec.config import PROJECT_FOLDER
from localspec.machine.downloads import ledger
from localspec.machine.downloads.faults import TRY_AGAIN, Fault
from localspec.machine.downloads.ledger import Unfinished
from localspec.machine.downloads.listing import Survey, held_bytes, shelfmark, survey_from
from localspec.machine.downloads.progress import Download, FileProgress, State, with_sample

WORKER = "localspec.machine.downloads.worker"
# The app keeps the hub's client offline; this process is the one place that may call out. Xet's
# own transfers cannot be gone on with after a crash, plain ones with Range can.
ONLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_XET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

# States of the one whose process runs; one that was paused and resumed meanwhile is waiting.
RUNNING = ("asking", "fetching", "checking")

log = logging.getLogger(__name__)


class Downloads:
    """All downloads of one app. path: the ledger's file. environment: added to the worker's."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._environment = dict(environment or {})
        self._changed = threading.Condition()
        self._downloads: dict[str, Download] = {}
        self._surveys: dict[str, Survey] = {}
        self._process: subprocess.Popen[str] | None = None
        self._running: str | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        for each in ledger.load(path):
            self._downloads[each.model_id] = _found_again(each)
            if each.survey is not None:
                self._surveys[each.model_id] = each.survey

    @property
    def downloads(self) -> tuple[Download, ...]:
        with self._changed:
            return tuple(self._downloads.values())

    def find(self, model_id: str) -> Download | None:
        with self._changed:
            return self._downloads.get(model_id)

    def survey(self, model_id: str) -> Survey | Fault:
        """Exactly what would be fetched; asks the hub, in a process of its own, and waits."""
        lines: list[dict[str, Any]] = []
        with self._start(model_id, "--survey") as process:
            _read(process, lines.append)
        for line in lines:
            if "survey" in line:
                return survey_from(line["survey"])
            if "fault" in line:
                return Fault(**line["fault"])
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
            self._put(self._stopped(known, "paused", None))
            if self._running == model_id and self._process is not None:
                self._process.terminate()

    def cancel(self, model_id: str) -> None:
        """Forget it, and delete the parts; files that are whole stay in the cache."""
        self.pause(model_id)
        with self._changed:
            while self._running == model_id:
                self._changed.wait(0.1)
            self._downloads.pop(model_id, None)
            found = self._surveys.pop(model_id, None)
            self._keep()
        if found is not None:
            place = shelfmark(found)
            for file in found.files:
                place.part(file).unlink(missing_ok=True)

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
                    _read(process, lambda line, name=model_id: self._take(name, line))  # type: ignore[misc]
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

    def _take(self, model_id: str, line: dict[str, Any]) -> None:
        """One line of the worker."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is None or known.state not in RUNNING:  # paused: what still comes is old
                return
            if "survey" in line:
                self._surveys[model_id] = found = survey_from(line["survey"])
                self._put(replace(_as_held(model_id, found), state="fetching"))
                self._keep()
            elif "file" in line:
                self._put(_advanced(known, line))
            elif "fault" in line:
                self._put(self._stopped(known, "failed", Fault(**line["fault"])))
            elif "folder" in line:
                self._put(replace(known, state="done"))
                self._keep()

    def _settle(self, model_id: str, process: subprocess.Popen[str]) -> None:
        """The process is over; if it did not say how, it died."""
        with self._changed:
            known = self._downloads.get(model_id)
            if known is not None and known.state in RUNNING and not self._is_closed:
                self._put(self._stopped(known, "failed", _vanished(process)))

    def _stopped(self, known: Download, state: State, fault: Fault | None) -> Download:
        """With what is really here; the last report may be old."""
        found = self._surveys.get(known.model_id)
        held = known if found is None else _as_held(known.model_id, found)
        return replace(held, state=state, fault=fault, samples=())

    def _put(self, download: Download) -> None:
        self._downloads[download.model_id] = download

    def _keep(self) -> None:
        unfinished = [
            Unfinished(one.model_id, self._surveys.get(one.model_id))
            for one in self._downloads.values()
            if one.state != "done"
        ]
        try:
            ledger.save(self._path, unfinished)
        except OSError as error:  # the parts are kept all the same; a new click finds them
            log.warning("unfinished downloads cannot be remembered: %s", error)


def _read(process: subprocess.Popen[str], take: Callable[[dict[str, Any]], object]) -> None:
    assert process.stdout is not None, "it was started with a pipe"
    for line in process.stdout:
        try:
            take(json.loads(line))
        except json.JSONDecodeError:  # killed in the middle of a line
            continue


def _vanished(process: subprocess.Popen[str]) -> Fault:
    return Fault(
        "worker_ended",
        f"The program that fetches ended without saying why (exit code {process.returncode}).",
        TRY_AGAIN,
    )


def _found_again(each: Unfinished) -> Download:
    if each.survey is None:
        return Download(each.model_id, "paused")
    return replace(_as_held(each.model_id, each.survey), state="paused")


def _as_held(model_id: str, found: Survey) -> Download:
    held = held_bytes(found)
    files = tuple(FileProgress(one.name, one.num_bytes, held[one.name]) for one in found.files)
    return Download(model_id, "paused", files, found.num_bytes)


def _advanced(known: Download, line: Mapping[str, Any]) -> Download:
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
