"""Which turns a selection of the Stats tab takes in."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

from localspec.chat.programs import ProgramService
from localspec.chat.service import ChatService
from localspec.core.backend import Message, Request
from localspec.web.routes import scope_of
from localspec.web.stats.selection import Selection, selection_of, week_begin
from tests.kit.services import ask, close, ended, open_service


class Log:
    """A service with one turn a day, of the last ten."""

    def turn_rows(self) -> list[dict[str, Any]]:
        first = week_begin() - timedelta(days=3)
        days = (first + timedelta(days=number) for number in range(10))
        return [
            {"started_at_utc": f"{day}T09:00:00.000+00:00", "model": "m", "source": "page"}
            for day in days
        ]


LOG = cast("ChatService", Log())


def test_the_last_seven_days_are_a_scope_of_figures_and_exports() -> None:
    selection = Selection("week")
    assert len(selection.rows(LOG)) == 7 and len(Selection("all").rows(LOG)) == 10
    assert selection.words == "in the last 7 days"
    assert selection_of(dict([selection.query.split("=")])) == selection
    scope, name = scope_of(LOG, "week", None)
    assert scope.since == str(week_begin()) and name == f"since-{week_begin()}"


def test_a_download_that_would_be_refused_is_not_offered(tmp_path: Path) -> None:
    """A browser says no more of it than that it failed."""
    from localspec.web.stats.tab import fill

    service, _ = open_service(tmp_path)
    assert "href" not in fill(service, Selection("session"))[0]
    assert "href" not in fill(service, Selection("conversation", None))[0]
    assert fill(service, Selection("all"))[0].count("href") == 4, "what was imported has no turn"
    reply = ask(service, "Tell me of owls.")
    for scope in ("session", "conversation", "all"):
        links = fill(service, Selection(scope, reply.handle))[0]
        assert links.count("href") == 5
    assert "/report" not in fill(service, Selection("all", source="api"))[0]
    close(service)


def test_the_turns_of_other_programs_are_apart_unless_they_are_asked_for(tmp_path: Path) -> None:
    from localspec.web.stats.tab import fill

    service, _ = open_service(tmp_path)
    ask(service, "Tell me of owls.")
    program = Request(
        messages=(Message("user", "Tell me of bees."),), max_tokens=40, workload="chat"
    )
    for _ in range(2):
        ended(service, ProgramService(service).answer(program))
    sources = {
        one: [row["source"] for row in Selection("all", source=one).rows(service)]
        for one in ("page", "api", "anyone")
    }
    assert sources == {"page": ["page"], "api": ["api"] * 2, "anyone": ["page", "api", "api"]}
    said = fill(service, Selection("all"))[1]
    assert "Your replies" in said and "1 turn, " in said
    assert "2 turns of other programs not counted" in said
    programs = Selection("all", source="api")
    said = fill(service, programs)[1]
    assert "The replies to other programs" in said and "not counted" not in said
    assert selection_of(dict(parse_qsl(programs.query))) == programs
    assert service.recent_gains()["demo-12m"].num_replies == 1
    close(service)
