"""The assistants of Gemma 4: a few layers that draft by the target's own keys and values.

A step reads the embedding of the last token and the state before it, and gives the next token's
logits and the next state. Its layers have no keys and values: their queries read those that the
target has cached, from its last layer of each kind (a window, or all positions). So an assistant
reads no prompt and has nothing to take back. All steps of a draft stand at the position of the
first token that the target has not read.

Source: Gemma 4 and its assistants in transformers (`Gemma4AssistantForCausalLM`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from localspec.formats.decoder_settings import DecoderSettings, settings_of
from localspec.formats.folder_files import check_folder
from localspec.formats.native import ASSISTANTS
from localspec.formats.rotation_settings import Incomplete, NotNative
from localspec.forward.attention import cached_attention, each_its_own
from localspec.forward.block import Attention, Block
from localspec.forward.builder import build_weights
from localspec.forward.completeness import shape_error, weights_missing
from localspec.forward.decoder import Decoder, joined
from localspec.forward.decoder_weights import Weights
from localspec.forward.features import LAST, Features
from localspec.forward.graphs import buckets
from localspec.forward.heads.assistant_parts import AssistantParts, OrderedHead
from localspec.forward.heads.assistant_static import StaticAssistant
from localspec.forward.heads.files import HeadSettings
from localspec.forward.heads.fixed import DRAFT_SIZES
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.passes import Pass, Product
from localspec.forward.row_attention import Attend
from localspec.forward.tensor_names import TensorNames
from localspec.forward.upload import indices
from localspec.weights.linear import Linear
from localspec.weights.precision import Precision, linear_for
from localspec.weights.source import WeightSource, open_source

KIND = "assistant"


class Assistant:
    """An assistant over the cache of its target: a `DraftingHead`, and a heads.fixed.FixedHead
    whose numbers assistant_static names."""

    layers = (LAST,)
    reads_last_row = can_resume = True
    num_numbers = 2
    draft_sizes = DRAFT_SIZES

    def __init__(self, parts: AssistantParts, target: Decoder) -> None:
        self._parts, self._target = parts, target
        self._decoder = Decoder(parts.layers, target.cache, is_fastest=True)

    @property
    def memory_bytes(self) -> int:
        return self._parts.weight_bytes

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def sharing_key(self) -> Hashable:
        """Return what assistants whose rows may run as one have in common."""
        return id(self._parts)

    def start(self, tokens: Sequence[int], features: Features) -> Pass:
        """Give the first row of a draft after `tokens`, [1, d]; the target has read all but the
        last."""
        length = self._target.cache.length
        return AssistantRow(self, tokens[-1:], features.rows(LAST, length - 1, length))

    def extend(self, token: int | torch.Tensor, rows: torch.Tensor) -> Pass:
        """Give the row after `token`, [1, d]. rows: the row before it. token: a tensor is [1]."""
        tokens = token if isinstance(token, torch.Tensor) else [token]
        return AssistantRow(self, tokens, self._parts.after(rows))

    def logits(self, rows: torch.Tensor) -> Pass:
        """Give logits [n, V] fp32 of rows [n, d]."""
        return Product(("logits", self.sharing_key), self._parts.logits, rows)

    @property
    def output(self) -> OutputHead | None:
        """See DraftingHead."""
        output = self._parts.output
        return output if isinstance(output, OutputHead) else None

    def forget(self, num_pairs: int) -> None:
        """Do nothing: an assistant writes to no cache."""

    @property
    def width(self) -> int:
        """See FixedHead."""
        return self._parts.layers.embedding.shape[1]

    @property
    def kept_dtype(self) -> torch.dtype:
        """See FixedHead."""
        return self._parts.layers.embedding.dtype

    @property
    def buckets(self) -> tuple[int, ...]:
        """See FixedHead."""
        return buckets(self._target.cache.num_slots)

    def end_of(self, num_tokens: int, num_rows: int) -> int:
        """See FixedHead."""
        return num_tokens - 1

    def missing(self, tokens: Sequence[int], features: Features) -> None:
        """See FixedHead; the target has read all but the root."""

    @contextmanager
    def begun(self, tokens: Sequence[int]) -> Iterator[list[int]]:
        """See FixedHead."""
        yield [self.position, tokens[-1]]

    def steps(self, bucket: int, features: Features) -> StaticAssistant:
        """See FixedHead."""
        return StaticAssistant(self._parts, self._target, bucket, features)

    def probe(self, which: int) -> list[int]:
        """See FixedHead."""
        return [1 + which, 2 + which]

    def undisturbed(self, num_rows: int) -> AbstractContextManager[None]:
        """See FixedHead."""
        return nullcontext()

    def recover(self) -> None:
        """Do nothing: see `forget`."""

    @torch.inference_mode()
    def run(self, rows: Sequence[AssistantRow]) -> list[torch.Tensor]:
        """Return a normalised row [1, d] for each row of assistants with this one's weights."""
        states = joined([row.states for row in rows])
        embedded = self._target.embed(joined([indices(row.tokens, states.device) for row in rows]))
        entering = self._parts.entered(embedded, states)
        places = [row.head.position for row in rows]
        tables = self._parts.layers.tables_at(
            slice(places[0], places[0] + 1) if len(rows) == 1 else indices(places, states.device)
        )
        own = [slice(at, at + 1) for at in range(len(rows))]
        attend = each_its_own([row.head.attention() for row in rows], own)
        made, _ = self._decoder.unpadded_layers(entering, tables, attend)
        return [*torch.split(self._parts.layers.final_norm(made), 1)]

    @property
    def position(self) -> int:
        """The position of the first token that the target has not read."""
        return self._target.cache.length

    def attention(self) -> Attend:
        """Return the attention of one row to all that the target has cached."""
        cache, layers = self._target.cache, self._parts.layers.attentions
        kinds = [
            (layer.heads, layer.window, cache.key_values.num_slots_of(kv_layer))
            for layer, kv_layer in zip(layers, self._parts.kv_layers, strict=True)
        ]
        last = cache.length - 1
        # The row stands behind the last cached token. As in transformers it sees those tokens that
        # are at most a window away from that token: one more than the token itself sees.
        attends = {
            (heads, window, num_slots): cached_attention(
                cache, last, 1, heads, window=window and window + 1, num_slots=num_slots
            )
            for heads, window, num_slots in dict.fromkeys(kinds)
        }
        of_layers = [
            partial(attends[kind], kv_layer)
            for kind, kv_layer in zip(kinds, self._parts.kv_layers, strict=True)
        ]
        return lambda layer, queries, keys_values: of_layers[layer](queries, keys_values)


@dataclass(frozen=True)
class AssistantRow(Pass):
    """One row of an assistant, from its token and a state of the target, [1, backbone]."""

    head: Assistant
    tokens: Sequence[int] | torch.Tensor
    states: torch.Tensor

    @property
    def num_rows(self) -> int:
        return 1

    @property
    def sharing_key(self) -> Hashable:
        return self.head.sharing_key

    def forward(self) -> torch.Tensor:
        """Return the normalised row, [1, d]."""
        return self.head.run([self])[0]

    def together(self, parts: Sequence[AssistantRow]) -> list[torch.Tensor]:
        """See Pass."""
        return self.head.run(parts)


def read_assistant(folder: Path, target: LanguageModel) -> AssistantParts:
    """Return the assistant in `folder`, ready to draft for `target`. Raises ModelError."""
    found = check_folder(folder)
    config = HeadSettings(found.config, KIND, folder)
    if not isinstance(target, Decoder):
        raise config.unfit("its target runs on the forward of transformers here")
    settings = _settings(config)
    _require_made_for(config, settings, target)
    precision = Precision(target.embed([0]).dtype, target.device)
    source = open_source(found, precision.dtype)
    names = TensorNames.of(settings, source.names, found.name)
    weights = build_weights(settings, source, names, precision, target.cache.shape.capacity)
    blocks, kv_layers = _over(weights, target)
    read = partial(_linear, source, precision, found.name)
    backbone, width = target.weights.embedding.shape[1], settings.hidden_size
    return AssistantParts(
        layers=replace(weights, blocks=blocks),
        kv_layers=kv_layers,
        before=read("pre_projection.weight", (width, 2 * backbone)),
        after=read("post_projection.weight", (backbone, width)),
        output=_ordered(config, weights, source, read)
        or OutputHead(weights.head, target.vocab_size),
    )


def _settings(config: HeadSettings) -> DecoderSettings:
    """Return the settings of its layers. Raises ModelError."""
    text = dict(config.values.get("text_config") or {})
    text["model_type"] = ASSISTANTS[str(config.values["model_type"])]
    text.setdefault("tie_word_embeddings", config.values.get("tie_word_embeddings", True))
    num_layers = text.get("num_hidden_layers")
    if text.setdefault("num_kv_shared_layers", num_layers) != num_layers:
        raise config.unfit("some of its layers have keys and values of their own")
    try:
        return settings_of(text)
    except (Incomplete, NotNative) as error:
        raise config.unfit(str(error)) from error


def _require_made_for(config: HeadSettings, settings: DecoderSettings, target: Decoder) -> None:
    """Raise ModelError for an assistant of another target."""
    backbone = target.weights.embedding.shape[1]
    if (width := config.whole("backbone_hidden_size")) != backbone:
        raise config.unfit(f"it is for a target {width} wide, and this one is {backbone} wide")
    if settings.vocab_size != target.vocab_size:
        raise config.unfit(
            f"it knows {settings.vocab_size} tokens, and this target {target.vocab_size}"
        )
    for is_wide in (False, True):
        ours = {each.head_dim for each in _of_kind(target.weights, is_wide)}
        theirs = {
            layer.head_dim
            for layer, window in zip(settings.layers, settings.windows, strict=True)
            if (window is None) == is_wide
        }
        if theirs and theirs != ours:
            kind = "see all positions" if is_wide else "attend to a window"
            raise config.unfit(
                f"its layers that {kind} have heads of {_sizes(theirs)}, and those of this target "
                f"have {_sizes(ours)}"
            )


def _sizes(sizes: set[int]) -> str:
    return " and ".join(map(str, sorted(sizes))) or "none"


def _of_kind(weights: Weights, is_wide: bool) -> list[Attention]:
    """Return the attentions that see all positions, or those with a window. The last layer of a
    Gemma 4 sees all, and each kind turns by a table of its own."""
    attentions = weights.attentions
    wide = attentions[-1].rotation
    return [each for each in attentions if (each.rotation == wide) == is_wide]


def _source_of(layer: Attention, layers: Weights, target: Decoder) -> Attention:
    """Return the last layer of the same kind in the target that has keys and values."""
    is_wide = any(layer is each for each in _of_kind(layers, True))
    own = [each for each in _of_kind(target.weights, is_wide) if each.source is None]
    return own[-1]


def _over(layers: Weights, target: Decoder) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the blocks with the key heads that they read, and which of the target's cached layers
    these are."""
    sources = [_source_of(layer, layers, target) for layer in layers.attentions]
    own = [each for each in target.weights.attentions if each.source is None]
    blocks = tuple(
        replace(block, mixer=replace(layer, num_kv_heads=source.num_kv_heads))
        for block, layer, source in zip(layers.blocks, layers.attentions, sources, strict=True)
    )
    cached = tuple(next(at for at, each in enumerate(own) if each is one) for one in sources)
    return blocks, cached


def _ordered(
    config: HeadSettings,
    layers: Weights,
    source: WeightSource,
    read: Callable[[str, tuple[int, int]], Linear],
) -> OrderedHead | None:
    """Return the head of an assistant whose tokens are in clusters; None for a whole head. Raises
    ModelError."""
    if not config.values.get("use_ordered_embeddings"):
        return None
    count, most = config.whole("num_centroids"), config.whole("centroid_intermediate_top_k")
    size, width = layers.embedding.shape
    name = "masked_embedding.token_ordering"
    if size % count or most > count or name not in source.names:
        raise config.unfit(f"its {size} tokens are in no {count} clusters of which {most} count")
    ids = source.read(name).dense(torch.int64).to(layers.embedding.device)
    if not torch.equal(ids.sort().values.cpu(), torch.arange(size)):
        raise config.unfit(f"its {name} does not name every token once")
    assert isinstance(layers.embedding, torch.Tensor), "an assistant is not quantised"
    return OrderedHead(
        weight=layers.embedding,
        centroids=read("masked_embedding.centroids.weight", (count, width)),
        token_ids=ids.view(count, -1),
        num_chosen=most,
    )


def _linear(
    source: WeightSource, precision: Precision, model: str, name: str, shape: tuple[int, int]
) -> Linear:
    """Return a layer without a bias. Raises ModelError for a weight that is missing or of another
    shape."""
    if name not in source.names:
        raise weights_missing(model, [name])
    weight = source.read(name)
    if weight.shape != shape:
        raise shape_error(model, name, weight.shape, shape)
    return linear_for([weight], [None], precision)
