"""Times, sizes, gains and lists as a person reads them, the same on the page, in reports and on the
command line.

Contract: pure. Of times ms below a second, seconds beyond, minutes beyond a minute. Of what is not
known a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DASH = "–"
SECOND_MS = 1000.0


def took(ms: float | None) -> str:
    """What was measured, to three digits: 6.34 ms, 62.1 ms, 1.24 s, 2 min 5 s."""
    if ms is None:
        return DASH
    if abs(ms) < SECOND_MS - 0.5:
        return f"{_digits(ms)} ms"
    if abs(ms) < 59.95 * SECOND_MS:
        return f"{_digits(ms / SECOND_MS)} s"
    return ("-" if ms < 0 else "") + clock(abs(ms) / SECOND_MS)


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.{2 - (abs(value) >= 9.995) - (abs(value) >= 99.95)}f}"


def clock(seconds: float) -> str:
    """What runs or is left, in whole seconds: 12 s, 2 min 5 s, 3 h 20 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def gib(num_bytes: int | None, whole: Callable[[float], int] = round) -> str:
    """Bytes of memory. whole: math.ceil for what is needed and math.floor for what is free, so that
    a sentence never claims more room than there is."""
    if num_bytes is None:
        return DASH
    if num_bytes >= 2**30:
        return f"{whole(10 * num_bytes / 2**30) / 10:.1f} GiB"
    return f"{whole(num_bytes / 2**20)} MiB"


def gb(num_bytes: float) -> str:
    """Bytes as disks and the hub count them, in powers of ten."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e6:.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.0f} kB"


def gain_words(speedup: float) -> str:
    """Return a speedup in words: 1.5x faster, 1.08x slower, as fast (within 5 %)."""
    which, times = direction(speedup), max(speedup, 1.0 / speedup)
    return f"{times:.{2 if times < 1.15 else 1}f}x {which}" if which else "as fast"


def compared(speedup: float) -> str:
    """Return the one sentence of speed: 1.5x faster than without drafting."""
    return f"{gain_words(speedup)} {'than' if direction(speedup) else 'as'} without drafting"


def direction(speedup: float | None) -> str:
    """Return "faster" or "slower", or "" for a speedup within 5 % of 1 and for none."""
    if speedup is None or speedup <= 0.0 or max(speedup, 1.0 / speedup) < 1.05:
        return ""
    return "faster" if speedup > 1.0 else "slower"


def at_least(speedup: float | None) -> str:
    """Return what a speedup surely reaches, rounded down; "" where that is nothing to speak of."""
    tenths = int(10 * (speedup or 0.0))
    return f"at least {tenths / 10:.1f}x faster" if tenths > 10 else ""


def axis_unit(longest_ms: float) -> tuple[str, float]:
    """The unit of an axis on which the longest time is this, and its length in ms."""
    return ("s", SECOND_MS) if longest_ms >= SECOND_MS else ("ms", 1.0)


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 token, 2 tokens, 1,024 tokens."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def billions(count: int) -> str:
    """A number of parameters, in words."""
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"


def capital(phrase: str) -> str:
    """With its first letter large, the others as they are."""
    return phrase[:1].upper() + phrase[1:]


def enumerated(words: Sequence[str], joint: str = " and ") -> str:
    """One or more words as a list in a sentence: a, b and c."""
    *first, last = words
    return f"{', '.join(first)}{joint}{last}" if first else last


def clean(text: str) -> str:
    """Return the text as UTF-8 can hold it: a lone half of a surrogate pair becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
