"""A native decoder for blocks of attention and feed-forward: tokens in, logits out, nothing else.

Contract: the same as `model.CausalLM` (and its reference): `forward` appends n slots to the cache
and returns fp32 logits. One product for query, key and value, one for gate and up; keys and
values are written into the preallocated cache and read from it in place. `look_back` runs tokens
that are cached once more, for hidden states, and leaves the cache as it was. `run_together` runs
rows of several sequences, each a decoder with a cache of its own over the same weights, and reads
the weights once.

Not here: what a layer holds (block), making blocks of files (builder), captured graphs
(graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod

import torch

from localspec.formats.attention import RING_SPARE_OF_SHARED, ring_spare
from localspec.forward.attention import cached_attention, each_its_own
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.decoder_weights import Weights
from localspec.forward.delta_net import DeltaNet
from localspec.forward.features import LAST, Features
from localspec.forward.mixer import LayerAttend, Table
from localspec.forward.model import PREFILL_CHUNK, LanguageModel, prefill
from localspec.forward.output_head import DraftVocabulary
from localspec.forward.passes import Rows
from localspec.forward.restoring import looking_back
from localspec.forward.row_attention import Attend
from localspec.forward.states import StateRows
from localspec.forward.tree import depths
from localspec.forward.upload import indices
from localspec.weights.dense import fewest_rows
from localspec.weights.linear import Linear, filled

assert RING_SPARE_OF_SHARED == PREFILL_CHUNK, "a piece of a prompt overwrites none of its window"


@dataclass(frozen=True)
class Output:
    """logits: [num_logits, V] fp32. hidden: layer -> [n, d], the residual after it; layer LAST is
    what the head reads, normalised."""

    logits: torch.Tensor
    hidden: dict[int, torch.Tensor]


@dataclass(frozen=True)
class LastRows:
    """The last rows of a forward, which layers from `layer` on compute alone: how many they are,
    and their attention."""

    layer: int
    size: int
    attend: Attend


class Decoder:
    """Weights and one cache: a LanguageModel.

    is_fastest: a few rows run as they are, which is faster for one of them and rounds differently
    from several; always so off a processor. Otherwise a row's bits depend on its
    text alone (weights.dense). shares_forwards: whether its rows may run beside those of other
    sequences. reader: the decoder that owns the cache, None for this one. What the cache has to
    read again, the owner reads, never the layers of a drafter."""

    shares_forwards = True

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        is_fastest: bool = False,
        reader: Decoder | None = None,
    ) -> None:
        self._reader = reader or self
        self.weights = weights
        self.cache = cache
        self.is_fastest = is_fastest or not cache.has_key_blocks
        self._fewest_rows = 1 if self.is_fastest else fewest_rows(weights.linears[:-1])
        self._fewest_head_rows = 1 if self.is_fastest else fewest_rows([weights.head])
        self.device = weights.embedding.device
        self.vocab_size = weights.embedding.shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.weights.blocks)

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes

    @property
    def sharing_key(self) -> Hashable:
        """See LanguageModel."""
        return id(self.weights) if self.shares_forwards else id(self)

    def forward_rows(self, parts: Sequence[Rows]) -> list[torch.Tensor]:
        """See LanguageModel."""
        return [output.logits for output in run_together(parts)]

    @property
    def is_capturable(self) -> bool:
        """True if its forward can be a graph."""
        states = self.cache.states
        return not self.weights.reads_host and (states is None or states.is_capturable)

    @property
    def written_features(self) -> Features | None:
        """The hidden states that its forwards keep."""
        return self.cache.features

    def follow(self, layers: Sequence[int], of_last_row: bool = False) -> Features:
        """Keep the hidden states of these layers beside the cache from now on."""
        embedding = self.weights.embedding
        return self.cache.follow(layers, embedding.shape[1], embedding.dtype, of_last_row)

    @torch.inference_mode()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of normalised rows: [n, d] -> [n, V] fp32."""
        made = self.weights.logits(filled(rows, self._fewest_head_rows))
        return made[: rows.shape[0]].float()

    def with_linears(self, change: Callable[[Linear], Linear]) -> Decoder:
        """A decoder over the same cache with other linear layers; all else is shared. It is as fast
        as it can be: what it is for is drafting."""
        blocks = tuple(block.with_linears(change) for block in self.weights.blocks)
        weights = replace(self.weights, blocks=blocks, head=change(self.weights.head))
        return Decoder(weights, self.cache, is_fastest=True, reader=self)

    def beside(self) -> Decoder:
        """The same model over a cache of its own, for another sequence."""
        return Decoder(self.weights, self.cache.another(), self.is_fastest)

    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """See CausalLM.forward: [num_logits, V] fp32. Raises CacheError at the context's end."""
        return run_together([Rows(self, tokens, parents, num_logits)])[0].logits

    @torch.inference_mode()
    def look_back(self, num_tokens: int, keep: Sequence[int]) -> Output:
        """Run the last cached tokens once more, for logits and for hidden states of the layers in
        `keep`. The cache is left as it was: only `forward` puts rows into it, so that a decoder
        that fixes how it runs them need not be asked here."""
        with looking_back(self.cache, self.cache.length - num_tokens) as tokens:
            return run_together([Rows(self, tokens)], keep)[0]

    def catch_up(self) -> None:
        """Read the tokens again that no state has read, after a rollback behind them."""
        if missing := self.cache.unread():
            prefill(self._reader, missing)

    def wanted_layers(self, keep: Sequence[int]) -> frozenset[int]:
        """Those of `keep` and those that are followed."""
        features = self.written_features
        return frozenset(keep).union(() if features is None else features.layers)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return self.weights.embed(indices(ids, self.device))  # [n, d]

    def looked_up(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return what the tables of inputs of every layer say of tokens, on the device; None where
        there is none."""
        inputs, embedding = self.weights.per_layer_inputs, self.weights.embedding
        if inputs is None:
            return None
        return inputs.looked_up(tokens, embedding.dtype, self.device)

    def unpadded_layers(
        self,
        rows: torch.Tensor,
        tables: Sequence[Table],
        attend: Attend,
        keep: frozenset[int] = frozenset(),
        looked_up: torch.Tensor | None = None,
        last: LastRows | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Through all blocks: rows [n, d], cosines and sines of each table [n, 1, rotated] ->
        [n, d] and what was to be kept. looked_up: of the tokens, see PerLayerInputs. last: the rows
        that leave, where these are not all. Tensors in, tensors out: the part that a graph
        captures."""
        hidden, inputs = dict[int, torch.Tensor](), rows[:0]
        if self.weights.per_layer_inputs is not None:
            assert looked_up is not None, "the tokens of the rows are known on the host"
            inputs = self.weights.per_layer_inputs.of_rows(rows, looked_up)
        for layer, block in enumerate(self.weights.blocks):
            if last is not None and layer == last.layer:
                rows, inputs, attend = rows[-last.size :], inputs[-last.size :], last.attend
                tables = [(cos[-last.size :], sin[-last.size :]) for cos, sin in tables]
            own_inputs = None if block.per_layer_gate is None else inputs[:, layer]
            swapped = self.weights.swapped
            rows = block(rows, tables, swapped, partial(attend, layer), own_inputs)
            if layer in keep:
                hidden[layer] = rows
        return rows, hidden

    def layers(
        self,
        rows: torch.Tensor,
        tables: Sequence[Table],
        attend: Attend,
        keep: frozenset[int],
        looked_up: torch.Tensor | None = None,
        last: LastRows | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """As `unpadded_layers`, for as many rows as keep their bits the same (weights.linear)."""
        size, count = rows.shape[0], self._fewest_rows
        if size >= count or last is not None:  # those are enough
            return self.unpadded_layers(rows, tables, attend, keep, looked_up, last)
        tables = [(filled(cos, count), filled(sin, count)) for cos, sin in tables]
        looked_up = None if looked_up is None else filled(looked_up, count)
        made, hidden = self.unpadded_layers(filled(rows, count), tables, attend, keep, looked_up)
        return made[:size], {layer: kept[:size] for layer, kept in hidden.items()}

    def last_rows(self, part: Rows, start: int, keep: Sequence[int]) -> LastRows | None:
        """Return the rows of a piece of a prompt that all layers compute, where some layers compute
        no others; None where every layer computes all. start: the slot of its first row. keep:
        layers whose hidden states are returned."""
        num_rows, first = len(part.tokens), self.weights.first_reader
        wanted = num_rows if part.num_logits is None else part.num_logits
        size = max(wanted, self._fewest_rows)  # as many as keep their bits the same
        if part.parents is not None or size >= num_rows or first == len(self.weights.blocks):
            return None
        features = self.written_features
        whole = {*keep, *(() if features is None else features.of_all_rows)}
        if any(layer == LAST or layer >= first for layer in whole):
            return None
        return LastRows(first, size, self._attention(size, None, start + num_rows - size))

    def laid_out(self, rows: Rows, start: int) -> tuple[tuple[Table, ...], Attend]:
        """Cosines and sines of every row's position, [n, 1, rotated], and the attention, of a part
        of a forward that begins at slot `start`."""
        size, parents = len(rows.tokens), rows.parents
        places: slice | torch.Tensor = slice(start, start + size)
        if parents is not None:
            places = indices([start + depth for depth in depths(parents)], self.device)
        attend = self._attention(size, parents, start)
        return self.weights.tables_at(places), attend

    def _attention(self, num_rows: int, parents: Sequence[int] | None, start: int) -> Attend:
        attentions, kv_layers = self.weights.attentions, self.weights.kv_layers
        kinds = [
            (attention.heads, attention.window, self.cache.key_values.num_slots_of(layer))
            for attention, layer in zip(attentions, kv_layers, strict=True)
        ]
        attends = {
            kind: cached_attention(
                self.cache, start, num_rows, kind[0], parents, kind[1], num_slots=kind[2]
            )
            for kind in dict.fromkeys(kinds)
        }
        of_attentions = [
            partial(attends[kind], layer, sinks=attention.sinks)
            for attention, kind, layer in zip(attentions, kinds, kv_layers, strict=True)
        ]
        states = self.cache.states
        assert states is None or parents is None, "a state follows one text"
        state_rows = None if states is None else states.rows(num_rows)
        return self.by_block(of_attentions, state_rows, num_rows)

    def by_block(
        self, of_attentions: Sequence[LayerAttend], state_rows: StateRows | None, num_rows: int
    ) -> Attend:
        """Return what the mixer of each block reads. of_attentions: of the blocks with attention,
        in order. state_rows: of the blocks with states, None where there are none."""
        attentions, of_layers, num_states = iter(of_attentions), list[LayerAttend](), 0
        for block in self.weights.blocks:
            if isinstance(block.mixer, DeltaNet):
                assert state_rows is not None, "the cache has states"
                of_layers.append(block.mixer.steps(state_rows, num_states, num_rows))
                num_states += 1
            else:
                of_layers.append(next(attentions))
        return lambda layer, queries, keys_values: of_layers[layer](queries, keys_values)

    def logits(
        self,
        rows: torch.Tensor,
        shown: Sequence[slice],
        hidden: dict[int, torch.Tensor],
        keeps_last: bool,
    ) -> torch.Tensor:
        """Of the rows of `shown`, which ascend. keeps_last: put the normalised rows into `hidden`
        as well."""
        if keeps_last:
            hidden[LAST] = self.weights.final_norm(rows)
            return self.head(joined([hidden[LAST][place] for place in shown]))
        return self.head(self.weights.final_norm(joined([rows[place] for place in shown])))


def narrowed(model: LanguageModel, vocabulary: DraftVocabulary) -> LanguageModel:
    """Return a model over the same cache that names the tokens of a vocabulary alone; the model
    itself where it cannot be narrowed."""
    if not isinstance(model, Decoder):
        return model
    whole = model.weights.output
    output = vocabulary.narrowed(whole, model.device)
    if output is whole:
        return model
    weights = replace(model.weights, head=output.layer, head_ids=output.ids)
    return Decoder(weights, model.cache, model.is_fastest)


def kv_shape_of(weights: Weights, capacity: int) -> KVShape:
    """Return what a cache must hold for these weights."""
    own = [attention for attention in weights.attentions if attention.source is None]
    sizes = tuple((attention.num_kv_heads, attention.head_dim) for attention in own)
    widest = max(sizes, key=prod, default=(1, 1))
    of_layers = sizes if len(set(sizes)) > 1 else ()
    mixers = (block.mixer for block in weights.blocks)
    nets = [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]
    states = replace(nets[0].shape, layers=(True,) * len(nets)) if nets else None
    windows = tuple(attention.window for attention in own)
    spare = ring_spare(has_shared_keys=len(own) < len(weights.attentions))
    return KVShape(len(sizes), *widest, capacity, of_layers, states, windows, spare)


@torch.inference_mode()
def run_together(parts: Sequence[Rows], keep: Sequence[int] = ()) -> list[Output]:
    """Return the logits of each part, and hidden states of the layers in `keep` and of those that
    are followed. parts: of Decoders that share their weights, each with a cache of its own."""
    models = [part.model for part in parts if isinstance(part.model, Decoder)]
    for model in models:
        model.catch_up()
    wanted = [model.wanted_layers(keep) for model in models]
    first, every = models[0], frozenset[int]().union(*wanted)
    ends = list(accumulate(len(part.tokens) for part in parts))
    places = [slice(start, end) for start, end in pairwise((0, *ends))]
    with ExitStack() as caches:
        starts = [
            caches.enter_context(model.cache.append(part.tokens))
            for model, part in zip(models, parts, strict=True)
        ]
        laid = [
            model.laid_out(part, start)
            for model, part, start in zip(models, parts, starts, strict=True)
        ]
        tables, attends = zip(*laid, strict=True)
        tokens = [token for part in parts for token in part.tokens]
        together = [
            (joined([cos for cos, _ in table]), joined([sin for _, sin in table]))
            for table in zip(*tables, strict=True)
        ]
        attend = each_its_own(attends, places)
        embedded, looked_up = first.embed(tokens), first.looked_up(tokens)
        last = first.last_rows(parts[0], starts[0], keep) if len(parts) == 1 else None
        rows, hidden = first.layers(embedded, together, attend, every, looked_up, last)
        ends = ends if last is None else [last.size]
        shown = [last_of(part, end) for part, end in zip(parts, ends, strict=True)]
        logits = first.logits(rows, shown, hidden, LAST in every)
        counts = [place.stop - place.start for place in shown]
        own = [
            {layer: states[place] for layer, states in hidden.items() if layer in layers}
            for place, layers in zip(places, wanted, strict=True)
        ]
        for model, part, start, states in zip(models, parts, starts, own, strict=True):
            if model.written_features is not None:
                model.written_features.write(start + len(part.tokens), states)
    return [Output(each, of) for each, of in zip(torch.split(logits, counts), own, strict=True)]


def last_of(part: Rows, end: int) -> slice:
    """The rows of a part whose logits are wanted, where the part ends at row `end`."""
    size = len(part.tokens) if part.num_logits is None else part.num_logits
    return slice(end - size, end)


def joined(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))
