"""Every figure of the log, the exports and the page follows from the steps of the turns.

The clock of a whole reply (`reply_ms`, `ttft_ms`) is the one thing that steps do not hold: of it,
all say what the log says.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sqlite3
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest

from localspec.chat.service import ChatService, ReplySettings, Scope
from localspec.core.backend import Chunk, Request
from localspec.core.decoding import OFF, SamplingParams, Step
from localspec.core.errors import EngineLost
from localspec.core.units import capital, compared, took
from localspec.drafters.registry import label_of
from localspec.record.markdown import STATISTICS, heading
from localspec.record.store import Store
from localspec.web.live import credited, footer, live_state
from localspec.web.proof.report import report_zip
from localspec.web.proof.tokens import token_view
from localspec.web.stats import figures as stats
from localspec.web.stats.log_plots import make_plots
from localspec.web.stats.tab import PANELS
from localspec.web.words import DASH, gain, number, percent, rate
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.services import close, ended, open_service
from tests.kit.waiting import until

SCRIPT = Script(reply="One two three four five six seven eight nine ten. " * 6, round_s=0.001)
DRAFTERS = ("draft_model", "ngram", OFF)
KINDS = ("mixed", "off", "lenient", "cancelled", "continued", "busy", "short", "mixed again")
COUNTS = (
    "num_draft_tokens", "num_checked_tokens", "num_accepted_tokens", "num_output_tokens",
    "num_drafts",
)  # fmt: skip
LEAST = 3.0  # times what decoding took, which plain decoding of the busy turn would have taken
Figures = dict[str, Any]


class Mixing(FakeBackend):
    """Several drafters by turns in one reply; the load changes where the message says busy."""

    def _step(self, request: Request, num_left: int, context_length: int) -> Step:
        drafter = DRAFTERS[self.num_rounds % len(DRAFTERS)]
        asked = request if request.drafter == OFF else replace(request, drafter=drafter)
        return super()._step(asked, num_left, context_length)

    def generate(self, request: Request, cancel: Any) -> Iterator[Chunk]:
        is_busy = "busy" in request.messages[-1].content
        for chunk in super().generate(request, cancel):
            if is_busy:
                unknown = chunk.stats.compared(None, LEAST * chunk.stats.decode_ms)
                chunk = replace(chunk, stats=unknown, plain_ms=())
            if request.max_tokens == 33 and chunk.stats.num_output_tokens > 15:
                cancel.set()
            yield chunk


@pytest.fixture(scope="module")
def logged_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatService]:
    """Its log has one turn of each kind, in the order of KINDS."""
    store = Store.open(tmp_path_factory.mktemp("home") / "localspec.db")
    made = ChatService(store, session_info, lambda report: Mixing(SCRIPT))
    made.start()
    handle: int | None = None
    for place, kind in enumerate(KINDS):
        settings = ReplySettings(
            SamplingParams(0.7 * (place % 2), seed=place),
            {"cancelled": 33, "short": 7, "mixed again": 50}.get(kind, 64),
            drafter=OFF if kind == "off" else "auto",
            checking="typical" if kind == "lenient" else "exact",
        )
        if kind == "continued":
            assert handle is not None
            reply = made.proceed(handle, settings)
        else:
            reply = made.submit(handle, f"{kind}: answer", settings)
        handle = ended(made, reply).handle
    yield made
    close(made)


def raw(service: ChatService, sql: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(str(service.store.path))) as db:
        db.row_factory = sqlite3.Row
        return [dict(row) for row in db.execute(sql)]


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def of_steps(steps: list[dict[str, Any]], reply_ms: float | None) -> Figures:
    """Every figure of these rounds, by the definitions of DESIGN's table of numbers."""
    drafted = [step for step in steps if step["num_draft_tokens"]]
    num = {name: sum(step[name] or 0 for step in steps) for name in COUNTS[:4]}
    made = Counter[str]()
    for step in drafted:
        made[step["drafter"]] += step["num_draft_tokens"]
    decode_ms = sum(step["draft_ms"] + step["verify_ms"] for step in steps)
    parts = [step["plain_ms"] for step in steps]
    plain_ms = None if None in parts or not drafted else sum(parts)
    is_short = num["num_output_tokens"] < 8
    plain_reply_ms = None
    if plain_ms is not None and reply_ms is not None:
        plain_reply_ms = reply_ms - decode_ms + plain_ms
    return {
        **num,
        "num_steps": len(steps),
        "num_drafts": len(drafted),
        "num_lenient_tokens": sum(step["num_lenient_tokens"] or 0 for step in steps),
        "drafted_by": dict(made),
        "drafter": made.most_common(1)[0][0] if made else OFF,
        "acceptance_rate": ratio(num["num_accepted_tokens"], num["num_draft_tokens"]),
        "draft_share": ratio(num["num_accepted_tokens"], num["num_output_tokens"]),
        "mean_accepted_length": 1 + num["num_accepted_tokens"] / len(drafted) if drafted else None,
        "mean_num_draft_tokens": ratio(num["num_draft_tokens"], len(drafted)),
        "tokens_per_second": ratio(1000 * num["num_output_tokens"], decode_ms),
        "decode_ms": decode_ms,
        "plain_decode_ms": plain_ms,
        "decode_speedup": None if is_short else ratio(plain_ms, decode_ms),
        "plain_reply_ms": plain_reply_ms,
        "speedup": None if is_short else ratio(plain_reply_ms, reply_ms),
    }


@pytest.fixture(scope="module")
def expected(logged_service: ChatService) -> dict[int, Figures]:
    """By turn, from the step table."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for step in raw(logged_service, "SELECT * FROM step ORDER BY turn_id, n"):
        steps.setdefault(step["turn_id"], []).append(step)
    clocks = {
        row["id"]: row["reply_ms"] for row in raw(logged_service, "SELECT id, reply_ms FROM turn")
    }
    return {turn: of_steps(its, clocks[turn]) for turn, its in steps.items()}


def same(found: Any, wanted: Any) -> bool:
    return bool(found == (pytest.approx(wanted) if isinstance(wanted, float) else wanted))


def check(found: Mapping[str, Any], wanted: Figures) -> None:
    wrong = {n: (found[n], value) for n, value in wanted.items() if not same(found[n], value)}
    assert not wrong


def check_summary(found: stats.Summary, wanted: Figures) -> None:
    check({name: getattr(found, name) for name in wanted}, wanted)


def test_the_turns_are_as_different_as_they_are_called(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    rows = dict(zip(KINDS, logged_service.turn_rows(), strict=True))
    assert set(json.loads(rows["mixed"]["drafted_by"])) == {"draft_model", "ngram"}
    assert rows["off"]["num_draft_tokens"] == 0 and not rows["lenient"]["exact"]
    assert rows["cancelled"]["finish_reason"] == "cancelled"
    assert rows["continued"]["continues_message_id"] is not None
    assert rows["busy"]["no_speedup"] == "load_changed"
    absent = [kind for kind, row in rows.items() if row["speedup"] is None]
    assert absent == ["off", "busy", "short"]
    assert rows["short"]["no_speedup"] == "too_short" and rows["short"]["plain_decode_ms"]
    assert len(expected) == len(KINDS)


def test_a_reply_whose_engine_was_lost_has_no_speedup(tmp_path: Path) -> None:
    """Its rounds were never compared as a whole."""
    fault = EngineLost("The engine process ended.")
    made, _ = open_service(tmp_path, replace(SCRIPT, fail_at_round=4, fault=fault))
    ended(made, made.submit(None, "answer", ReplySettings()))
    (row,) = made.turn_rows()
    assert (row["finish_reason"], row["num_steps"]) == ("interrupted", 4)
    known = raw(made, "SELECT * FROM step")
    check(counted(row), of_steps(known, row["reply_ms"]))
    assert row["speedup"] is None and row["decode_speedup"] is None
    close(made)


def test_the_log_has_what_the_steps_say(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    for row in logged_service.turn_rows():
        check(counted(row), expected[row["turn_id"]])


@pytest.mark.parametrize("form", ["csv", "jsonl", "markdown", "sqlite"])
def test_each_export_has_what_the_steps_say(
    logged_service: ChatService, expected: dict[int, Figures], tmp_path: Path, form: Any
) -> None:
    out = tmp_path / "out"
    logged_service.export(Scope(), form, out)
    for turn, found in EXPORTED[form](out).items():
        check(found, {name: value for name, value in expected[turn].items() if name in found})
        assert {"speedup", "decode_speedup", "acceptance_rate"} <= set(found)


def from_csv(out: Path) -> dict[int, dict[str, Any]]:
    rows = csv.DictReader(io.StringIO(out.read_text(encoding="utf-8")))
    return {int(row["turn_id"]): {name: parsed(cell) for name, cell in row.items()} for row in rows}


def parsed(cell: str) -> Any:
    if cell in ("", DASH):
        return None
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def from_jsonl(out: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return {one["turn_id"]: one for one in lines if one["type"] == "turn"}


def from_markdown(out: Path) -> dict[int, dict[str, Any]]:
    table = out.read_text().partition("### Statistics\n\n")[2].partition("\n\n")[0].splitlines()
    names, _, *rows = (line.strip("| ").split(" | ") for line in table if line.startswith("|"))
    assert names == [heading(name) for name in STATISTICS]
    found = [dict(zip(STATISTICS, row, strict=True)) for row in rows]
    return {int(row["turn_id"]): {n: of_cell(n, one) for n, one in row.items()} for row in found}


def of_cell(name: str, cell: str) -> Any:
    if name == "drafter" or name.endswith("_ms"):
        return InWords(cell)
    return Rounded.of(parsed(cell))


class InWords(str):
    """A time or a drafter of a table."""

    def __eq__(self, other: object) -> bool:
        wanted = getattr(other, "expected", other)
        return str(self) == (label_of(wanted) if isinstance(wanted, str) else took(wanted))

    __hash__ = str.__hash__


class Rounded(float):
    """A number of a table with four digits after the point."""

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if isinstance(value, float) else value

    def __eq__(self, other: object) -> bool:
        return abs(self - float(str(getattr(other, "expected", other)))) < 1e-4

    __hash__ = float.__hash__


def from_sqlite(out: Path) -> dict[int, dict[str, Any]]:
    with closing(sqlite3.connect(out)) as db:
        db.row_factory = sqlite3.Row
        rows = [dict(row) for row in db.execute("SELECT * FROM turn")]
    return {row["id"]: counted(row) for row in rows}


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """With the guesses of each drafter as numbers, which the log has as JSON."""
    return row | {"drafted_by": json.loads(row["drafted_by"])}


EXPORTED = {
    "csv": from_csv, "jsonl": from_jsonl, "markdown": from_markdown, "sqlite": from_sqlite,
}  # fmt: skip


def totals(turns: list[Figures]) -> Figures:
    def sum_of(name: str, having: str | None = None) -> float:
        return sum(turn[name] for turn in turns if having is None or turn[having] is not None)

    compared = "plain_decode_ms"
    whole_ms = sum_of("reply_ms", compared)
    num_drafts = sum_of("num_drafts")
    return {
        "num_output_tokens": sum_of("num_output_tokens"),
        "tokens_per_second": ratio(1000 * sum_of("num_output_tokens"), sum_of("decode_ms")),
        "acceptance_rate": ratio(sum_of("num_accepted_tokens"), sum_of("num_draft_tokens")),
        "draft_share": ratio(sum_of("num_accepted_tokens"), sum_of("num_output_tokens")),
        "mean_accepted_length": 1 + sum_of("num_accepted_tokens") / num_drafts,
        "mean_num_draft_tokens": ratio(sum_of("num_draft_tokens"), num_drafts),
        "decode_speedup": ratio(sum_of(compared, compared), sum_of("decode_ms", compared)),
        "speedup": ratio(sum_of("plain_reply_ms", compared), whole_ms),
    }


def test_the_totals_of_the_page_and_the_view_are_sums_before_they_are_ratios(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    rows = logged_service.turn_rows()
    turns = [expected[row["turn_id"]] | {"reply_ms": row["reply_ms"]} for row in rows]
    summary = stats.summarise(rows, logged_service.rounds(rows))
    check_summary(summary, totals(turns))
    saved = [turn for turn in turns if turn["plain_reply_ms"] is not None]
    saved_ms = sum(turn["plain_reply_ms"] - turn["reply_ms"] for turn in saved)
    assert stats.saved_ms(rows) == pytest.approx(saved_ms)
    for seen in raw(logged_service, "SELECT * FROM turn_by_temperature WHERE drafter <> 'off'"):
        key = ("temperature", "drafter", "exact")
        members = [
            turn
            for row, turn in zip(rows, turns, strict=True)
            if [row[name] for name in key] == [seen[name] for name in key]
        ]
        assert members
        check(seen, totals(members))


def test_guesses_of_the_page_are_the_drafters_of_their_steps(logged_service: ChatService) -> None:
    rows = logged_service.turn_rows()
    lenient = {row["turn_id"] for row in rows if not row["exact"]}
    steps = [
        one for one in raw(logged_service, "SELECT * FROM step") if one["turn_id"] not in lenient
    ]
    shown = stats.by_drafter(rows, logged_service.rounds(rows))
    for drafter in DRAFTERS:
        its = [step for step in steps if step["drafter"] == drafter]
        wanted = of_steps(its, None)
        compared = [step for step in its if step["plain_ms"] is not None and drafter != OFF]
        wanted["decode_speedup"] = of_steps(compared, None)["decode_speedup"]
        names = ("acceptance_rate", "decode_speedup", "num_output_tokens", "tokens_per_second")
        check_summary(shown[label_of(drafter)], {name: wanted[name] for name in names})


def test_the_page_and_the_report_write_what_the_steps_say(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    rows = logged_service.turn_rows()
    table = {line["Turn"]: line for line in stats.turn_table(rows)}
    for place, row in enumerate(rows, 1):
        wanted = expected[row["turn_id"]]
        line = table[place]
        assert line["Gain, whole reply"] == gain(wanted["speedup"])
        assert line["Gain, decoding"] == gain(wanted["decode_speedup"])
        right = ratio(wanted["num_accepted_tokens"], wanted["num_checked_tokens"])
        assert line["Checked guesses right"] == percent(right)
        assert line["Guessed of the text"] == percent(wanted["draft_share"])
        assert line["Mean length"] == number(wanted["mean_accepted_length"], digits=2)
        assert line["γ"] == number(wanted["mean_num_draft_tokens"])
        assert line["Tokens"] == wanted["num_output_tokens"]
        assert line["Decoding"] == took(wanted["decode_ms"])
        assert line["First token"] == took(row["ttft_ms"])
        assert line["Whole reply"] == took(row["reply_ms"])
        assert line["Tokens / s"] == number(wanted["tokens_per_second"])
        assert line["Drafter"] == credited(wanted["drafted_by"])
        below = footer(row)
        assert below[0].endswith(f" in {took(row['reply_ms'])}")
        assert below[1] == f"writing at {rate(wanted['tokens_per_second'])} tok/s"
        gains = [part for part in below if "than without drafting" in part]
        said = [] if wanted["speedup"] is None else [compared(wanted["speedup"])]
        if row["no_speedup"] == "load_changed":
            least = 1.0 + (LEAST - 1.0) * wanted["decode_ms"] / row["reply_ms"]
            least_words = f"at least {math.floor(10 * least) / 10:.1f}x faster"
            said = [f"{least_words} than without drafting"]
        assert gains == said
    last = expected[rows[-1]["turn_id"]]
    until(lambda: logged_service.status().reply is not None)
    line = live_state(logged_service.status())
    assert line["gain"] == gain(last["speedup"])
    assert percent(last["acceptance_rate"]) != percent(last["draft_share"]), "to be told apart"
    right = percent(ratio(last["num_accepted_tokens"], last["num_checked_tokens"]))
    assert line["guesses"] == f"{right} of checked guesses right"
    facts = dict(line["facts"])
    assert facts["Writing"] == gain(last["decode_speedup"])
    assert facts["First token"] == f"after {took(rows[-1]['ttft_ms'])}"
    its = raw(logged_service, "SELECT * FROM step WHERE turn_id = (SELECT max(id) FROM turn)")
    for drafter in DRAFTERS[:2]:
        found = of_steps([step for step in its if step["drafter"] == drafter], None)
        right = f"{found['num_accepted_tokens']} of {found['num_checked_tokens']}"
        assert facts[capital(label_of(drafter))] == f"{right} checked guesses right"
    said = said_by(report_zip(logged_service, {"scope": "all"}))
    whole = totals([expected[row["turn_id"]] | {"reply_ms": row["reply_ms"]} for row in rows])
    assert f"| speedup | {gain(whole['speedup'])} |" in said
    assert f"| decode speedup | {gain(whole['decode_speedup'])} |" in said


def waits_of(steps: list[dict[str, Any]]) -> list[float]:
    """The first token of a round waits for the round, the others not at all."""
    times = [(one["draft_ms"] + one["verify_ms"], one["num_output_tokens"]) for one in steps]
    return sorted(wait for ms, count in times for wait in [ms, *[0.0] * count][:count])


def at(values: list[float], share: float) -> float:
    return float(numpy.quantile(values, share))


def test_waits_are_the_times_of_the_rounds(logged_service: ChatService) -> None:
    rows = logged_service.turn_rows()
    steps = raw(logged_service, "SELECT * FROM step ORDER BY turn_id, n")
    found = stats.with_and_without(rows, logged_service.rounds(rows))
    html = PANELS.waits(stats.WAIT_COLUMNS, stats.wait_lines(*found))
    report = said_by(report_zip(logged_service, {"scope": "all"}))
    for waits, has_drafted in zip(found, (True, False), strict=True):
        turns = {row["turn_id"] for row in rows if bool(row["num_draft_tokens"]) is has_drafted}
        its = [one for one in steps if one["turn_id"] in turns]
        times = [one["draft_ms"] + one["verify_ms"] for one in its]
        assert waits.num_tokens == sum(one["num_output_tokens"] for one in its)
        for shown, values in (
            (waits.between_tokens, waits_of(its)),
            (waits.between_updates, times),
        ):
            wanted = [at(values, share) for share in stats.SHARES]
            assert list(shown) == pytest.approx(wanted)
            assert "".join(f"<td>{took(ms)}</td>" for ms in wanted) in html
            assert f"| {' | '.join(map(took, wanted))} |" in report


def said_by(packed: bytes) -> str:
    return zipfile.ZipFile(io.BytesIO(packed)).read("report.md").decode()


def test_the_details_of_a_reply_are_its_steps(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    for row in logged_service.turn_rows():
        view = token_view(logged_service, row["message_id"])
        assert view["notes"][:1] == [capital(row["reason"])], "of this reply, not of the latest"
        steps = raw(
            logged_service, f"SELECT * FROM step WHERE turn_id = {row['turn_id']} ORDER BY n"
        )
        check(view, {name: expected[row["turn_id"]][name] for name in view if name in COUNTS})
        for place, (shown, step) in enumerate(zip(view["rounds"], steps, strict=True)):
            assert shown["drafted"] == step["num_draft_tokens"]
            assert shown["accepted"] == step["num_accepted_tokens"]
            own = [one for run in view["runs"] for one in run.tokens if one.round == place]
            assert len(own) == step["num_output_tokens"]
            assert shown["time"] == took(step["draft_ms"] + step["verify_ms"])
            assert shown["drafter"] == (label_of(step["drafter"]) if shown["drafted"] else DASH)
        kinds = {one["kind"]: one["count"] for one in view["legend"]}
        assert sum(kinds.values()) == row["num_output_tokens"]
        guessed = sum(kinds.get(kind, 0) for kind in ("draft", "self", "ngram"))
        assert guessed == row["num_accepted_tokens"]


def test_the_plots_draw_what_the_steps_say(
    logged_service: ChatService, expected: dict[int, Figures]
) -> None:
    rows = logged_service.turn_rows()
    steps = raw(logged_service, "SELECT * FROM step ORDER BY turn_id, n")
    plots = {plot.name: plot.svg for plot in make_plots(rows, logged_service.rounds(rows), None)}
    drawn = {
        name: {one.text for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("title")}
        for name, svg in plots.items()
    }
    speeds = [expected[row["turn_id"]]["tokens_per_second"] for row in rows]
    for turn, (row, speed) in enumerate(zip(rows, speeds, strict=True), 1):
        assert f"{stats.arm(row)}: {turn}, {speed:.4g}" in drawn["speed-by-turn"]
    exact = {row["turn_id"] for row in rows if row["exact"]}
    for drafter in DRAFTERS[:2]:
        its = [one for one in steps if one["drafter"] == drafter and one["turn_id"] in exact]
        gain = of_steps([one for one in its if one["plain_ms"] is not None], None)["decode_speedup"]
        all_its = of_steps(its, None)
        right = 100 * all_its["num_accepted_tokens"] / all_its["num_checked_tokens"]
        assert f"{label_of(drafter)}, decoding: {gain:.4g}" in drawn["speedup-by-drafter"]
        bar = f"{label_of(drafter)}, checked guesses right: {right:.4g}"
        assert bar in drawn["acceptance-by-drafter"]
    for heat in {row["temperature"] for row in rows if row["exact"]}:
        turns = [
            expected[row["turn_id"]] | {"reply_ms": row["reply_ms"]}
            for row in rows
            if row["temperature"] == heat and row["exact"]
        ]
        whole = totals(turns)
        for name, gain in (("decoding", "decode_speedup"), ("whole reply", "speedup")):
            assert f"{heat:.2f}, {name}: {whole[gain]:.4g}" in drawn["speedup-by-temperature"]
    drafted = {row["turn_id"] for row in rows if row["num_draft_tokens"]}
    waits = waits_of([one for one in steps if one["turn_id"] in drafted])
    for share in stats.SHARES:
        bar = f"P{100 * share:.0f}, with drafting: {at(waits, share):.4g}"
        assert bar in drawn["waits"]
