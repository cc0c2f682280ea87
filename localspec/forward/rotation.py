"""Rotary positions: the cosines and sines by which queries and keys turn.

Each kind gives frequencies, one for two numbers of a head, and a factor of the cosines and sines.
Sources: RoPE (arXiv 2104.09864), position interpolation (arXiv 2306.15595), YaRN (arXiv
2309.00071), LongRoPE (arXiv 2402.13753), Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from localspec.formats.rotation_settings import Rotation


@torch.inference_mode()
def rotation_table(
    rotation: Rotation,
    capacity: int,
    is_interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and signed sines of every position, [capacity, rotated] each.

    The swap of two numbers gives (x2, x1), and the rotation needs (-x2, x1): so the first of two
    has a negative sine. is_interleaved: the two stand side by side, else in two halves."""
    frequencies, factor = frequencies_of(rotation)
    angles = torch.arange(capacity).float()[:, None] * frequencies  # [capacity, rotated / 2]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    parts = torch.stack if is_interleaved else torch.cat
    pair = (parts((cos, cos), -1).flatten(1), parts((-sin, sin), -1).flatten(1))
    return pair[0].to(device, dtype), pair[1].to(device, dtype)


def frequencies_of(rotation: Rotation) -> tuple[torch.Tensor, float]:
    """Return the frequencies, [rotated / 2] fp32, and the factor of cosines and sines."""
    given, size = rotation.settings, rotation.num_rotated
    exponents = torch.arange(0, size, 2).float() / size
    powers = float(given["rope_theta"]) ** exponents
    if rotation.kind == "linear":
        return (1.0 / powers) / float(given["factor"]), 1.0
    if rotation.kind == "proportional":
        return _proportional(1.0 / powers, given), 1.0
    if rotation.kind == "llama3":
        return _llama3(1.0 / powers, given), 1.0
    if rotation.kind == "yarn":
        return _yarn(powers, given, size)
    if rotation.kind == "longrope":
        return _longrope(powers, given)
    return 1.0 / powers, 1.0


def _proportional(frequencies: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """The first part of the frequencies of a whole head; the others are 0."""
    share = float(given.get("partial_rotary_factor") or 1.0)
    num_turned = int(share * 2 * frequencies.shape[0] // 2)
    is_turned = torch.arange(frequencies.shape[0]) < num_turned
    return torch.where(is_turned, frequencies, 0.0) / float(given.get("factor") or 1.0)


def _llama3(frequencies: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Slow frequencies are divided by a factor, fast ones stay, those between are mixed."""
    length, factor = given["original_max_position_embeddings"], float(given["factor"])
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    wavelengths = 2 * math.pi / frequencies
    slowed = torch.where(wavelengths > length / low, frequencies / factor, frequencies)
    share = (length / wavelengths - low) / (high - low)
    mixed = (1 - share) * slowed / factor + share * slowed
    is_between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(is_between, mixed, slowed)


def _yarn(powers: torch.Tensor, given: Mapping[str, Any], size: int) -> tuple[torch.Tensor, float]:
    length, longest = given["original_max_position_embeddings"], given["max_position_embeddings"]
    factor = float(given.get("factor") or longest / length)
    low = _dimension(float(given.get("beta_fast") or 32), size, given["rope_theta"], length)
    high = _dimension(float(given.get("beta_slow") or 1), size, given["rope_theta"], length)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(size // 2).float() - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return frequencies, _yarn_factor(given, factor)


def _dimension(num_turns: float, size: int, theta: float, length: int) -> float:
    """The dimension that turns so often within the trained length."""
    return size * math.log(length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_factor(given: Mapping[str, Any], factor: float) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    scale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    if scale and of_all:
        return _grown(factor, scale) / _grown(factor, of_all)
    return _grown(factor, 1.0)


def _grown(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(powers: torch.Tensor, given: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Within the trained length."""
    length, longest = given["original_max_position_embeddings"], given["max_position_embeddings"]
    factor = float(given.get("factor") or longest / length)
    scale = given.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(length))
    return 1.0 / (torch.tensor(given["short_factor"]) * powers), float(scale)
