"""Models whose memory of the text is a state of fixed size: linear attention, convolutions, Mamba.

Contract: a LanguageModel for plain decoding. transformers computes it, with a cache of its own. The
state of an earlier length cannot be had back, so nothing drafts for such a model. `cache` mirrors
the tokens and holds no slots: where a text does not go on from what the state has read, the state
is dropped and the text is read again from its start. So every method of the cache keeps its
promise, at the cost of time.

A text may be read in pieces. Some families of transformers lose the state between pieces of several
tokens: `reads_pieces` is compared once, and where it is False later tokens are read one by one.
Where that gives other logits too the model is refused.

Not here: which families these are (formats.attention), loading (weights).
Source: Mamba (arXiv 2312.00752), Gated DeltaNet (arXiv 2412.06464), Jamba (arXiv 2403.19887).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from localspec.errors import ModelError
from localspec.formats.attention import no_drafts_for
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.features import Features
from localspec.forward.model import AGREEMENT, PREFILL_CHUNK, ModuleLM
from localspec.forward.upload import indices

PIECES = (6, 3)  # tokens that are read at once and in pieces


class RecurrentLM(ModuleLM):
    """A module of transformers whose own cache is its state."""

    def __init__(self, module: Any, capacity: int) -> None:
        shape = KVShape(0, 1, 1, capacity)
        super().__init__(module, KVCache(shape, module.dtype, module.device))
        self.refusal = no_drafts_for(str(module.config.model_type))
        parameters = inspect.signature(module.forward).parameters
        self._state_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._keeps_few = "logits_to_keep" in parameters
        self._state: Any = None
        self._read = list[int]()  # the tokens that the state has read
        self.reads_pieces = True
        self._compare_pieces()

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See CausalLM.forward; a chain only."""
        assert parents is None, "a state follows one text"
        wanted = len(tokens) if num_logits is None else num_logits
        with self.cache.append(tokens):
            if self._read != self.cache.tokens:
                self._state, self._read = None, []
                for start in range(0, self.cache.length, PREFILL_CHUNK):
                    self._run(self.cache.tokens[start : start + PREFILL_CHUNK], 1)
            return self._run(tokens, wanted)

    def _run(self, tokens: Sequence[int], wanted: int) -> torch.Tensor:
        """Logits after the last tokens, [wanted, V] fp32."""
        few = {"logits_to_keep": wanted} if self._keeps_few else {}
        is_whole = self.reads_pieces or self._state is None
        pieces = [tokens] if is_whole else [[token] for token in tokens]
        rows = list[torch.Tensor]()
        for piece in pieces:
            output = self.module(
                input_ids=indices([piece], self.device),
                use_cache=True,
                **{self._state_name: self._state},
                **few,
            )
            self._state = getattr(output, self._state_name)
            rows.append(output.logits[0].float())
        self._read += tokens
        return torch.cat(rows)[-wanted:]

    def _compare_pieces(self) -> None:
        """Find out how text may be read on. Raises ModelError where neither way gives the logits of
        the text read at once."""
        ids = [(7 * place + 1) % self.vocab_size for place in range(sum(PIECES))]
        whole = self._answers(ids)
        for self.reads_pieces in (True, False):
            found = self._answers(ids[: PIECES[0]], ids[PIECES[0] :])
            if float((found - whole).norm() / whole.norm()) <= AGREEMENT[self.module.dtype]:
                return
        raise ModelError(
            f"This version of transformers gives other logits for {self.module.config.model_type} "
            "when a text is read token by token than when it is read at once, so no reply of it "
            "could be trusted. Choose a model of another family, such as Qwen3."
        )

    def _answers(self, *pieces: Sequence[int]) -> torch.Tensor:
        logits = torch.cat([self.forward(piece) for piece in pieces])
        self.cache.rollback(0)
        return logits

    def follow(self, layers: Sequence[int]) -> Features:
        raise ModelError(self.refusal)
