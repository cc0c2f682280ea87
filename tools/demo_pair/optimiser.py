"""Muon for the matrices inside the blocks, AdamW for the rest, both on an fp32 master copy of bf16
weights.

Contract: `Optimiser(model)` then `step(rate)` after backward; `state` and `load_state` carry it
through a checkpoint. Fused projections are orthogonalised as the separate matrices they hold. It
knows nothing of schedules.
Source: Muon, Jordan et al. 2024; scaling of the update after Liu et al. 2025 (arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tools.demo_pair.decoder import Decoder


@dataclass(frozen=True)
class OptimiserSettings:
    """Constants of the update rules. adam_rate_ratio: AdamW's rate relative to Muon's."""

    momentum: float = 0.95
    weight_decay: float = 0.05
    adam_rate_ratio: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_epsilon: float = 1e-10
    clip_norm: float = 1.0


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values near 1 by Newton-Schulz steps. matrices: [N, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.transpose(1, 2) if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.to(torch.bfloat16)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.transpose(1, 2) if is_tall else x).float()


def num_fused(name: str) -> int:
    """Say how many matrices a fused projection holds."""
    return 3 if name.endswith("qkv.weight") else 2 if name.endswith("gate_up.weight") else 1


class Optimiser:
    """Hold master weights and moments for a model, and update both."""

    def __init__(self, model: Decoder, settings: OptimiserSettings) -> None:
        self.settings = settings
        self.parameters = dict(model.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.matrices = [
            n for n, p in self.parameters.items() if n.startswith("blocks.") and p.dim() == 2
        ]
        self.others = [name for name in self.parameters if name not in self.matrices]
        self.second = {name: torch.zeros_like(self.master[name]) for name in self.others}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Apply one update with learning rate `rate`, clear gradients, return the gradient norm."""
        self.num_steps += 1
        gradients = {
            name: p.grad.float() for name, p in self.parameters.items() if p.grad is not None
        }
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        scale = min(1.0, self.settings.clip_norm / (norm + 1e-6))
        # A layer that was left out of this batch has no gradient and stays as it is.
        met = {name: gradients[name] for name in self.matrices if name in gradients}
        self.step_matrices(met, rate)
        self.step_others(
            {name: gradients[name] * scale for name in self.others if name in gradients}, rate
        )
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
            parameter.grad = None
        return norm

    def step_matrices(self, gradients: dict[str, Tensor], rate: float) -> None:
        """Muon: momentum, then orthogonalised updates, matrices of equal shape in one batch."""
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, gradient in gradients.items():
            moment = self.first[name].lerp_(gradient, 1 - self.settings.momentum)
            nesterov = gradient.lerp(moment, self.settings.momentum)
            parts = num_fused(name)
            for master, update in zip(
                self.master[name].chunk(parts), nesterov.chunk(parts), strict=True
            ):
                groups[(update.shape[0], update.shape[1])].append((master, update))
        for (rows, columns), pairs in groups.items():
            updates = orthogonalise(torch.stack([update for _, update in pairs]))
            step = rate * 0.2 * max(rows, columns) ** 0.5
            for (master, _), update in zip(pairs, updates, strict=True):
                master.mul_(1 - rate * self.settings.weight_decay).sub_(update, alpha=step)

    def step_others(self, gradients: dict[str, Tensor], rate: float) -> None:
        """AdamW without decay for the embedding and the norms."""
        slow, fast = self.settings.adam_betas
        for name, gradient in gradients.items():
            first = self.first[name].lerp_(gradient, 1 - slow)
            second = self.second[name].lerp_(gradient.square(), 1 - fast)
            first_unbiased = first / (1 - slow**self.num_steps)
            second_unbiased = second / (1 - fast**self.num_steps)
            update = first_unbiased / (second_unbiased.sqrt() + self.settings.adam_epsilon)
            self.master[name].sub_(update, alpha=rate * self.settings.adam_rate_ratio)

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint needs."""
        return {
            "master": self.master,
            "first": self.first,
            "second": self.second,
            "num_steps": self.num_steps,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a saved state, model weights included."""
        for mine, saved in (
            (self.master, state["master"]),
            (self.first, state["first"]),
            (self.second, state["second"]),
        ):
            for name, tensor in mine.items():
                tensor.copy_(saved[name])
        self.num_steps = int(state["num_steps"])
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
