"""Fact and remedy for an error of SQLite or the file system.

Contract: `diagnose` takes every error; an unknown one keeps SQLite's own message.

Source: sqlite.org/rescode.html. By message and not by code, so that file errors and SQLite's share
one table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """fact: completes "The log cannot be used: …". remedy: a sentence. words: of the messages that
    mean it."""

    fact: str
    remedy: str
    words: tuple[str, ...] = ()


DAMAGE = Fault(
    "the file is damaged",
    "Start localspec again: it sets the damaged file aside and starts a new one.",
    ("not a database", "malformed", "disk image"),
)
KNOWN = (
    Fault(
        "another program keeps it locked",
        "Close that program and try again.",
        ("locked", "busy"),
    ),
    Fault("the disk is full", "Free some space and try again.", ("is full", "No space left")),
    Fault(
        "the file or its folder is read-only or out of reach",
        "Allow writing there, or start with another --home.",
        ("readonly", "Read-only", "Permission denied", "not permitted", "unable to open"),
    ),
    DAMAGE,
    Fault(
        "it has no row of that number, for it is newer than the page",
        "Reload the page and start a new chat.",
        ("FOREIGN KEY",),
    ),
    Fault(
        "another file or another program's table is in its place",
        "Start with another --home, or write to another file.",
        ("already exists",),
    ),
)


def diagnose(error: Exception) -> Fault:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    unknown = Fault(text, "Check the disk it lies on, or start with another --home.")
    return next((fault for fault in KNOWN if any(w in text for w in fault.words)), unknown)
