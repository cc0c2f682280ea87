"""What the drafters with an autoregressive head share: EAGLE and multi-token prediction.

Contract: the head reads pairs of neighbouring tokens with the states that the target left beside
its cache, and catches up with the sequence by longest common prefix. So rejection, edit and the
next turn need nothing more.

Not here: the shape of a draft (eagle, mtp), the head (forward.heads.autoregressive).
"""

from __future__ import annotations

from localspec.core.decoding import Sequence
from localspec.drafters.parts import DrafterBase
from localspec.forward.heads.autoregressive import AutoregressiveHead, HeadParts
from localspec.forward.model import LanguageModel


class HeadDrafter(DrafterBase):
    """Drafts with a head that reads the hidden states of `target`. reads_once: whether the host
    reads a draft when it is whole, None for where each read would be a wait."""

    def __init__(
        self, target: LanguageModel, parts: HeadParts, reads_once: bool | None = None
    ) -> None:
        self._reads_once = target.device.type != "cpu" if reads_once is None else reads_once
        self._target = target
        self._head = AutoregressiveHead(parts, target.cache.shape.capacity)
        self._features = target.follow(self._head.layers)

    @property
    def memory_bytes(self) -> int:
        return self._head.memory_bytes + self._features_bytes

    @property
    def beside_bytes(self) -> int:
        return self._head.cache.kv_bytes + self._features_bytes

    @property
    def _features_bytes(self) -> int:
        return sum(self._features.slots(layer).nbytes for layer in self._head.layers)

    def signal(self, sequence: Sequence) -> str | None:
        return "head" if len(sequence.tokens) > 1 else None  # the first pair is of two tokens
