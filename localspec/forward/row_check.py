"""Check at load that a row of a forward has the same bits whatever rows run beside it.

A processor's library chooses a kernel by the shapes of a product, so the check runs the shapes that
a conversation really runs: single rows, drafts, trees, pieces of a prompt up to PREFILL_CHUNK rows,
rows before and behind the first block of keys, and several sequences in one forward. Weights do not
choose a kernel. One block of each set of shapes
therefore stands for all blocks, and a large model costs little more to check than a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from localspec.forward.block import Attention, Block
from localspec.forward.cache import KEY_BLOCK, native_cache
from localspec.forward.decoder import Decoder, kv_shape_of, run_together
from localspec.forward.decoder_weights import Weights
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.passes import Rows

# Rows of the forwards that are compared with one forward of all rows. Libraries change kernels at
# multiples of 8, 16 and 32 rows, so the widths lie on both sides of those.
WIDTHS = (1, 2, 5, 9, 17, 33, 64)
HEAD_ROWS = 64  # most rows of the output head in one forward: several sequences check a draft
# Where the compared pieces begin: at the start, and so that they cross the end of the first block.
PIECES_FROM = (0, KEY_BLOCK - 12)
TREE = (-1, 0, 0, 2)  # The second node is the only one off the path that is compared.


@torch.inference_mode()
def has_invariant_rows(model: Decoder) -> bool:
    """True if every compared width gives a row the bits of one wide forward.

    Only for a decoder on a processor whose kernels were chosen for it. On a GPU another width may
    take another kernel at any context length, so nothing is promised there."""
    if model.device.type != "cpu" or model.is_fastest:
        return False
    weights = replace(model.weights, blocks=distinct_blocks(model.weights.blocks))
    capacity = min(PREFILL_CHUNK + sum(WIDTHS), weights.tables[0][0].shape[0])
    tokens = [(7 * place + 1) % model.vocab_size for place in range(capacity)]
    whole = _in_pieces(weights, tokens, (PREFILL_CHUNK,))
    ends = (first + end for first in PIECES_FROM for end in accumulate(WIDTHS, initial=0))
    return (
        torch.equal(_in_pieces(weights, tokens, ends), whole)
        and _is_same_beside(weights, tokens[:PREFILL_CHUNK], whole)
        and (model.cache.states is not None or _is_same_in_tree(weights, tokens, whole))
        and _is_same_in_head(model, whole[:HEAD_ROWS])
    )


def distinct_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return one block for each set of kernels: layer types, weight sizes, mixers, and whether it
    reads keys and values of an earlier layer, which then is among those returned."""
    kinds = [
        (
            tuple((type(linear), linear.weight_bytes) for linear in block.linears),
            type(block.mixer),
            block.mixer.kind,
        )
        for block in blocks
    ]
    distinct, places = dict(zip(kinds, blocks, strict=True)), [*dict.fromkeys(kinds)]
    return tuple(_reading(block, kinds, places) for block in distinct.values())


def _reading(block: Block, kinds: Sequence[object], places: Sequence[object]) -> Block:
    """The block with its source, if it has one, at the place of a block of that kind."""
    mixer = block.mixer
    if not isinstance(mixer, Attention) or mixer.source is None:
        return block
    return replace(block, mixer=replace(mixer, source=places.index(kinds[mixer.source])))


def _probe(weights: Weights, capacity: int) -> Decoder:
    """A decoder of these blocks with a small cache of its own."""
    cos, _ = weights.tables[0]
    return Decoder(weights, native_cache(kv_shape_of(weights, capacity), cos.dtype, cos.device))


def _hidden(parts: Sequence[Rows]) -> list[torch.Tensor]:
    """States after the last block, [n, d] of each part."""
    model = parts[0].model
    assert isinstance(model, Decoder)
    last = len(model.weights.blocks) - 1
    return [output.hidden[last] for output in run_together(parts, (last,))]


def _in_pieces(weights: Weights, tokens: Sequence[int], ends: Iterable[int]) -> torch.Tensor:
    """Return the states of tokens read in pieces that end at `ends`, the rest at once: [n, d]."""
    probe = _probe(weights, len(tokens))
    bounds = [0, *(end for end in ends if 0 < end < len(tokens)), len(tokens)]
    pieces = [tokens[start:end] for start, end in pairwise(bounds)]
    return torch.cat([_hidden([Rows(probe, piece, None, 1)])[0] for piece in pieces])


def _is_same_beside(weights: Weights, tokens: Sequence[int], whole: torch.Tensor) -> bool:
    """True if a draft that is checked beside another sequence's prompt, or beside another draft,
    has the bits of the wide forward."""
    length = len(tokens) // 2
    draft = slice(length, length + 5)
    for other in (tokens, tokens[:3]):
        first, second = _probe(weights, len(tokens)), _probe(weights, len(tokens))
        first.forward(tokens[:length], num_logits=1)
        parts = (Rows(second, other, None, 1), Rows(first, tokens[draft], None, 1))
        of_other, of_draft = _hidden(parts)
        same_draft = torch.equal(of_draft, whole[draft])
        if not (same_draft and torch.equal(of_other, whole[: len(other)])):
            return False
    return True


def _is_same_in_tree(weights: Weights, tokens: Sequence[int], whole: torch.Tensor) -> bool:
    """True if a path of a tree has the bits of the wide forward."""
    length = len(tokens) // 2
    probe = _probe(weights, len(tokens))
    probe.forward(tokens[:length], num_logits=1)
    first, second, third = tokens[length : length + 3]
    states = _hidden([Rows(probe, [first, third, second, third], TREE, 1)])[0]
    return torch.equal(states[[0, 2, 3]], whole[length : length + 3])


def _is_same_in_head(model: Decoder, rows: torch.Tensor) -> bool:
    """True if the output head gives each row the same logits at every width."""
    normed = model.weights.final_norm(rows)
    whole = model.head(normed)  # [n, V]
    widths = [width for width in WIDTHS if width < rows.shape[0]]
    return all(torch.equal(model.head(normed[:width]), whole[:width]) for width in widths)
