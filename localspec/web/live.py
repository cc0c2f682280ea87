"""The live strip: what localspec is doing now, and how figures and names are written on the page.

`live_state` gives the service's status as JSON in which every number is already text, so that the
page, the tests and the log show the same figures. static/live.js asks for it about six times a
second while a reply is written, once a second otherwise, and places the text in the frame of
layout.STRIP_HTML. An unknown number is a dash, never 0. One answer takes well under a millisecond:
it reads what the service holds.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from localspec.backend import Description, TurnStats
from localspec.chat.service import Status, TurnView
from localspec.core import OFF
from localspec.drafters.registry import REGISTRY, label_of
from localspec.leniency import label
from localspec.workloads import REWORK

DASH = "–"
REFRESH_S = 5.0  # of the hardware line
DRAFTER_NAME = re.compile(rf"\b({'|'.join(REGISTRY)})\b")
ENDED = {
    "eos": "done",
    "stop": "done",
    "length": "done (max tokens)",
    "cancelled": "stopped",
    "error": "failed",
    "interrupted": "cut short",
}

NO_SPEEDUP = {"load_changed": "load changed"}

log = logging.getLogger(__name__)


def live_state(
    status: Status, rounds_from: int | None = None, hardware: str = ""
) -> dict[str, Any]:
    """Everything the strip shows. rounds_from: also the rounds of the reply from this one on.
    hardware: what the machine has, in a sentence."""
    view = status.reply
    stats = view.stats if view is not None else None
    phase, label, seconds = _phase(status)
    state: dict[str, Any] = {
        "phase": phase,
        "label": label,
        "clock": _clock(seconds),
        "waiting": status.num_waiting,
        "notices": _notices(status),
        "may_start": status.phase == "failed",
        "reason": labelled(_reason(status, view)),
        "off": status.off and {"code": status.off.code, "remedy": status.off.remedy},
        "hardware": hardware,
        "num_output_tokens": stats.num_output_tokens if stats else None,
        "decode_ms": stats.decode_ms if stats else None,
        **_figures(stats, view),
        **_memory(status.description),
    }
    if rounds_from is not None and view is not None:
        state["reply"] = f"{view.started_s:.6f}"
        state["rounds"] = [
            [round_.text, round_.num_tokens, round_.num_drafted, label_of(round_.drafter)]
            for round_ in view.rounds[rounds_from:]
        ]
        state["num_rounds"] = len(view.rounds)
    return state


def _notices(status: Status) -> list[str]:
    failure = [status.phrase] if status.phase == "failed" else []
    return [*failure, *status.notices]


def _phase(status: Status) -> tuple[str, str, float]:
    """The phase by its name in code and in words, and the seconds it has lasted."""
    view = status.reply
    if status.phase == "failed":
        return "failed", "Not loaded", status.seconds
    if status.phase in ("loading", "restarting"):
        return status.phase, capital(status.phrase), status.seconds
    if view is not None and view.phase == "prefill":
        return "prefill", "Reading the prompt", view.seconds
    if view is not None and view.phase == "decode":
        return "decode", "Writing", view.seconds
    if view is not None and view.phase in ("queued", "loading"):
        return "queued", "Waiting for other replies", view.seconds
    if status.phase in ("calibrating", "busy", "unloaded"):
        return status.phase, capital(status.phrase), status.seconds
    if view is None or view.finish_reason is None:
        return "ready", "Ready", 0.0
    return "ready", capital(ENDED[view.finish_reason]), view.seconds


def _figures(stats: TurnStats | None, view: TurnView | None) -> dict[str, Any]:
    if stats is None or view is None:
        names = ("speed", "speedup", "acceptance", "gamma", "drafter")
        return {name: DASH for name in names} | {f"{name}_sub": "" for name in names}
    ttft = f"first: {stats.ttft_ms:.0f} ms" if stats.ttft_ms is not None else ""
    share = f"{percent(stats.draft_share)} of the text" if stats.num_draft_tokens else ""
    mean = stats.mean_num_draft_tokens
    gamma = view.last_num_draft_tokens
    gain = stats.speedup
    return {
        "speed": number(stats.tokens_per_second),
        "speed_sub": ttft,
        "speedup": number(gain, " ×", digits=2),
        "speedup_sub": _of_speedup(stats),
        "is_slower": gain is not None and gain < 1.0,
        "acceptance": percent(stats.acceptance_rate),
        "acceptance_sub": share,
        "gamma": DASH if gamma is None else str(gamma),
        "gamma_sub": f"{mean:.1f} on average" if mean is not None else "",
        "drafter": label_of(stats.drafter) if stats.num_steps else DASH,
        "drafter_sub": _guesses(stats) if stats.num_draft_tokens else "",
    }


def _of_speedup(stats: TurnStats) -> str:
    if stats.num_steps and not stats.num_draft_tokens:
        return "no draft"
    if stats.no_speedup is not None:
        return NO_SPEEDUP[stats.no_speedup]
    rounds = number(stats.decode_speedup, " ×", 2)
    return f"decode {rounds}" if stats.speedup is not None else "not measured"


def _guesses(stats: TurnStats) -> str:
    num_others = len(stats.drafted_by) - 1
    right = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens}"
    return f"+ {num_others} more: {right}" if num_others else f"{right} guesses right"


def credited(drafted_by: Mapping[str, int]) -> str:
    """The drafters of a reply, the one with the most guesses first."""
    first, *others = sorted(drafted_by, key=lambda name: -drafted_by[name]) or (OFF,)
    return label_of(first) + (f" + {len(others)} more" if others else "")


def drafters_of(row: Mapping[str, Any]) -> str:
    """`credited` of a row of the log, a dash where nothing is known."""
    return DASH if row["drafter"] is None else credited(row["drafted_by"] or {row["drafter"]: 1})


def _reason(status: Status, view: TurnView | None) -> str:
    """One sentence: whether something drafts, what, and why."""
    loaded = status.description
    if loaded is None:
        return "Speculation: known once the model is loaded."
    stats = view.stats if view is not None else None
    kind = "" if view is None else f" Kind of text: {kind_words(view.workload)}."
    if status.off is not None:
        return f"Speculation: off, because {_because(status.off.text)}.{kind}"
    if view is not None and stats is not None and stats.num_steps:
        if stats.drafter == OFF:
            return f"Speculation: off, because {_because(stats.reason)}.{kind}"
        said = label(stats.num_lenient_tokens, stats.num_output_tokens)
        exact = "" if stats.exact else f" Not exact, as you chose: {said}."
        if _names_another(stats, loaded):
            last = _lowered(stats.reason, loaded)
            return f"Speculation: on, mostly by {stats.drafter}; last {last}{exact}{kind}"
        why = _sentence(stats.reason.removeprefix(f"{stats.drafter}: "))
        return f"Speculation: on, by {stats.drafter}: {why}{exact}{kind}"
    able = [drafter.name for drafter in loaded.drafters if drafter.is_available]
    if able:
        return f"Speculation: ready, with {', '.join(able)}."
    why = "; ".join(f"{drafter.name}: {drafter.reason}" for drafter in loaded.drafters)
    return f"Speculation: off, because no drafter can be used here ({why or 'none is installed'})."


def _names_another(stats: TurnStats, loaded: Description) -> bool:
    """Whether the reason is of another drafter's round than most of the reply's were."""
    words = set(re.findall(r"\w+", stats.reason))
    return stats.drafter not in words and any(each.name in words for each in loaded.drafters)


def _lowered(reason: str, loaded: Description) -> str:
    is_name = any(reason.startswith(each.name) for each in loaded.drafters)
    return reason if is_name else reason[:1].lower() + reason[1:]


def _because(reason: str) -> str:
    """The reason as the end of a sentence: "Off this round: No match." becomes "no match"."""
    words = re.sub(r"^off\b[^:]*:\s*", "", reason.strip(), flags=re.IGNORECASE).rstrip(".")
    is_name = words[1:2].isupper()
    return (words if is_name else words[:1].lower() + words[1:]) or "no round was long enough"


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text}." if text else ""


def _memory(loaded: Description | None) -> dict[str, str]:
    if loaded is None:
        return {"memory": DASH, "memory_sub": ""}
    held = loaded.held_bytes
    return {
        "memory": DASH if held is None else size(held),
        "memory_sub": f"{loaded.device}, {loaded.dtype}",
    }


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """A rounded figure, a dash when unknown."""
    if value is None:
        return DASH
    return f"{round(value, digits) + 0.0:.{digits}f}{unit}"  # + 0.0: no minus before a zero


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2 tokens, 1,024 tokens."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.0f} %"


def size(num_bytes: int) -> str:
    """Bytes in the largest unit that keeps the number above 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def _clock(seconds: float) -> str:
    if seconds <= 0:
        return ""
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def kind_words(workload: str) -> str:
    """A kind of text by a name that says what it is."""
    return "editing" if workload == REWORK else workload


def capital(phrase: str) -> str:
    return phrase[:1].upper() + phrase[1:]


def labelled(sentence: str) -> str:
    """A sentence of the engine's with each drafter by its label."""
    return DRAFTER_NAME.sub(lambda found: label_of(found[1]), sentence)


def badge(row: Mapping[str, Any]) -> str:
    """The label of a lenient reply, from its row in the log; empty for an exact one."""
    if row["exact"] is not False:
        return ""
    return label(row["num_lenient_tokens"] or 0, row["num_output_tokens"] or 0)


def footer(row: Mapping[str, Any]) -> str:
    """The line under a finished reply, from its row in the log. Short enough for one line of the
    page beside both open sides."""
    parts = [number(row["tokens_per_second"], " tok/s")]
    if row["speedup"] is not None:
        parts.append(f"{row['speedup']:.2f} ×")
    if row["num_draft_tokens"]:
        parts.append(f"{percent(row['acceptance_rate'])} accepted")
        parts.append(f"γ {row['mean_num_draft_tokens']:.1f}")
        parts.append(drafters_of(row))
    elif row["num_output_tokens"]:
        parts.append("without drafting")
    more = " more" if row["continues_message_id"] else ""
    parts.append(f"{counted(row['num_output_tokens'], 'token')}{more}")
    if row["ttft_ms"] is not None:
        parts.append(f"first after {row['ttft_ms']:.0f} ms")
    if row["workload"]:
        parts.append(kind_words(row["workload"]))
    return " · ".join(parts)


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
