"""A published block drafter's folder, read into `BlockParts`.

The layers are those of a native family, built by the decoder's builder. All tensors are named and
compared before one is used; what the target has as well is borrowed from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from pathlib import Path

import torch

from localspec.formats.rotation_settings import NotNative
from localspec.forward.block import Block
from localspec.forward.builder import Builder
from localspec.forward.decoder import Decoder
from localspec.forward.heads.block_layout import KIND, BlockLayout, layout_of
from localspec.forward.heads.block_parts import BlockParts, DraftLayer
from localspec.forward.heads.block_tail import ConfidenceHead, MarkovHead, PathSelector, Tail
from localspec.forward.heads.convolution import Convolution, ConvolvedFeedForward
from localspec.forward.heads.ends import (
    Embed,
    Tokens,
    embedding_of,
    output_of,
    output_of_target,
    target_ids,
)
from localspec.forward.heads.files import (
    HeadSettings,
    Shapes,
    TargetSizes,
    published_tensors,
    read_published,
    take,
)
from localspec.forward.model import LanguageModel
from localspec.forward.output_head import OutputHead
from localspec.forward.rotation import rotation_table
from localspec.forward.tensor_names import TensorNames
from localspec.weights.dense import dense_linear
from localspec.weights.linear import Linear
from localspec.weights.precision import Precision
from localspec.weights.source import HeldTensors

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
# Of a Markov head that weighs W1's rows: its kind, and the name of the product.
PROJECTIONS = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
CONFIDENCE, SELECTOR = "confidence_head.proj", "candidate_selector."
CONVOLUTIONS = ("attention_conv", "mlp_conv")
# Tensors of training alone, and a rotation's, which the config says.
UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
SCALE_TOLERANCE = 1e-2  # bf16 rounds the factor of an embedding by less.


def read_block(folder: Path, target: LanguageModel) -> BlockParts:
    """Return the block drafter in `folder`. Raises ModelError."""
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    config = read_published(folder, KIND)
    layout = layout_of(config, sizes)
    capacity = target.cache.shape.capacity + layout.block_size
    try:
        layout.settings.require_length(capacity)
    except NotNative as error:
        raise config.unfit(str(error)) from error
    tensors = {
        name.removeprefix("model."): each for name, each in published_tensors(folder).items()
    }
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name in UNUSED:
        tensors.pop(name, None)
    actual, others = {name: name for name in tensors}, _own_shapes(layout, sizes, tensors)
    names = TensorNames.of_layers(layout.settings, actual, others, folder.name)
    held = take(tensors, names.shapes, folder.name, dtype, target.device)
    precision = Precision(dtype, target.device)
    builder = Builder(layout.settings, HeldTensors(held), names, precision, capacity)
    layers = tuple(_layer(layout, block, held, at) for at, block in enumerate(builder.blocks()))
    final_norm, context_norm = builder.norm("norm"), builder.norm("hidden_norm")
    embed, embedding_bytes = _embedding(config, layout, held, target)
    ids = target_ids(config, offsets, layout.draft_vocab_size, target)
    output = _output(config, layout, held, ids, target)
    tail = _tail(layout, held, ids, target)
    markov = tail if isinstance(tail, MarkovHead) else None
    confidence = _confidence(layout, held, markov)
    fuse = builder.product("fc")
    like = (capacity, layout.settings.layout.is_interleaved, dtype, target.device)
    tables = tuple(rotation_table(rotation, *like) for rotation in layout.settings.rotations)
    body_bytes = sum(layer.weight_bytes for layer in layers) + embedding_bytes
    body_bytes += fuse.weight_bytes + context_norm.weight_bytes + final_norm.weight_bytes
    body_bytes += 0 if confidence is None else confidence.projection.weight_bytes
    return BlockParts(
        layout=layout,
        layers=layers,
        tables=tables,
        fuse=fuse,
        context_norm=context_norm,
        final_norm=final_norm,
        embed=embed,
        output=output,
        tail=tail,
        confidence=confidence,
        dtype=dtype,
        body_bytes=body_bytes,
    )


def _own_shapes(layout: BlockLayout, sizes: TargetSizes, tensors: Mapping[str, object]) -> Shapes:
    """The tensors beside those of the layers. Embedding and head may be left to the target."""
    width, vocabulary = layout.settings.hidden_size, sizes.vocab_size
    shapes: Shapes = {
        "fc.weight": (width, len(layout.layers) * sizes.hidden_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    if EMBEDDING in tensors:
        shapes[EMBEDDING] = (vocabulary, width)
    if HEAD in tensors:
        shapes[HEAD] = (layout.draft_vocab_size, width)
    return {
        **shapes,
        **_tail_shapes(layout, vocabulary),
        **_convolution_shapes(layout),
    }


def _tail_shapes(layout: BlockLayout, vocabulary: int) -> Shapes:
    shapes, width, rank = Shapes(), layout.settings.hidden_size, 0
    if layout.markov is not None:
        rank = layout.markov.rank
        shapes |= {W1: (vocabulary, rank), W2: (layout.draft_vocab_size, rank)}
        if layout.markov.kind == "gated":
            name = PROJECTIONS["gated"]
            shapes |= {f"{name}.weight": (rank, width + rank), f"{name}.bias": (rank,)}
        if layout.markov.kind == "rnn":
            name = PROJECTIONS["rnn"]
            shapes |= {f"{name}.weight": (3 * rank, width + 2 * rank), f"{name}.bias": (3 * rank,)}
    if layout.has_confidence:
        num_read = width + (rank if layout.confidence_reads_markov else 0)
        shapes |= {f"{CONFIDENCE}.weight": (1, num_read), f"{CONFIDENCE}.bias": (1,)}
    if layout.selector is not None:
        rank = layout.selector.rank
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"{SELECTOR}{name}"] = (vocabulary, rank)
        shapes[f"{SELECTOR}hidden_projection.weight"] = (rank, width)
    return shapes


def _convolution_shapes(layout: BlockLayout) -> Shapes:
    shapes, width, given = Shapes(), layout.settings.hidden_size, layout.convolutions
    for layer in range(layout.settings.num_layers if given is not None else 0):
        for name in CONVOLUTIONS:
            assert given is not None
            begin, groups = f"layers.{layer}.{name}", width // given.group_size
            shapes[f"{begin}.base_kernel"] = (2, given.num_taps, width)
            shapes[f"{begin}.kernel_projection.weight"] = (2 * given.num_taps * groups, width)
    return shapes


def _linear(held: Mapping[str, torch.Tensor], name: str) -> Linear:
    return dense_linear(held[f"{name}.weight"], held.get(f"{name}.bias"))


def _layer(
    layout: BlockLayout, block: Block, held: Mapping[str, torch.Tensor], index: int
) -> DraftLayer:
    if layout.convolutions is None:
        return DraftLayer(block)
    group_size = layout.convolutions.group_size
    begins = [f"layers.{index}.{name}" for name in CONVOLUTIONS]
    of_attention, of_feed_forward = (
        Convolution(
            held[f"{begin}.base_kernel"], _linear(held, f"{begin}.kernel_projection"), group_size
        )
        for begin in begins
    )
    feed_forward = ConvolvedFeedForward(block.feed_forward, of_feed_forward)
    return DraftLayer(replace(block, feed_forward=feed_forward), of_attention)


def _embedding(
    config: HeadSettings,
    layout: BlockLayout,
    held: Mapping[str, torch.Tensor],
    target: LanguageModel,
) -> tuple[Embed, int]:
    """The embedding of a block's rows, and the bytes of one that is not the target's."""
    own, scale = held.get(EMBEDDING), layout.embedding_scale
    if own is not None or scale is None:
        return embedding_of(own, target, 1.0 if scale is None else scale)
    targets = target.weights.embedding_scale if isinstance(target, Decoder) else 1.0
    factor = scale / targets
    if isclose(factor, 1.0, rel_tol=SCALE_TOLERANCE):
        return target.embed, 0

    def embed(ids: Tokens) -> torch.Tensor:
        return target.embed(ids) * factor

    return embed, 0


def _output(
    config: HeadSettings,
    layout: BlockLayout,
    held: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None,
    target: LanguageModel,
) -> OutputHead:
    """Return the output head. Raises ModelError for a borrowed one whose logits the target bounds
    otherwise than the config says."""
    own, scale, cap = held.get(HEAD), layout.output_scale or 1.0, layout.cap
    if own is not None:
        return output_of(dense_linear(own, None), ids, target, cap)
    if ids is not None:
        raise config.unfit("it knows a part of the tokens and has no output head of its own")
    weights = target.weights if isinstance(target, Decoder) else None
    targets = (1.0, None) if weights is None else (weights.logit_scale, weights.logit_cap)
    if (layout.output_scale is None and cap is None) or (scale, cap) == targets:
        return output_of_target(target)
    if targets != (1.0, None):
        raise config.unfit(
            f"its logits are scaled by {scale} and bounded by {cap}, the target's by {targets[0]} "
            f"and {targets[1]}"
        )
    return replace(output_of_target(target), scale=scale, cap=cap)


def _tail(
    layout: BlockLayout,
    held: Mapping[str, torch.Tensor],
    ids: torch.Tensor | None,
    target: LanguageModel,
) -> Tail | None:
    if layout.selector is not None:
        return PathSelector(
            held[f"{SELECTOR}predecessor_codebook"],
            held[f"{SELECTOR}successor_codebook"],
            _linear(held, f"{SELECTOR}hidden_projection"),
            layout.selector.top_k,
        )
    if layout.markov is None:
        return None
    second, name = dense_linear(held[W2], None), PROJECTIONS.get(layout.markov.kind)
    projection = None if name is None else _linear(held, name)
    output = OutputHead(second, target.vocab_size, ids, own_bytes=second.weight_bytes)
    return MarkovHead(layout.markov.kind, held[W1], output, projection)


def _confidence(
    layout: BlockLayout, held: Mapping[str, torch.Tensor], markov: MarkovHead | None
) -> ConfidenceHead | None:
    if not layout.has_confidence:
        return None
    reads_markov = layout.confidence_reads_markov
    return ConfidenceHead(_linear(held, CONFIDENCE), markov if reads_markov else None)
