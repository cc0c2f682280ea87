"""Figures and names as the page writes them, the same on every tab, and numbers as it reads them.

Contract: pure functions. An unknown number is a dash, never 0.
"""

from __future__ import annotations

from datetime import UTC, datetime

from localspec.units import DASH


def gain_words(speedup: float) -> str:
    """A speedup as a person says it: 1.4x faster, 1.2x slower, no faster."""
    which = direction(speedup)
    return f"{_times(speedup)}x {which}" if which else "no faster"


def direction(speedup: float | None) -> str:
    """What is said of a speedup: "faster", "slower", or "" for neither of them."""
    if speedup is None or _times(speedup) == "1.0":
        return ""
    return "faster" if speedup > 1 else "slower"


def _times(speedup: float) -> str:
    return f"{max(speedup, 1 / speedup):.1f}" if speedup > 0 else DASH


def at_least(speedup: float | None) -> str:
    """What a speedup surely reaches, rounded down; "" where that is nothing to speak of."""
    tenths = int(10 * (speedup or 0.0))
    return f"at least {gain_words(tenths / 10)}" if tenths > 10 else ""


def number(value: float | None, unit: str = "", digits: int = 1) -> str:
    """A rounded figure, a dash when unknown."""
    if value is None:
        return DASH
    return f"{round(value, digits) + 0.0:.{digits}f}{unit}"  # + 0.0: no minus before a zero


def number_of(text: str | None) -> int | None:
    """A number out of a request; None for anything else. `isdecimal` alone takes digits of other
    scripts, and more of them than can be read."""
    if text is None or not (text.isascii() and text.isdecimal() and len(text) < 19):
        return None
    return int(text)


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.0f} %"


def rate(tokens_per_second: float) -> str:
    """Tokens per second, as exactly as they are felt."""
    return f"{tokens_per_second:.{0 if tokens_per_second >= 20 else 1}f}"


def local_time(at_utc: str) -> datetime | None:
    """Return a logged time by this machine's clock; None if it is no time that a clock can show."""
    try:
        return datetime.fromisoformat(at_utc).astimezone()
    except (ValueError, OverflowError, OSError):
        return None


def time_of_day(at_utc: str, now: datetime | None = None) -> str:
    """By this machine's clock, with the day where it is not today."""
    here = local_time(at_utc)
    if here is None:
        return DASH
    is_today = here.date() == (now or datetime.now(UTC)).astimezone().date()
    return f"{here:%H:%M}" if is_today else f"{here.day} {here:%b %Y, %H:%M}"
