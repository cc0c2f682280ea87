"""A multi-token-prediction module drafts token by token from the target's last state.

Contract: the module's cache holds one row for each pair of neighbouring tokens, made of the
target's state of the first and the embedding of the second. It catches up by the longest common
prefix with the sequence, so rejection, edit and the next turn need nothing more. Rows that a draft
made of the module's own states are erased when the draft is done, also where its tokens are
accepted: the target's states replace them. How a token is taken and when the draft ends is
`drafting.Drafting`'s.

Source: multi-token prediction for drafting, DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import torch

from localspec.core import DraftPlan, Proposal, Sequence
from localspec.drafters.drafting import Drafting
from localspec.drafters.parts import DrafterBase, Parts
from localspec.forward.features import LAST
from localspec.forward.heads.files import CONFIG
from localspec.forward.heads.mtp import MtpHead, read_mtp, read_native
from localspec.forward.model import PREFILL_CHUNK, LanguageModel


class MtpDrafter(DrafterBase):
    """Drafts with `head` on the states of `target`."""

    name = "mtp"
    shapes_itself = False

    def __init__(self, head: MtpHead, target: LanguageModel) -> None:
        self._head = head
        self._target = target
        self._features = target.follow([LAST])
        # The cache names row j by token j + 1, but every row depends on the first token as well.
        self._first: int | None = None

    @classmethod
    def build(cls, parts: Parts) -> MtpDrafter:
        folder, target = parts.head(cls.name, "multi-token-prediction module"), parts.target
        is_native = not (folder / CONFIG).is_file() and (folder / "config.json").is_file()
        read = read_native if is_native else read_mtp
        return cls(MtpHead(read(folder, target), target.cache.shape.capacity), target)

    @property
    def memory_bytes(self) -> int:
        return self._head.memory_bytes + self._features.slots(LAST).nbytes

    def signal(self, sequence: Sequence) -> str | None:
        """None while there is no state before the root."""
        return "head" if len(sequence.tokens) > 1 else None

    def prepare(self, sequence: Sequence) -> None:
        """All rows but the newest, of what the target holds (less, after a cancelled prefill)."""
        self._reuse(sequence)
        self._catch_up(sequence, min(len(sequence.tokens) - 2, self._target.cache.length))

    @torch.inference_mode()
    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        draft = Drafting(sequence, plan, self._target.vocab_size)
        if draft.is_full or self.signal(sequence) is None:
            return Proposal()
        self._reuse(sequence)
        num_rows = len(sequence.tokens) - 1
        state = self._catch_up(sequence, num_rows)  # [1, d]
        try:
            while draft.take(draft.row(self._target.head(state)[0])):
                newest = draft.tokens[-1:]
                state = self._head.advance(newest, state, self._target.embed(newest))
        finally:
            self._head.cache.rollback(num_rows)
        return draft.proposal()

    def _reuse(self, sequence: Sequence) -> None:
        """Keep the rows whose tokens are the sequence's, but not the newest row: the draft starts
        from its output."""
        cache = self._head.cache
        if self._first != sequence.tokens[0]:
            cache.rollback(0)
            self._first = sequence.tokens[0]
        cache.reuse(sequence.tokens[1:-1])

    def _catch_up(self, sequence: Sequence, end: int) -> torch.Tensor:
        """Make the rows up to `end`; returns the last one's state, [1, d], of those made now."""
        states = self._features.rows(LAST, 0, 0)  # [0, d]
        while self._head.cache.length < end:
            start = self._head.cache.length
            stop = min(end, start + PREFILL_CHUNK)
            tokens = sequence.tokens[start + 1 : stop + 1]
            rows = self._features.rows(LAST, start, stop)  # [n, d]
            states = self._head.advance(tokens, rows, self._target.embed(tokens))
        return states[-1:]
