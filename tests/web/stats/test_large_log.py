"""A log of 20,000 turns stays quick to look at, and the export of a log keeps nobody waiting.

Time is that of the processor, and asserted with all cases alone; in the suite the log has enough
turns for a page that draws each of them to be too large.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from localspec.chat.service import ChatService, Scope
from localspec.record.contents import reading
from localspec.record.store import Store
from localspec.web.stats.selection import Selection
from tests.kit.fakes import FakeBackend, session_info
from tests.kit.large_log import make_large_log
from tests.kit.tally import Tally

pytestmark = pytest.mark.slow

NUM_TURNS, NUM_IN_THE_SUITE = 20_000, 4_000
NUM_EXPORTED = 400  # an export reads turn by turn, however many there are
MAX_CPU_S = 1.0
MAX_CHARACTERS = 400_000


@contextmanager
def service_over(path: Path, num_turns: int) -> Iterator[ChatService]:
    make_large_log(path, num_turns)
    with closing(Store.open(path)) as store:
        service = ChatService(store, session_info, lambda report: FakeBackend())
        yield service
        service.close()


def cpu_s(act: Callable[[], object]) -> float:
    begun = time.thread_time()
    act()
    return time.thread_time() - begun


def test_it_is_listed_searched_and_drawn_quickly_and_in_little(
    tmp_path: Path, tally: Tally
) -> None:
    from localspec.web.stats.tab import fill

    drawn: list[str] = []
    num_turns = tally.size(NUM_IN_THE_SUITE, NUM_TURNS)
    with service_over(tmp_path / "localspec.db", num_turns) as service:
        assert len(service.turn_rows()) == num_turns + 1
        for what, act in (
            ("the list", lambda: service.conversations()),
            ("a search", lambda: service.conversations("word10 turn10")),
            ("Stats", lambda: drawn.extend(fill(service, Selection("all")))),
        ):
            tally.measured(what, cpu_s(act), MAX_CPU_S, "s of processor time")
    assert sum(map(len, drawn)) < MAX_CHARACTERS
    assert f"of {num_turns + 1:,} turns" in drawn[-1] and "x faster" in drawn[1]


def test_an_export_reads_part_by_part_while_pages_read_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it the list is read and a conversation is renamed, by another thread."""
    seen: list[str] = []
    read = Store.step_rows

    def steps(self: Store, turn_id: int) -> list[dict[str, object]]:
        if turn_id == NUM_EXPORTED // 2:
            other = threading.Thread(target=look)
            other.start()
            other.join(20)
            assert not other.is_alive()
        return read(self, turn_id)

    def look() -> None:
        service.rename(2, "another name")
        seen.extend(row.title for row in service.conversations('"turn3"'))

    monkeypatch.setattr(Store, "step_rows", steps)
    out = tmp_path / "out.jsonl"
    with service_over(tmp_path / "localspec.db", NUM_EXPORTED) as service:
        with reading(service.store, Scope()) as contents:
            assert len(contents.turns) == NUM_EXPORTED + 1
        service.export(Scope(), "jsonl", out)
    assert seen == ["another name"]
    assert "another name" not in out.read_text(), "the export is of the moment it began"
