"""A made-up grammar over token numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Rule = Callable[[Sequence[int]], set[int]]


class MadeUp:
    """A grammar whose rule gives the tokens that may follow a reply. is_wrong: it takes one token
    more than what is forced, as where the target spells a text in its own way."""

    def __init__(self, rule: Rule, size: int, is_wrong: bool = False) -> None:
        self.rule = rule
        self._is_wrong = is_wrong
        self._size = size

    def allows(self, reply: Sequence[int]) -> bool:
        return all(token in self.rule(reply[:place]) for place, token in enumerate(reply))

    def masks(self, reply: Sequence[int], texts: Sequence[Sequence[int]]) -> list[bytes]:
        return [self._mask([*reply, *text]) for text in texts]

    def forced(self, text: Sequence[int]) -> tuple[int, ...]:
        found = [*text]
        while len(allowed := self.rule(found)) == 1:
            found += allowed
        forced = tuple(found[len(text) :])
        return (*forced, max(allowed)) if forced and self._is_wrong else forced

    def _mask(self, text: list[int]) -> bytes:
        allowed = self.rule(text) if self.allows(text) else range(self._size)
        return sum(1 << token for token in allowed).to_bytes((self._size + 7) // 8, "little")
