"""Normalisation of rows in as few kernels as the device allows.

Contract: LayerNorm is torch's own. RootMeanSquareNorm is
rows / sqrt(mean(rows^2) + eps) * weight over the last dimension, computed in fp32 and rounded once.
On a GPU it is torch's own kernel. On a CPU torch runs a sequence of small kernels for it, but a
single fast one for layer norm: the layer norm of (x, -x) has mean 0 and variance mean(x^2), so its
first half is the wanted result.

Source: RMSNorm, arXiv 1910.07467.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localspec.weights.linear import bytes_of


class LayerNorm:
    """weight, bias: [d]."""

    def __init__(self, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.eps = eps
        self.bias = bias
        self.weight_bytes = bytes_of(weight, bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [..., d] -> [..., d]."""
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


class RootMeanSquareNorm:
    """weight: [d], or [heads, d] where heads have weights of their own."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._size = weight.shape[-1]
        self._is_cpu = weight.device.type == "cpu"
        self._signs = torch.tensor([[1.0], [-1.0]], dtype=weight.dtype, device=weight.device)
        # One weight for all rows is applied by the kernel; the half that is cut off needs none.
        is_one = weight.ndim == 1
        self._inside = torch.stack((weight, torch.zeros_like(weight))) if is_one else None
        self.weight_bytes = bytes_of(weight, self._inside)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [..., d] -> [..., d]."""
        if not self._is_cpu:
            weight = self.weight if self.weight.ndim == 1 else None
            normed = F.rms_norm(rows, (self._size,), weight, self.eps)
            return normed if weight is not None else normed * self.weight
        normed = self._on_processor(rows)
        return normed if self._inside is not None else normed * self.weight

    def norm_(self, rows: torch.Tensor) -> None:
        """Write the result to the rows themselves."""
        if self._is_cpu and self._inside is None:
            torch.mul(self._on_processor(rows), self.weight, out=rows)
        else:
            rows.copy_(self(rows))

    def _on_processor(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the result without the weights of heads."""
        doubled = rows.unsqueeze(-2) * self._signs  # [..., 2, d]
        normed = torch.layer_norm(doubled, (2, self._size), self._inside, None, self.eps)
        return normed.select(-2, 0)
