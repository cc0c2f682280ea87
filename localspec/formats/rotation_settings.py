"""What a config.json says of rotary positions, under its names of today and of before transformers
5, and the two answers to a config that does not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Kinds that are the same at every length; the others change with it.
ROTATIONS = ("default", "linear", "llama3", "yarn", "proportional")
# Keys of a rotation that are read, and those that concern images alone.
ROTATION_KEYS = frozenset(
    ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
     "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
     "mscale_all_dim", "truncate", "short_factor", "long_factor", "partial_rotary_factor",
     "llama_4_scaling_beta", "mrope_section", "mrope_interleaved", "max_position_embeddings")
)  # fmt: skip
# Kinds that stretch a trained length.
STRETCHED = ("llama3", "yarn", "longrope")


class Incomplete(ValueError):
    """A config.json that leaves a key of its family to transformers' defaults."""


class NotNative(ValueError):
    """Why the native decoder does not take a model, as a sentence. reason: without its subject."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The native decoder does not take this model: {reason}.")


@dataclass(frozen=True)
class Rotation:
    """Angles by which queries and keys turn with their position.

    kind: of ROTATIONS, or "longrope" within its first length. num_rotated: numbers of a head.
    settings: of transformers' rope_parameters."""

    kind: str
    num_rotated: int
    settings: Mapping[str, Any]


def rotation_of(config: Mapping[str, Any], head_dim: int) -> Rotation:
    """Return the rotation that a config with one for all layers says. Raises Incomplete,
    NotNative."""
    try:
        given = dict(config.get("rope_parameters") or older_settings(config))
        return rotation_with(given, config, head_dim)
    except (Incomplete, NotNative):
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Incomplete(str(error)) from error


def older_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as configs of before transformers 5 say them. Raises Incomplete."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = _kind(scaling)
    if kind not in ROTATIONS:
        raise Incomplete(f"its rotation is {kind}")
    return scaling


def rotation_with(given: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> Rotation:
    """Return the rotation of these settings, with what the config says beside them.

    given: of rope_parameters. Raises Incomplete, NotNative."""
    config.get("rope_scaling")  # is part of `given`
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    settings, kind = {**outer, **given}, _kind(given)
    unknown = sorted(key for key in given.keys() - ROTATION_KEYS if given[key])
    if unknown:
        raise NotNative(f"its rotation has {unknown[0]}, a setting that is not known")
    if kind not in (*ROTATIONS, "longrope"):
        raise NotNative(f"its rotation is {kind}, which changes with the length")
    longest = config.get("max_position_embeddings")
    if settings["rope_theta"] is None or longest is None:
        raise Incomplete("its config.json does not say rope_theta or max_position_embeddings")
    original = config.get("original_max_position_embeddings")
    if original is not None and kind in STRETCHED:
        settings["original_max_position_embeddings"] = original
    settings.setdefault("original_max_position_embeddings", int(longest))
    settings["max_position_embeddings"] = int(longest)
    factor = float(settings["partial_rotary_factor"] or 1.0)
    read = ROTATION_KEYS - {"type", "rope_type", "partial_rotary_factor"}
    num_rotated = int(head_dim * factor)
    if kind == "proportional":  # the other numbers of a head turn by nothing
        num_rotated, read = head_dim, read | {"partial_rotary_factor"}
    said = {key: value for key, value in settings.items() if value is not None}
    return Rotation(kind, num_rotated, {key: said[key] for key in said.keys() & read})


def _kind(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type") or "default")
