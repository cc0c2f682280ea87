"""What a drafter may be built from, and what most drafters do not need to say.

Contract: load fills `Parts` once. Every drafter's `build(parts)` returns the drafter or raises
ModelError with the sentence that a person reads beside its greyed name. For a sequence that is
decoded beside others it is built again, of `Parts.beside`; what all share is made by `Parts.once`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from localspec.core.decoding import Outcome, Sequence
from localspec.core.errors import MemoryShortage, ModelError
from localspec.core.hindsight import ReviewSteps
from localspec.core.off_code import OffCode
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.lookup import Lookup
from localspec.drafters.vocabularies import Foreign
from localspec.forward.cache import KVCache
from localspec.forward.decoder import Decoder
from localspec.forward.graphs import Capturing, GraphPool
from localspec.forward.heads.files import TRAINED
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import DraftVocabulary, OutputHead

Made = TypeVar("Made")


class DrafterBase:
    """What the Drafter protocol asks and most drafters answer with nothing. A drafter declares its
    name, shapes_itself, signal and propose, and overrides what else it needs."""

    block_length: int | None = None

    @property
    def output(self) -> OutputHead | None:
        """The output head that it names tokens by, None where its tokens are those of others."""
        return None

    @property
    def memory_bytes(self) -> int:
        return 0

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """Large caches of its own, which hold the text."""
        return ()

    @property
    def captures(self) -> tuple[Capturing, ...]:
        """What of it can be captured as graphs in idle time."""
        return ()

    @property
    def beside_bytes(self) -> int:
        """What one more sequence takes, beyond the caches of `Parts`."""
        return 0

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Nothing to learn: `propose` reads what it missed."""

    def review(self, sequence: Sequence) -> ReviewSteps | None:
        """See core.hindsight. None: what it would have drafted cannot be told exactly."""
        return None


@dataclass(frozen=True)
class Parts:
    """target: loaded. draft: a loaded draft model with the target's tokens, else None and why in
    draft_refusal, and as a code for the page. pool: where draft chunks are captured, None where
    nothing is.

    heads: by kind (medusa, eagle, mtp) the folder of a head for this target. foreign: a draft model
    with other tokens, None with why in foreign_refusal. past: token ids of earlier conversations,
    oldest first, for lookup. draft_pool: as pool, for the draft model, which may be on a device of
    its own. refused_heads: why there is no room for a head, by kind. bits: of the target's linear
    layers, which a head that ships with it shares. vocabulary: of the tokens that heads name; a
    draft model is narrowed to it before. made: what `once` has made."""

    target: LanguageModel
    draft: LanguageModel | None = None
    draft_refusal: str = "no draft model was chosen for this target."
    draft_code: OffCode = "no_draft"
    pool: GraphPool | None = None
    heads: Mapping[str, Path] = field(default_factory=dict)
    foreign: Foreign | None = None
    foreign_refusal: str = "no draft with another vocabulary was chosen."
    past: tuple[tuple[int, ...], ...] = ()
    draft_pool: GraphPool | None = None
    refused_heads: Mapping[str, MemoryShortage] = field(default_factory=dict)
    bits: Literal[4, 8] | None = None
    vocabulary: DraftVocabulary = field(default_factory=DraftVocabulary)
    made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` gives, the same for all sequences: weights, and what is measured of them."""
        if name not in self.made:
            self.made[name] = make()
        found: Made = self.made[name]
        return found

    @cached_property
    def lookup(self) -> Lookup:
        """One index of a sequence for every drafter that looks up, made when first asked for."""
        size = self.target.vocab_size
        known = (ids for ids in self.past if all(0 <= token < size for token in ids))
        return self.once("lookup", lambda: Lookup([*known])).beside()

    def chunks(self, model: LanguageModel, num_children: int = 1) -> ChunkedDraft | None:
        """A captured draft loop of a model; None where nothing is captured, or no graph can hold
        the model's steps."""
        pool = self.pool if model.device == self.target.device else self.draft_pool
        if pool is None or not isinstance(model, Decoder) or not model.is_capturable:
            return None
        if model.weights.per_layer_inputs is not None:  # its drafts' tokens are needed on the host
            return None
        return ChunkedDraft(model, self.target.vocab_size, pool, num_children=num_children)

    @cached_property
    def draft_chunks(self) -> ChunkedDraft | None:
        """That of the draft model, the same for every drafter that drafts chains with it."""
        return self.chunks(self.loaded_draft())

    def beside(self) -> Parts | None:
        """The same models over caches of their own, for a sequence that is decoded beside; None
        where the target's rows cannot run in one forward with others'."""
        if not isinstance(self.target, Decoder):
            return None
        draft = self.draft.beside() if isinstance(self.draft, Decoder) else None
        foreign, own = self.foreign, None
        if foreign is not None and isinstance(foreign.model, Decoder):
            own = replace(foreign, model=foreign.model.beside())
        target = self.target.beside()
        return replace(self, target=target, draft=draft, foreign=own)

    def loaded_draft(self) -> LanguageModel:
        """Raises ModelError where there is no draft model."""
        if self.draft is None:
            raise ModelError(self.draft_refusal)
        return self.draft

    def head(self, kind: str, missing: str) -> Path:
        """The folder of a head of this kind. missing: what there is none of, for a person. Raises
        ModelError, MemoryShortage."""
        if kind in self.refused_heads:
            raise self.refused_heads[kind]
        if kind not in self.heads:
            remedy = f"Train one: python -m localspec train {kind}."
            if kind not in TRAINED:
                remedy = "Choose one that was published for it, and name its folder with --heads."
            raise ModelError(f"There is no {missing} for this target. {remedy}")
        return self.heads[kind]
