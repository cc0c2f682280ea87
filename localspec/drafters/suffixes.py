"""Every place where the end of a text has stood before, and how often what followed it did.

Contract: a suffix automaton that grows by one token at a time. A `Match` is a state and how many
tokens of it agree; it can be carried on by a token, cut to the next shorter context that occurs
elsewhere, and asked what followed it, with counts. Appending costs O(1) amortised, and a walk of
at most MAX_COUNTED links that keeps the counts true: in a text that repeats one token for ever
those of its shortest contexts stop growing. `part` begins another text: contexts never run across.

Not here: which match is believed (continuations), tokens of a sequence (lookup).
Source: online construction after Blumer et al. 1985; for drafting SAM-Decoding (arXiv
2411.10666), with counts as in SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

MAX_COUNTED = 32  # contexts whose counts one token raises
MAX_FOLLOWERS = 32  # of one context, the first seen: what came often came early

Match = tuple[int, int]  # state, length of the context known to agree
Follower = tuple[int, int, int]  # count, where it last ended, token
NOWHERE: Match = (0, 0)


class Suffixes:
    """The automaton of one text. State 0 is the empty context.

    State lists by number, not objects: a hundred thousand objects would slow every sweep of the
    garbage collector, dictionaries of numbers do not.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest suffix that occurs elsewhere too
        self._length = [0]  # of the longest context in the state
        self._count = [0]  # how often it occurs
        self._latest = [0]  # how many tokens there were when it last did
        self._end = 0  # the state of the whole text
        self._size = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def part(self) -> None:
        """End this text; what is appended from here on is another."""
        self._end = 0

    def append(self, token: int) -> None:
        state, following, link = self._end, self._next, self._link
        if token in following[state]:  # another text began so
            self._end = self._reached(state, token)
        else:
            self._end = added = self._add(self._length[state] + 1, {})
            while state >= 0 and token not in following[state]:
                following[state][token] = added
                state = link[state]
            link[added] = 0 if state < 0 else self._reached(state, token)
        self._size += 1
        self._raise_counts()

    def end(self) -> Match:
        """The longest end of the text that occurs earlier in it as well."""
        state = self._link[self._end]
        return (state, self._length[state]) if state > 0 else NOWHERE

    def after(self, match: Match, token: int) -> Match:
        """The longest context that occurs here once `token` follows `match`."""
        state, length = match
        following = self._next
        while token not in following[state]:
            state = self._link[state]
            if state < 0:
                return NOWHERE
            length = self._length[state]
        return following[state][token], length + 1

    def shorter(self, match: Match) -> Match:
        """The longest shorter context that occurs in more places; NOWHERE when none is left."""
        state = self._link[match[0]]
        return (state, self._length[state]) if state > 0 else NOWHERE

    def is_followed(self, match: Match) -> bool:
        """Whether anything ever came after this context; not so of the end of the text alone."""
        return bool(self._next[match[0]])

    def followers(self, match: Match) -> list[Follower]:
        """What came after this context, most often first, of equals the latest first."""
        found, count, latest = self._next[match[0]], self._count, self._latest
        listed = [(count[s], latest[s], t) for t, s in islice(found.items(), MAX_FOLLOWERS)]
        if len(listed) > 1:
            listed.sort(reverse=True)
        return listed

    def _reached(self, state: int, token: int) -> int:
        """The state of exactly `state` and `token`, split off where it was part of a longer one."""
        following, link, length = self._next, self._link, self._length
        reached = following[state][token]
        if length[reached] == length[state] + 1:
            return reached
        split = self._add(length[state] + 1, dict(following[reached]))
        self._count[split], self._latest[split] = self._count[reached], self._latest[reached]
        link[split], link[reached] = link[reached], split
        while state >= 0 and following[state].get(token) == reached:
            following[state][token] = split
            state = link[state]
        return split

    def _raise_counts(self) -> None:
        state, place, left = self._end, self._size, MAX_COUNTED
        link, count, latest = self._link, self._count, self._latest
        while state > 0 and left:
            count[state] += 1
            latest[state] = place
            state = link[state]
            left -= 1

    def _add(self, length: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1
