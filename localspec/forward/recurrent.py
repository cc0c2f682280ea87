"""Models whose memory of the text is a state of fixed size: linear attention, convolutions, Mamba.

Contract: a LanguageModel for chains. transformers computes it, with a cache of its own. `cache`
mirrors the tokens and holds no slots. The state of an earlier length cannot be computed from a
later one, so the state before every forward of several tokens is held: after a rejected draft it is
taken up again and the accepted tokens are read a second time, within the round that drafted. Where
a text goes on from neither, it is read again from its start. So every method of the cache keeps its
promise, at the cost of time.

A text may be read in pieces, except by the families of TOKEN_BY_TOKEN: there, and where pieces give
other logits when a model is loaded, `reads_pieces` is False and later tokens are read one by one,
so that no draft pays. Where that gives other logits too the model is refused.

Not here: which families these are (formats.attention), loading (weights).
Source: Mamba (arXiv 2312.00752), Gated DeltaNet (arXiv 2412.06464), Jamba (arXiv 2403.19887).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from localspec.core.errors import ModelError
from localspec.formats.attention import (
    TAKES_CHAINS,
    TOKEN_BY_TOKEN,
    chains_for,
    no_drafts_for,
)
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.features import Features
from localspec.forward.model import AGREEMENT, PREFILL_CHUNK, LanguageModel, ModuleLM
from localspec.forward.upload import indices

PIECES = (6, 3)  # tokens that are read at once and in pieces


class StateCache(KVCache):
    """The tokens that a state has read. settled: called when a round has kept what it accepted."""

    def __init__(self, shape: KVShape, module: Any, settled: Callable[[], None]) -> None:
        super().__init__(shape, module.dtype, module.device)
        self._settled = settled

    @property
    def takes_trees(self) -> bool:
        return False

    def keep(self, base: int, path: Sequence[int]) -> None:
        super().keep(base, path)
        self._settled()


class RecurrentLM(ModuleLM):
    """A module of transformers whose own cache is its state."""

    def __init__(self, module: Any, capacity: int) -> None:
        super().__init__(module, StateCache(KVShape(0, 1, 1, capacity), module, self._settle))
        self._names = inspect.signature(module.forward).parameters
        self._state_name = "cache_params" if "cache_params" in self._names else "past_key_values"
        self._state: Any = None
        self._read = list[int]()  # the tokens that the state has read
        self._held: tuple[list[int], Any] = ([], None)  # as they were before several tokens
        family = str(module.config.model_type)
        self.reads_pieces = family not in TOKEN_BY_TOKEN
        self._compare_pieces()
        self.refusal = chains_for(family) if self.reads_pieces else no_drafts_for(family)

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
            self._go_to(self.cache.tokens)
            return self._run(tokens, wanted)

    @torch.inference_mode()
    def _settle(self) -> None:
        if len(self._read) > self.cache.length:
            self._go_to(self.cache.tokens)

    def _go_to(self, tokens: Sequence[int]) -> None:
        """Bring the state to these tokens, from where it is, from the one held or from none."""
        if self._read == tokens:
            return
        held, state = self._held
        is_before = state is not None and tokens[: len(held)] == held
        self._state, self._read = (_copied(state), [*held]) if is_before else (None, [])
        for start in range(len(self._read), len(tokens), PREFILL_CHUNK):
            self._run(tokens[start : start + PREFILL_CHUNK], 1)

    def _run(self, tokens: Sequence[int], wanted: int) -> torch.Tensor:
        """Logits after the last tokens, [wanted, V] fp32."""
        if len(tokens) > 1 and self.reads_pieces and self._state is not None:
            self._held = ([*self._read], _copied(self._state))
        is_whole = self.reads_pieces or self._state is None
        pieces = [tokens] if is_whole else [[token] for token in tokens]
        rows = list[torch.Tensor]()
        state, read = self._state, [*self._read]
        self._state, self._read = None, []  # nothing is left of them where the forward fails
        for piece in pieces:
            named = self._arguments(piece, state, len(read), wanted)
            output = self.module(**named, use_cache=True)
            state = getattr(output, self._state_name)
            read.extend(piece)
            rows.append(output.logits[0].float())
        self._state, self._read = state, read
        return torch.cat(rows)[-wanted:]

    def _arguments(
        self, tokens: Sequence[int], state: Any, start: int, wanted: int
    ) -> dict[str, Any]:
        """Of the module's forward, as far as it takes them. Left out, the positions of Bamba begin
        at 0 in every piece."""
        known = {
            "input_ids": indices([tokens], self.device),
            self._state_name: state,
            "position_ids": indices([range(start, start + len(tokens))], self.device),
            "logits_to_keep": wanted,
        }
        return {name: value for name, value in known.items() if name in self._names}

    def _compare_pieces(self) -> None:
        """Find out how text may be read on. Raises ModelError where neither way gives the logits of
        the text read at once."""
        ids = [(7 * place + 1) % self.vocab_size for place in range(sum(PIECES))]
        whole, allowed = self.forward(ids), AGREEMENT[self.module.dtype]
        self.cache.rollback(0)
        for is_tried in (True, False) if self.reads_pieces else (False,):
            self.reads_pieces = is_tried
            self._held = ([], None)
            found = self._answers_in_pieces(ids)
            if float((found - whole).norm(dim=(1, 2)).max() / whole.norm()) <= allowed:
                return
        raise ModelError(
            f"This version of transformers gives other logits for {self.module.config.model_type} "
            "when a text is read token by token than when it is read at once, so no reply of it "
            "could be trusted. Choose a model of another family, such as Qwen3."
        )

    def _answers_in_pieces(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of two pieces, and once more after the second was taken back, [2, sum, V]."""
        first = self.forward(ids[: PIECES[0]])
        found = list[torch.Tensor]()
        for _ in range(2):
            found.append(torch.cat((first, self.forward(ids[PIECES[0] :]))))
            self.cache.rollback(PIECES[0])
        self.cache.rollback(0)
        return torch.stack(found)

    def follow(self, layers: Sequence[int], of_last_row: bool = False) -> Features:
        raise ModelError(self.refusal)


def refusal_of(
    model: LanguageModel, needs_trees: bool = False, reads_layers: bool = False
) -> str | None:
    """Return why a drafter cannot draft for this model, None if it can. needs_trees, reads_layers:
    of the drafter, see registry.DrafterInfo."""
    if isinstance(model, RecurrentLM):
        is_refused = needs_trees or reads_layers or not model.reads_pieces
        return model.refusal if is_refused else None
    return TAKES_CHAINS if needs_trees and not model.cache.takes_trees else None


def _copied(state: Any) -> Any:
    """A cache of transformers that further forwards of the other leave as it is. They write into
    the tensors of states (in dicts and lists) and replace those of keys and values."""
    made = copy.copy(state)
    made.layers = [copy.copy(layer) for layer in state.layers]
    for part in (made, *made.layers):
        for name, value in vars(part).items():
            if isinstance(value, dict):
                setattr(part, name, {key: _cloned(each) for key, each in value.items()})
            elif isinstance(value, list):
                setattr(part, name, [_cloned(each) for each in value])
    return made


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
