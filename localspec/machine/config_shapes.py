"""The shape of a model by its config.json alone: sizes, and an estimate of its parameters.

Only families that are laid out as their sizes say are estimated; others raise a ModelError. What
the files of a model say besides is read by folder_shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.core.errors import ModelError
from localspec.formats.attention import (
    count_dense_layers,
    count_key_heads,
    count_key_width,
    count_rotated_width,
)
from localspec.formats.native import KNOWN_AS, LAYOUTS, NATIVE, SIZED
from localspec.formats.stored import stored_of
from localspec.machine.shapes import ModelShape

# A larger size is damage, and products of it are no numbers of bytes.
LARGEST_SIZE = 2**31
SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
         "head_dim", "intermediate_size", "vocab_size", "num_experts")  # fmt: skip

# Gemma 3 leaves unsaid what its configuration class in transformers defaults to.
GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape a `config.json` describes. Raises ModelError for an uncounted family."""
    family = str(config.get("model_type", "unknown"))
    if family not in SIZED:
        known = ", ".join(sorted(SIZED))
        raise ModelError(
            f"{name} is a '{family}' model, and localspec can count the memory of these families "
            f"only: {known}. Choose a model of one of them."
        )
    return decoder_shape(config, name, family)


def decoder_shape(config: Mapping[str, Any], name: str, family: str) -> ModelShape:
    """The same of any family, without what only its files say. Raises ModelError."""
    try:
        if family == "gemma3":
            kept = {"quantization_config": config.get("quantization_config")}
            text = {**GEMMA3_DEFAULTS, **config["text_config"], **kept}
            return _decoder_shape(text, name, family)
        if family == "gemma3_text":
            config = {**GEMMA3_DEFAULTS, **config}
        return _decoder_shape(config, name, family)
    except KeyError as missing:
        fault = f"has no {missing}, so its size cannot be known"
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        fault = f"holds a value that is not a size ({error})"
    raise ModelError(f"The config.json of {name} {fault}. Fetch the model's folder again.")


def _decoder_shape(config: Mapping[str, Any], name: str, family: str) -> ModelShape:
    too_large = [name for name in SIZES if int(config.get(name) or 0) > LARGEST_SIZE]
    if too_large:
        raise ValueError(f"its {too_large[0]} is larger than that of any model")
    hidden_size = int(config["hidden_size"])
    num_heads = int(config["num_attention_heads"])
    num_layers = int(config["num_hidden_layers"])
    is_tied = family in SIZED and SIZED[family].is_tied
    stored = stored_of(config, name)
    keeps = stored is not None and KNOWN_AS.get(family, family) in LAYOUTS
    num_experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    turns = NATIVE[family].num_rotations if family in NATIVE else 1
    num_chosen = int(config.get("num_experts_per_tok") or config.get("top_k_experts") or 0)
    intermediate_size = int(config["intermediate_size"])
    widths = count_key_width(config, num_layers), count_key_width(config, num_layers, True)
    num_kv_heads = count_key_heads(config, num_heads)
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    is_uniform = widths[0] == num_layers * num_kv_heads * head_dim
    return ModelShape(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=int(config["vocab_size"]),
        context_length=longest_context(config, int(config["max_position_embeddings"])),
        is_tied=bool(config.get("tie_word_embeddings", is_tied)),
        num_experts=num_experts,
        num_experts_per_token=num_chosen if num_experts else 0,
        expert_intermediate_size=(
            int(config.get("moe_intermediate_size") or intermediate_size) if num_experts else 0
        ),
        num_dense_layers=count_dense_layers(config, num_layers) if num_experts else 0,
        stored_as="" if stored is None else stored.title,
        kept_as=None if stored is None else stored.stays,
        group_size=stored.group_size if stored and keeps else 0,
        num_in_groups=None if stored is None else stored.num_in_groups,
        is_published_wide=stored is not None and not stored.is_narrow,
        all_kv_width=None if is_uniform else widths[0],
        window=int(config.get("sliding_window") or 0) if widths[1] else 0,
        window_kv_width=widths[1],
        has_shared_keys=bool(config.get("num_kv_shared_layers")),
        rotated_width=count_rotated_width(config) if turns > 1 else _rotated(config, head_dim),
        experts_kept=NATIVE[family].experts_kept if family in NATIVE else "4-bit",
    )


def _rotated(config: Mapping[str, Any], head_dim: int) -> int:
    """How many numbers of a head turn with their position; 0 where all do."""
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = rotation.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return 0 if share == 1.0 else int(head_dim * float(share))


def longest_context(config: Mapping[str, Any], longest: int) -> int:
    """`longest`, the number of positions. With "longrope" the rotation changes beyond the original
    length, and drafted text would differ from plain text there: that length is the limit."""
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "longrope" not in (rotation.get("rope_type"), rotation.get("type")):
        return longest
    original = config.get("original_max_position_embeddings")
    return int(original or rotation.get("original_max_position_embeddings") or longest)
