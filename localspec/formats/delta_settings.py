"""The sizes of gated delta nets, layers that read the text into a state, as a config.json says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localspec.formats.attention import layer_kinds
from localspec.formats.noted_settings import NotedSettings
from localspec.formats.rotation_settings import Incomplete, NotNative

KINDS = frozenset(("linear_attention", "full_attention"))  # of the layers of such a model


@dataclass(frozen=True)
class DeltaSettings:
    """Gated delta nets. layers: whether each layer has one. kernel: tokens that a convolution sees,
    its own among them."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int
    layers: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def num_channels(self) -> int:
        """Numbers of a token that go through the convolution: its queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size


def delta_of(text: NotedSettings, num_layers: int, is_complete: bool) -> DeltaSettings:
    """Return the sizes that a config says. is_complete: see decoder_settings.

    Raises Incomplete, NotNative."""
    kinds = layer_kinds(text)
    text.get("full_attention_interval")  # `layer_types` replaces it
    if len(kinds) != num_layers:
        raise Incomplete("its config.json does not say layer_types")
    if others := {*kinds} - KINDS:
        raise NotNative(f"it has layers of the kind {min(others)}")
    if text.get("attn_output_gate") is False:
        raise NotNative("its attention has no output gate")
    rotation: Mapping[str, Any] = text.get("rope_parameters") or {}
    if not is_complete and "partial_rotary_factor" not in {*rotation, *text}:
        raise Incomplete("its config.json does not say partial_rotary_factor")
    settings = DeltaSettings(
        num_key_heads=_size(text, "linear_num_key_heads"),
        num_value_heads=_size(text, "linear_num_value_heads"),
        key_size=_size(text, "linear_key_head_dim"),
        value_size=_size(text, "linear_value_head_dim"),
        kernel=_size(text, "linear_conv_kernel_dim"),
        layers=tuple(kind == "linear_attention" for kind in kinds),
    )
    if settings.num_value_heads % settings.num_key_heads:
        raise NotNative("its value heads do not divide among its key heads")
    return settings


def _size(text: NotedSettings, key: str) -> int:
    if text.get(key) is None:
        raise Incomplete(f"its config.json does not say {key}")
    return int(text[key])
