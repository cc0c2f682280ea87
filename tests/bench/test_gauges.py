"""Readings of the machine, on files and clocks made by hand."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import psutil
import pytest
import torch

from localspec.bench.gauges import MemoryGauge, read_bandwidth

CPU = torch.device("cpu")


def test_the_peak_is_the_kernels_mark_since_it_was_restarted(tmp_path: Path) -> None:
    (tmp_path / "clear_refs").touch()
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n")
    gauge = MemoryGauge(tmp_path)
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert gauge.peak_bytes() == 2 * 2**20


def test_where_the_mark_cannot_be_restarted_the_present_size_is_given(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t       1 kB\n")
    found = MemoryGauge(tmp_path / "absent").peak_bytes()
    assert found == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_a_peak_that_has_passed_is_seen() -> None:
    gauge = MemoryGauge()
    if not gauge._has_restarted:
        pytest.skip("this system keeps no peak that can be restarted")
    before = gauge.peak_bytes()
    torch.ones(50_000_000)  # 200 MB, given back at once
    assert gauge.peak_bytes() - before > 100_000_000


def test_bandwidth_is_the_bytes_over_the_shortest_read() -> None:
    ticks = count()
    lengths = iter([3.0, 2.0, 0.5, *[1.0] * 100])
    at = [0.0]

    def now() -> float:
        if next(ticks) % 2:
            at[0] += next(lengths)
        return at[0]

    assert read_bandwidth(CPU, 4096, now) == pytest.approx(4096 / 0.5)


def test_without_room_for_the_array_bandwidth_is_unknown() -> None:
    assert read_bandwidth(CPU, 2**55) is None
