"""Figures and names as the page writes them, the same on every tab, and numbers as it reads them.

Contract: pure functions. An unknown number is a dash, never 0.
"""

from __future__ import annotations

from datetime import UTC, datetime

from localspec.core.units import DASH, gain_words


def gain(speedup: float | None) -> str:
    """Return a speedup as a cell of a table has it."""
    return DASH if speedup is None else gain_words(speedup)


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
