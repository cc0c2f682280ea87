"""The drafted tokens of a turn, packed for the log.

Contract: `unpack` inverts `pack`, but for probabilities, which are rounded to a thousandth. The
format is zlib over one JSON object, whose lists have an item for each drafted token of the turn in
order; `sizes` has the number of them in each round, `texts` each token's text once. A drafted token
takes 5 to 11 bytes. Older records also have chances of acceptance, which are passed over: a token
is accepted or not.

Not here: what the numbers mean (backend.DraftedToken).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.core.backend import DraftedToken, DraftOutcome

VERSION = 1
THOUSAND = 1000.0
LETTERS: dict[DraftOutcome, str] = {"accepted": "a", "rejected": "r", "not_reached": "n"}
OUTCOMES = {letter: outcome for outcome, letter in LETTERS.items()}


@dataclass(frozen=True)
class TokenRecord:
    """lengths: characters of the reply by output token. start: characters of the reply before this
    turn. rounds: what each proposed."""

    lengths: tuple[int, ...]
    rounds: tuple[tuple[DraftedToken, ...], ...]
    start: int = 0


def pack(record: TokenRecord) -> bytes:
    drafted = [token for tokens in record.rounds for token in tokens]
    data = {
        "version": VERSION,
        "start": record.start,
        "lengths": record.lengths,
        "sizes": [len(tokens) for tokens in record.rounds],
        "tokens": [one.token for one in drafted],
        "texts": {one.token: one.text for one in drafted},
        "parents": [one.parent for one in drafted],
        "confidences": [_to_thousandths(one.confidence) for one in drafted],
        "outcomes": "".join(LETTERS[one.outcome] for one in drafted),
    }
    return zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)


def unpack(packed: bytes) -> TokenRecord | None:
    """None for data that this program cannot read."""
    try:
        data = json.loads(zlib.decompress(packed))
        if data["version"] != VERSION:
            return None
        flat = [
            DraftedToken(
                token,
                data["texts"][str(token)],
                parent,
                _from_thousandths(confidence),
                OUTCOMES[letter],
            )
            for token, parent, confidence, letter in zip(
                data["tokens"], data["parents"], data["confidences"], data["outcomes"], strict=True
            )
        ]
        return TokenRecord(tuple(data["lengths"]), _parted(flat, data["sizes"]), data["start"])
    except (zlib.error, ValueError, LookupError, TypeError):
        return None


def _parted(
    flat: Sequence[DraftedToken], sizes: Sequence[int]
) -> tuple[tuple[DraftedToken, ...], ...]:
    rounds, done = [], 0
    for size in sizes:
        rounds.append(tuple(flat[done : done + size]))
        done += size
    return tuple(rounds)


def _to_thousandths(chance: float | None) -> int | None:
    return None if chance is None else round(THOUSAND * chance)


def _from_thousandths(chance: int | None) -> float | None:
    return None if chance is None else chance / THOUSAND
