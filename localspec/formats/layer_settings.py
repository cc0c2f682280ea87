"""What the layers of one model have of their own: key heads, their size, the width of the
feed-forward part, and whose keys and values a layer reads.

Gemma 4 says this for the layers that see all positions apart, once for all of them in published
folders, layer by layer where transformers has written config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localspec.formats.attention import sizes_of_layer
from localspec.formats.rotation_settings import Incomplete, NotNative

OUTSIDE = -1  # The source of a layer that reads keys and values of another model.


@dataclass(frozen=True)
class LayerSettings:
    """The sizes of one layer.

    ffn_size: of its dense feed-forward part. source: the earlier layer whose keys and values it
    reads, None for its own, OUTSIDE for a layer of another model. has_values: whether a product of
    its own gives its values; False where they are its keys before norm and rotation."""

    num_kv_heads: int
    head_dim: int
    ffn_size: int
    source: int | None = None
    has_values: bool = True


@dataclass(frozen=True)
class PerLayerSettings:
    """Inputs that every layer has of its own for each token: the number of tokens that their table
    knows, and the numbers of one layer."""

    vocab_size: int
    width: int


def require_known_gemma4(text: Mapping[str, Any]) -> None:
    """Raise NotNative for a Gemma 4 that the blocks do not follow. Tokens of images see each other
    both ways; here there are none."""
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise NotNative("its tokens see those behind them")


def per_layer_inputs(text: Mapping[str, Any]) -> PerLayerSettings | None:
    """Return the inputs of a Gemma 4; None for a model without. Raises Incomplete."""
    width = text.get("hidden_size_per_layer_input")
    vocabulary = text.get("vocab_size_per_layer_input")
    if not width:
        return None
    if vocabulary is None:
        raise Incomplete("its config.json does not say vocab_size_per_layer_input")
    return PerLayerSettings(int(vocabulary), int(width))


def gemma4_layers(
    text: Mapping[str, Any], usual: LayerSettings, kinds: Sequence[str]
) -> tuple[LayerSettings, ...]:
    """Return the layers of a Gemma 4. usual: a layer that attends to a window. kinds: of all
    layers. Raises Incomplete."""
    by_layer = text.get("per_layer_config")
    if by_layer is None and not text.get("global_head_dim"):
        raise Incomplete("its config.json does not say global_head_dim")
    is_full = [kind == "full_attention" for kind in kinds]
    if not is_full[-1:] == [True]:
        raise Incomplete("the last of its layer_types does not see all positions")
    repeats_keys = bool(text.get("attention_k_eq_v"))
    given = _wide_sizes(text, usual, repeats_keys)
    own = [
        replace(
            usual,
            **(_sizes(by_layer, layer) if by_layer is not None else given if full else {}),
            has_values=not (repeats_keys and full),
        )
        for layer, full in enumerate(is_full)
    ]
    num_own = len(kinds) - int(text.get("num_kv_shared_layers") or 0)
    widening = 2 if text.get("use_double_wide_mlp") else 1
    return (*own[:num_own], *(
        replace(
            layer,
            source=_last(kinds[:num_own], kind) if num_own else OUTSIDE,
            ffn_size=widening * layer.ffn_size,
        )
        for layer, kind in zip(own[num_own:], kinds[num_own:], strict=True)
    ))  # fmt: skip


def _wide_sizes(
    text: Mapping[str, Any], usual: LayerSettings, repeats_keys: bool
) -> dict[str, int]:
    """Return the sizes of layers that see all positions, as published folders say them."""
    heads = text.get("num_global_key_value_heads")
    return {
        "head_dim": int(text.get("global_head_dim") or usual.head_dim),
        "num_kv_heads": int((repeats_keys and heads) or usual.num_kv_heads),
    }


def _sizes(by_layer: Mapping[str, Any], layer: int) -> dict[str, int]:
    """Return the sizes of one layer, as transformers writes them."""
    own = sizes_of_layer(by_layer, layer)
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if unknown := own.keys() - names:
        raise ValueError(f"a layer of its own {sorted(unknown)[0]}")
    return {names[key]: int(value) for key, value in own.items()}


def _last(kinds: Sequence[str], kind: str) -> int:
    """Return the last layer of a kind. Raises ValueError."""
    return len(kinds) - 1 - list(reversed(kinds)).index(kind)
