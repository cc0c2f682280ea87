"""What was drafted survives being packed, and a foreign or damaged pack is no record."""

from __future__ import annotations

import json
import random
import zlib

from localspec.core.backend import DraftedToken
from localspec.record.drafted import TokenRecord, pack, unpack

TOKENS = (
    DraftedToken(17, " the", -1, 0.914, "accepted"),
    DraftedToken(3, "\ufffd", 0, None, "rejected"),
    DraftedToken(9, "\u202eé\0", 0, 0.5, "not_reached"),
)


def test_a_record_comes_back_to_the_thousandth() -> None:
    record = TokenRecord((4, 0, 2), (TOKENS, (), TOKENS[:1]), start=12)
    assert unpack(pack(record)) == record
    fine = TokenRecord((), ((TOKENS[0]._replace(confidence=0.91449),),))
    found = unpack(pack(fine))
    assert found is not None and found.rounds[0][0].confidence == 0.914


def test_the_chances_of_an_older_record_are_passed_over() -> None:
    record = TokenRecord((4, 0, 2), (TOKENS,))
    data = json.loads(zlib.decompress(pack(record)))
    older = data | {"acceptances": [1000, 250, None]}
    assert unpack(zlib.compress(json.dumps(older).encode())) == record


def test_what_is_no_record_is_none() -> None:
    packed = pack(TokenRecord((), (TOKENS,)))
    assert unpack(packed[:-3]) is None
    assert unpack(b"") is None
    assert unpack(zlib.compress(b"[]")) is None
    data = json.loads(zlib.decompress(packed))
    assert unpack(zlib.compress(json.dumps(data | {"version": 2}).encode())) is None
    assert unpack(zlib.compress(json.dumps(data | {"outcomes": "a"}).encode())) is None


def test_a_drafted_token_costs_less_than_ten_bytes() -> None:
    """Of text like a reply's: 400 words in use, confidences spread over the whole range."""
    rng = random.Random(5)
    words = {token: f" word{token}" for token in range(400)}
    rounds = []
    for _ in range(150):
        tokens = [min(399, int(rng.expovariate(1 / 60))) for _ in range(5)]
        rounds.append(
            tuple(
                DraftedToken(token, words[token], place - 1, rng.random(), "accepted")
                for place, token in enumerate(tokens)
            )
        )
    record = TokenRecord(tuple(rng.randrange(1, 8) for _ in range(600)), tuple(rounds))
    assert len(pack(record)) / 750 < 10
