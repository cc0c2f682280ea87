"""The line over the chat and its popover: what localspec is doing now, how fast, and why.

`live_state` gives the service's status as JSON in which every number is already text, so that the
page, the tests and the log show the same figures. static/live.js asks for it about six times a
second while a reply is written, once a second otherwise, and places the text in the frame of
templates/frame.html. An unknown number is a dash, never 0. One answer takes well under a
millisecond: it reads what the service holds.

Not here: how a figure is written (words).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from localspec.chat.turn import Status, TurnView
from localspec.core.backend import Description, Server
from localspec.core.decoding import OFF
from localspec.core.leniency import label
from localspec.core.turn_stats import NO_GAIN, TurnStats
from localspec.core.units import (
    DASH,
    at_least,
    capital,
    clock,
    compared,
    counted,
    direction,
    gain_words,
    gib,
    took,
)
from localspec.core.visible import visible
from localspec.core.workloads import kind_words
from localspec.drafters.registry import label_of
from localspec.machine.sources import DEMO
from localspec.record.rows import counts
from localspec.web.words import number, percent, rate

REFRESH_S = 5.0  # of the hardware line

PHASES = {
    "loading": "Loading",
    "restarting": "Starting again",
    "calibrating": "Measuring",
    "busy": "Busy",
    "unloaded": "Not loaded",
    "failed": "Not loaded",
    "prefill": "Reading",
    "decode": "Writing",
    "queued": "Waiting",
    "ready": "Ready",
}
UNTIMED = ("ready", "failed", "unloaded")

log = logging.getLogger(__name__)


def live_state(
    status: Status, rounds_from: int | None = None, hardware: str = "", wanted: str | None = None
) -> dict[str, Any]:
    """Everything that the line and the popover show. rounds_from: also the rounds of the reply from
    this one on. hardware: what the machine has, in a sentence. wanted: the model that was named to
    be loaded."""
    view = status.reply
    stats = view.stats if view is not None else None
    phase, seconds = _phase(status)
    loaded = status.description
    state: dict[str, Any] = {
        "phase": phase,
        "label": PHASES[phase] + ("" if phase in UNTIMED else _read(view) or _clock(seconds)),
        "num_list_changes": status.num_list_changes,
        "notices": _notices(status),
        "may_start": status.phase == "failed",
        "model": model_words(loaded, _awaited(status, wanted)),
        "is_demo": loaded is not None and loaded.target == DEMO,
        "reason": capital(_reason(status, stats)),
        "remedy": status.off.remedy if status.off else "",
        "hardware": hardware,
        "facts": _facts(status, stats, view),
        "num_output_tokens": stats.num_output_tokens if stats else None,
        "decode_ms": stats.decode_ms if stats else None,
        **_figures(stats),
    }
    state = _visible(state)
    if rounds_from is not None and view is not None:
        state["reply"] = f"{view.started_s:.6f}"
        state["rounds"] = [
            [one.text, one.num_tokens, one.num_drafted, " and ".join(map(label_of, one.drafters))]
            for one in view.rounds[rounds_from:]
        ]
        state["num_rounds"] = len(view.rounds)
        state["num_checks"] = stats.num_steps if stats else 0
    return state


def _visible(value: Any) -> Any:
    """Return the value with every text in it as it may be shown."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {name: _visible(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_visible(each) for each in value)
    return value


def _notices(status: Status) -> list[str]:
    failure = [status.phrase] if status.phase == "failed" else []
    return [*failure, *status.notices]


def _phase(status: Status) -> tuple[str, float]:
    """The phase by its name in code, and the seconds it has lasted."""
    view = status.reply
    if status.phase in ("failed", "loading", "restarting"):
        return status.phase, status.seconds
    if view is not None and view.phase in ("prefill", "decode"):
        return view.phase, view.seconds
    if view is not None and view.phase in ("queued", "loading"):
        return "queued", view.seconds
    if status.phase in ("calibrating", "busy", "unloaded"):
        return status.phase, status.seconds
    return "ready", 0.0


def _awaited(status: Status, wanted: str | None) -> str:
    """What stands in the place of a model that is not loaded."""
    if status.phase not in ("loading", "restarting"):
        return "No model"
    return short(wanted) if wanted else DASH


def model_words(loaded: Description | None, otherwise: str) -> list[str]:
    """The model's name, then its precision and its draft, or the server that has it."""
    if loaded is None:
        return [otherwise, ""]
    if loaded.server is not None:
        return [short(loaded.target), loaded.device]
    return [short(loaded.target), precision_words(loaded.precision, loaded.draft)]


def precision_words(precision: str | None, draft: str | None) -> str:
    """A model's precision, and the draft beside it."""
    return f"{precision} · draft {short(draft)}" if draft else str(precision)


def short(model_id: str) -> str:
    """A model's name without whose it is."""
    return model_id.rstrip("/").rpartition("/")[2]


def _figures(stats: TurnStats | None) -> dict[str, Any]:
    """The figures of the line."""
    if stats is None or not stats.num_output_tokens:
        return {"speed": DASH, "gain": "", "gain_is": "", "guesses": ""}
    speed = stats.tokens_per_second
    gain = _gain(stats, stats.speedup, stats.least_speedup)
    return {
        "speed": DASH if speed is None else rate(speed),
        "gain": gain.partition(":")[0],  # the popover and the line under the reply say why
        "gain_is": "faster" if at_least(stats.least_speedup) else direction(stats.speedup),
        "guesses": _guesses(stats),
    }


def _guesses(stats: TurnStats) -> str:
    """Return the share of guesses that were right; a server does not say how many were checked."""
    if not stats.num_draft_tokens:
        return ""
    if stats.told("num_checked_tokens") is None:
        return f"{percent(stats.acceptance_rate)} of all guesses right"
    return f"{percent(stats.checked_acceptance_rate)} of checked guesses right"


def _gain(stats: TurnStats, speedup: float | None, least: float | None) -> str:
    if stats.told("num_draft_tokens") is None:
        return ""
    if not stats.num_draft_tokens:
        return "without drafting"
    if stats.no_speedup is not None:
        return at_least(least) or NO_GAIN[stats.no_speedup]
    return "gain not known yet" if speedup is None else gain_words(speedup)


def _facts(status: Status, stats: TurnStats | None, view: TurnView | None) -> list[tuple[str, str]]:
    """The rows of the popover: what it is about, and the figure."""
    facts = [] if status.phase == "ready" else [("Now", capital(status.phrase))]
    if status.num_waiting:
        facts.append(("Waiting", counted(status.num_waiting, "message")))
    loaded = status.description
    if stats is not None and view is not None and stats.num_output_tokens:
        is_remote = loaded is not None and loaded.server is not None
        facts += _speeds(stats, is_remote)
        facts += [
            (capital(label_of(name)), f"{right} of {checked} checked guesses right")
            for name, (right, checked) in sorted(view.guesses.items(), key=lambda one: -one[1][1])
        ]
        if stats.num_draft_tokens:
            facts.append(("Text that was guessed", percent(stats.draft_share)))
            facts.append(("Guesses a round", number(stats.mean_num_draft_tokens)))
        facts.append(("Kind of text", kind_words(view.workload)))
    if loaded is not None and loaded.server is not None:
        facts += _server_facts(loaded.server)
    elif loaded is not None:
        facts.append(("Memory in use", f"{gib(loaded.held_bytes)}, {loaded.device}"))
    return facts


def _server_facts(server: Server) -> list[tuple[str, str]]:
    offer = counted(len(server.models), "model")
    where = f"{server.name} at {server.url}, with {offer}"
    return [("Server", where), ("Limits", " ".join(server.limits))]


def _speeds(stats: TurnStats, is_remote: bool) -> list[tuple[str, str]]:
    """With and without drafting, and the gain of the whole reply and of its decoding. Of a server
    plain decoding is not known, and drafts only as far as it tells them."""
    speed = "" if stats.tokens_per_second is None else f"{rate(stats.tokens_per_second)} tok/s"
    first = DASH if stats.ttft_ms is None else f"after {took(stats.ttft_ms)}"
    if is_remote:
        right = "none" if stats.told("num_draft_tokens") == 0 else DASH
        if stats.num_draft_tokens:
            right = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} right"
        return [("Speed", speed or DASH), ("First token", first), ("Guesses of the server", right)]
    if not stats.num_draft_tokens:
        return [("Without drafting", speed or DASH), ("First token", first), *_prompt(stats)]
    plain = "not measured yet"
    if stats.least_plain_decode_ms:
        most = rate(1000 * stats.num_output_tokens / stats.least_plain_decode_ms)
        plain = f"at most {most} tok/s"
    elif stats.no_speedup == "load_changed":
        plain = "not measurable: the computer was busy"
    elif stats.plain_decode_ms:
        plain = (
            f"{rate(1000 * stats.num_output_tokens / stats.plain_decode_ms)} tok/s, measured here"
        )
    return [
        ("Without drafting", plain),
        ("With drafting", speed or DASH),
        ("Writing", _gain(stats, stats.decode_speedup, stats.least_decode_speedup)),
        ("Whole reply", _gain(stats, stats.speedup, stats.least_speedup)),
        ("First token", first),
        *_prompt(stats),
    ]


def _prompt(stats: TurnStats) -> list[tuple[str, str]]:
    """Return how much of the prompt was known, and how fast the rest was read."""
    said = [words] if (words := known_words(stats)) else []
    num_read = stats.num_prompt_tokens - 1 - stats.num_reused_tokens  # the last one is decoded
    if num_read > 0 and stats.prefill_ms:
        speed = rate(1000 * num_read / stats.prefill_ms)
        said.append(f"{counted(num_read, 'token')} read at {speed} tok/s")
    rows = [("Prompt", ", ".join(said))] if said else []
    times = (f"{label_of(name)} {took(ms)}" for name, ms in stats.reading_by.items())
    return [*rows, ("Reading for guesses", capital(", ".join(times)))] if stats.reading_by else rows


def known_words(stats: TurnStats) -> str:
    """Return what of a prompt did not have to be read; "" for nothing."""
    if not stats.num_reused_tokens:
        return ""
    place = "disk" if stats.num_disk_tokens else "memory"
    return f"{stats.num_reused_tokens:,} of {stats.num_prompt_tokens:,} tokens from {place}"


def credited(drafted_by: Mapping[str, int]) -> str:
    """The drafters of a reply, the one with the most guesses first."""
    first, *others = sorted(drafted_by, key=lambda name: -drafted_by[name]) or (OFF,)
    return label_of(first) + (f" + {len(others)} more" if others else "")


def drafters_of(row: Mapping[str, Any]) -> str:
    """`credited` of a row of the log, a dash where nothing is known."""
    if row["drafter"] is None:
        return DASH
    return credited(counts(row["drafted_by"]) or {row["drafter"]: 1})


def _reason(status: Status, stats: TurnStats | None) -> str:
    """Whether something drafts, what, and why. Where no drafter can be used, status.off says so."""
    loaded = status.description
    written = stats if stats is not None and stats.num_output_tokens else None
    if loaded is None:
        return "What can draft is known once the model is loaded."
    if loaded.server is not None:
        return written.reason if written else "Ready. The server decides how it drafts."
    if status.off is not None:
        return status.off.text
    if written is not None:
        return " ".join(_reasons_of_reply(written))
    num_ways = sum(drafter.is_available for drafter in loaded.drafters)
    return f"Ready: {counted(num_ways, 'way')} to guess ahead. The settings list them as Speed."


def _reasons_of_reply(stats: TurnStats) -> Iterator[str]:
    """Why its drafter drafted or nothing did, and what a person has allowed."""
    yield stats.reason or "Without drafting: no round was long enough."
    if not stats.exact:
        said = label(stats.num_lenient_tokens, stats.num_output_tokens)
        yield f"Not exact, as you chose: {said}."


def _read(view: TurnView | None) -> str:
    """Behind the phase, how far a long prompt has been read, and what of it was known."""
    if view is None or view.phase != "prefill" or view.stats is None or not view.num_read_tokens:
        return ""
    known = known_words(view.stats)
    share = percent(view.num_read_tokens / view.stats.num_prompt_tokens)
    return f" {share}, {known}" if known else f" {share}"


def _clock(seconds: float) -> str:
    """Behind a phase, once it has lasted."""
    return "" if seconds < 1 else f" {clock(int(seconds))}"


def badge(row: Mapping[str, Any]) -> str:
    """The label of a lenient reply, from its row in the log; empty for an exact one."""
    if row["exact"] is not False:
        return ""
    return label(row["num_lenient_tokens"] or 0, row["num_output_tokens"] or 0)


def footer(row: Mapping[str, Any]) -> list[str]:
    """The figures in the line under a finished reply, from its row in the log. All others stand in
    the details. The time is that of the whole reply; the rate is of its writing alone."""
    more = " more" if row["continues_message_id"] else ""
    parts = []
    if row["num_output_tokens"] is not None:
        time = "" if row["reply_ms"] is None else f" in {took(row['reply_ms'])}"
        parts.append(counted(row["num_output_tokens"], "token") + more + time)
    if row["tokens_per_second"] is not None:
        parts.append(f"writing at {rate(row['tokens_per_second'])} tok/s")
    if row["speedup"] is not None:
        parts.append(compared(row["speedup"]))
    elif gain := at_least(row["least_speedup"]):
        parts.append(f"{gain} than without drafting")
    elif row["num_draft_tokens"] == 0:
        parts.append("without drafting")
    elif row["no_speedup"] is not None:
        parts.append(NO_GAIN[row["no_speedup"]])
    return parts


class HardwareLine:
    """What this machine has, in one sentence. `line` answers at once with what was found last, ""
    before that; when it is older than refresh_s, a thread reads the hardware again, one at a time.
    find: reads it; may take seconds."""

    def __init__(self, find: Callable[[], str], refresh_s: float = REFRESH_S) -> None:
        self._find = find
        self._refresh_s = refresh_s
        self._line = ""
        self._asked_s: float | None = None
        self._lock = threading.Lock()

    def line(self) -> str:
        now = time.monotonic()
        is_old = self._asked_s is None or now - self._asked_s >= self._refresh_s
        if is_old and self._lock.acquire(blocking=False):
            self._asked_s = now
            threading.Thread(target=self._refresh, name="hardware", daemon=True).start()
        return self._line

    def _refresh(self) -> None:
        try:
            self._line = self._find()
        except Exception:  # the end of this thread; nothing depends on the line
            log.exception("the hardware could not be read")
        finally:
            self._lock.release()
