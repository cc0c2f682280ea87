"""Where the end of a sequence occurred before: in the sequence itself, and in past conversations.

Contract: `Suffixes` is a suffix automaton that grows by one token at a time. A `Match` is a state
and the number of tokens that agree. It can be carried on by a token, cut to the next shorter
context that occurs elsewhere, and asked what followed it, with counts. Appending costs O(1)
amortised plus a walk of at most MAX_COUNTED links that updates the counts. In a text that repeats
one token for ever, the counts of its shortest contexts therefore stop growing.

`Lookup` holds two of them. `follow` brings the index up to date with a sequence and returns its
`Matches`: a match in the sequence itself and one in the past. The match in the sequence is used
unless the one in the past is more than HANDICAP tokens longer. Within a turn the text only grows
and each token is indexed once, in a few microseconds. A sequence that continues differently from
what is held is indexed anew. The past is indexed when the lookup is built, its newest
MAX_PAST_TOKENS tokens: that takes tenths of a second and some 30 MB, and no turn waits for it.
One lookup serves every drafter of a target. A predicted reply is indexed before the sequence, as a
text of its own: the most frequent follower is taken, of equals the one in the sequence.

Not here: the chance of a follower (ngram).
Source: online construction after Blumer et al. 1985; for drafting SAM-Decoding (arXiv 2411.10666),
with counts as in SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from localspec.core.prefix import common_prefix_length

MAX_COUNTED = 32  # contexts whose counts one token raises
MAX_FOLLOWERS = 32  # of one context, the first seen: frequent ones are seen early

Match = tuple[int, int]  # state, length of the context known to agree
Follower = tuple[int, int, int]  # count, where it last ended, token
NOWHERE: Match = (0, 0)
MIN_MATCH = 2
# A match in another text predicts the next token as well as one shorter by this in the same text:
# after 5, 6, 7 tokens that agreed with other conversations the next did 0.30, 0.31, 0.45 of the
# time; after 2, 3, 4 within the same one, 0.33, 0.45, 0.51.
HANDICAP = 4
MAX_PAST_TOKENS = 65_536
PAST_CONTEXT = 64  # tokens read to find the place in the past

Matches = tuple[Match, Match]  # in the sequence itself, in the past


class Suffixes:
    """The automaton of one text. State 0 is the empty context.

    Lists by the number of the state instead of objects: a hundred thousand objects would slow every
    run of the garbage collector; dictionaries of numbers do not.
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
        """End this text; what is appended from here on is another text."""
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
        """The longest end of the text that also occurs earlier in it."""
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
        """The longest shorter context that occurs in more places; NOWHERE where there is none."""
        state = self._link[match[0]]
        return (state, self._length[state]) if state > 0 else NOWHERE

    def is_followed(self, match: Match) -> bool:
        """Whether any token follows this context anywhere; none follows the end of the text."""
        return bool(self._next[match[0]])

    def followers(self, match: Match) -> list[Follower]:
        """What followed this context, the most frequent first, of equals the latest first."""
        found, count, latest = self._next[match[0]], self._count, self._latest
        listed = [(count[s], latest[s], t) for t, s in islice(found.items(), MAX_FOLLOWERS)]
        if len(listed) > 1:
            listed.sort(reverse=True)
        return listed

    def _reached(self, state: int, token: int) -> int:
        """The state of `state` and `token`, split off where it was part of a longer context."""
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


class Lookup:
    """The index of one sequence at a time, beside the fixed one of the past."""

    def __init__(self, past: Sequence[tuple[int, ...]] = ()) -> None:
        """past: earlier conversations, oldest first."""
        self._past = Suffixes()
        for tokens in _newest(past):
            self._past.extend(tokens)
            self._past.part()
        self._own = Suffixes()
        self._source: list[int] = []  # the list that is indexed, after what was predicted of it
        self._prediction: tuple[int, ...] = ()
        self._past_match = NOWHERE
        self._found: tuple[int, Matches] = (0, (NOWHERE, NOWHERE))

    def beside(self) -> Lookup:
        """The same past, for another sequence."""
        found = Lookup()
        found._past = self._past
        return found

    @property
    def _num_indexed(self) -> int:
        return len(self._own) - len(self._prediction)

    def follow(self, tokens: list[int], prediction: tuple[int, ...] = ()) -> Matches:
        """The place of the end of `tokens`. The list is held and may only grow afterwards.
        prediction: a text that stands before it in the index."""
        if tokens is not self._source or prediction != self._prediction:
            self._turn_to(tokens, prediction)
        length = len(tokens)
        if self._found[0] != length:
            for token in tokens[self._num_indexed :]:
                self._own.append(token)
                self._past_match = self._past.after(self._past_match, token)
            self._found = (length, self._followed((self._own.end(), self._past_match)))
        return self._found[1]

    def after(self, place: Matches, token: int) -> Matches:
        """The place after one more token."""
        own, past = place
        if past[1]:  # a match that began here would be too short to be used
            past = self._past.after(past, token)
        return self._followed((self._own.after(own, token), past))

    def followers(self, place: Matches) -> list[Follower]:
        """What followed the match in use, the most frequent first; empty where none is in use."""
        own, past = place
        if is_own(place):
            return self._own.followers(own)
        return self._past.followers(past) if past[1] > HANDICAP else []

    def shorter(self, place: Matches) -> Matches:
        """The place with the match in use replaced by the next shorter one."""
        return self._followed(self._cut(place))

    def _cut(self, place: Matches) -> Matches:
        own, past = place
        return (self._own.shorter(own), past) if is_own(place) else (own, self._past.shorter(past))

    def _followed(self, place: Matches) -> Matches:
        """The first place from here on whose match was followed by something, which the end of
        the text was not."""
        while True:
            if is_own(place):
                if self._own.is_followed(place[0]):
                    return place
            elif place[1][1] <= HANDICAP or self._past.is_followed(place[1]):
                return place
            place = self._cut(place)

    def _turn_to(self, tokens: list[int], prediction: tuple[int, ...]) -> None:
        held = self._num_indexed
        is_other = prediction != self._prediction
        if is_other or common_prefix_length(self._source[:held], tokens) < held:
            self._own, self._prediction = Suffixes(prediction), prediction
            self._own.part()
            held = 0
        self._source = tokens
        self._found = (0, (NOWHERE, NOWHERE))
        self._past_match = NOWHERE
        for token in tokens[max(0, held - PAST_CONTEXT) : held]:
            self._past_match = self._past.after(self._past_match, token)


def is_own(place: Matches) -> bool:
    """Whether the match in the sequence is in use, not the one in the past."""
    own, past = place
    return own[1] >= MIN_MATCH and own[1] >= past[1] - HANDICAP


def length_of(place: Matches) -> int:
    """Length of the match in use, of one in the past less HANDICAP; 0 where none is in use."""
    own, past = place
    return own[1] if is_own(place) else max(0, past[1] - HANDICAP)


def _newest(past: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The newest conversations that fit, oldest first; the oldest of them may be cut."""
    kept, left = list[tuple[int, ...]](), MAX_PAST_TOKENS
    for tokens in reversed(past):
        if left <= 0:
            break
        kept.append(tokens[-left:])
        left -= len(kept[-1])
    return kept[::-1]
