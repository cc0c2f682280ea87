"""Where the end of a sequence has stood before: in itself, and in past conversations.

Contract: `follow` brings the index up to date with a sequence and says where its end stands, as a
`Place`: one match in the sequence itself and one in the past. The sequence itself speaks unless
the past agrees for more than HANDICAP tokens longer. Within a turn the text only grows and each
token is indexed once, in a few microseconds; a sequence that goes on differently from what is held
is indexed anew. The past is indexed when the lookup is built, its newest MAX_PAST_TOKENS tokens,
and never again: it takes tenths of a second and some 30 MB, and no turn waits for it. One lookup
serves every drafter of a target.

Not here: the automaton (suffixes), how far a match is believed (continuations).
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.drafters.suffixes import NOWHERE, Follower, Match, Suffixes
from localspec.forward.cache import common_prefix_length

MIN_MATCH = 2
# A match in other texts says as much as one shorter by this in the same text: where 5, 6, 7 tokens
# agreed with other conversations the next did 0.30, 0.31, 0.45 of the time; where 2, 3, 4 did with
# the same one, 0.33, 0.45, 0.51.
HANDICAP = 4
MAX_PAST_TOKENS = 65_536
PAST_CONTEXT = 64  # tokens read to find the place in the past: no more of them say more

Place = tuple[Match, Match]  # in the sequence itself, in the past


class Lookup:
    """The index of one sequence at a time, beside the fixed one of the past."""

    def __init__(self, past: Sequence[tuple[int, ...]] = ()) -> None:
        """past: earlier conversations, oldest first."""
        self._past = Suffixes()
        for tokens in _newest(past):
            self._past.extend(tokens)
            self._past.part()
        self._own = Suffixes()
        self._source: list[int] = []  # the list that is indexed, as far as `_own` is long
        self._past_match = NOWHERE
        self._found: tuple[int, Place] = (0, (NOWHERE, NOWHERE))

    def follow(self, tokens: list[int]) -> Place:
        """Where the end of `tokens` stands; they are held, and may only grow from here on."""
        if tokens is not self._source:
            self._turn_to(tokens)
        length = len(tokens)
        if self._found[0] != length:
            for token in tokens[len(self._own) :]:
                self._own.append(token)
                self._past_match = self._past.after(self._past_match, token)
            self._found = (length, self._speaking((self._own.end(), self._past_match)))
        return self._found[1]

    def after(self, place: Place, token: int) -> Place:
        """Where the text stands once `token` follows."""
        own, past = place
        if past[1]:  # else too short a match for the past to speak could begin here
            past = self._past.after(past, token)
        return self._speaking((self._own.after(own, token), past))

    def followers(self, place: Place) -> list[Follower]:
        """What followed the match that speaks, most often first; empty only where none speaks."""
        own, past = place
        if is_own(place):
            return self._own.followers(own)
        return self._past.followers(past) if past[1] > HANDICAP else []

    def shorter(self, place: Place) -> Place:
        """Without the match that speaks: the next shorter one in its stead."""
        return self._speaking(self._cut(place))

    def _cut(self, place: Place) -> Place:
        own, past = place
        return (self._own.shorter(own), past) if is_own(place) else (own, self._past.shorter(past))

    def _speaking(self, place: Place) -> Place:
        """The first place from here on whose match was followed by something. The end of the
        text itself is a match that was not."""
        while True:
            if is_own(place):
                if self._own.is_followed(place[0]):
                    return place
            elif place[1][1] <= HANDICAP or self._past.is_followed(place[1]):
                return place
            place = self._cut(place)

    def _turn_to(self, tokens: list[int]) -> None:
        held = len(self._own)
        if common_prefix_length(self._source[:held], tokens) < held:
            self._own = Suffixes()
            held = 0
        self._source = tokens
        self._found = (0, (NOWHERE, NOWHERE))
        self._past_match = NOWHERE
        for token in tokens[max(0, held - PAST_CONTEXT) : held]:
            self._past_match = self._past.after(self._past_match, token)


def is_own(place: Place) -> bool:
    """Whether the sequence itself speaks, not the past."""
    own, past = place
    return own[1] >= MIN_MATCH and own[1] >= past[1] - HANDICAP


def length_of(place: Place) -> int:
    """How many tokens agree where it speaks, of the past less HANDICAP; 0 where nothing does."""
    own, past = place
    return own[1] if is_own(place) else max(0, past[1] - HANDICAP)


def _newest(past: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The newest conversations that fit, oldest first; of the oldest of them its end."""
    kept, left = list[tuple[int, ...]](), MAX_PAST_TOKENS
    for tokens in reversed(past):
        if left <= 0:
            break
        kept.append(tokens[-left:])
        left -= len(kept[-1])
    return kept[::-1]
