"""Fact and remedy for an error of SQLite or the file system.

Contract: `diagnose` takes every error; an unknown one keeps SQLite's own message.

Source: sqlite.org/rescode.html. By message and not by code, so that file errors and SQLite's share
one table.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """fact: completes "The log cannot be used: …". remedy: a sentence."""

    fact: str
    remedy: str


DAMAGE_WORDS = ("not a database", "malformed", "disk image")

_KNOWN: tuple[tuple[tuple[str, ...], Fault], ...] = (
    (
        ("locked", "busy"),
        Fault("another program keeps it locked", "Close that program and try again."),
    ),
    (
        ("is full", "No space left"),
        Fault("the disk is full", "Free some space and try again."),
    ),
    (
        ("readonly", "Read-only", "Permission denied", "not permitted", "unable to open"),
        Fault(
            "the file or its folder is read-only or out of reach",
            "Allow writing there, or start with another --home.",
        ),
    ),
    (
        DAMAGE_WORDS,
        Fault(
            "the file is damaged",
            "Start localspec again: it sets the damaged file aside and starts a new one.",
        ),
    ),
    (
        ("FOREIGN KEY",),
        Fault(
            "it has no row of that number, for it is newer than the page",
            "Reload the page and start a new chat.",
        ),
    ),
    (
        ("already exists",),
        Fault(
            "another file or another program's table is in its place",
            "Start with another --home, or write to another file.",
        ),
    ),
)


def diagnose(error: Exception) -> Fault:
    text = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    for words, fault in _KNOWN:
        if any(word in text for word in words):
            return fault
    return Fault(text, "Check the disk it lies on, or start with another --home.")


def is_damage(error: sqlite3.Error) -> bool:
    return any(word in str(error) for word in DAMAGE_WORDS)
