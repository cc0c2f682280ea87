"""How far a download is, how fast, and how long it will take; in numbers and in words.

Contract: frozen and pure. Speed is measured over the last SPEED_WINDOW_S seconds of fetching, in
one file: what passes between two files is waiting, and a model begins with small ones. Without
two samples it is unknown, and so is the time left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localspec.machine.downloads.faults import Fault
from localspec.machine.downloads.fetch import gb

SPEED_WINDOW_S = 8.0

State = Literal["waiting", "asking", "fetching", "checking", "paused", "failed", "done"]
UNDER_WAY = ("waiting", "asking", "fetching", "checking")


@dataclass(frozen=True)
class FileProgress:
    name: str
    num_bytes: int
    have_bytes: int
    is_checked: bool = False


@dataclass(frozen=True)
class Download:
    """One model as it is now. num_bytes: None until the hub has said it. samples: (seconds,
    bytes) of late and of the file that is being fetched, oldest first."""

    model_id: str
    state: State
    files: tuple[FileProgress, ...] = ()
    num_bytes: int | None = None
    fault: Fault | None = None
    samples: tuple[tuple[float, int], ...] = ()

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
