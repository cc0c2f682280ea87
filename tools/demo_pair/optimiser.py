"""Muon for the matrices inside the layers, AdamW for the rest, both on an fp32 master copy of bf16
weights.

Contract: `Optimiser(model)` then `step(rate)` after backward; `state` and `load_state` carry it
through a checkpoint. It knows nothing of schedules.
Source: Muon, Jordan et al. 2024; scaling of the update after Liu et al. 2025 (arXiv 2502.16982).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import LlamaForCausalLM

WEIGHT_DECAY = 0.05  # of the matrices
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.98), 1e-10
CLIP_NORM = 1.0


class Optimiser:
    """Master weights and moments of a model. adam_rate_ratio: AdamW's rate relative to Muon's."""

    def __init__(self, model: LlamaForCausalLM, adam_rate_ratio: float = 1.0) -> None:
        self.parameters: dict[str, Parameter] = dict(model.named_parameters())
        self.master = {n: Parameter(p.detach().float().clone()) for n, p in self.parameters.items()}
        matrices = {n: p for n, p in self.master.items() if ".layers." in n and p.dim() == 2}
        self.others = [p for n, p in self.master.items() if n not in matrices]
        muon = torch.optim.Muon(
            matrices.values(), weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(self.others, betas=ADAM_BETAS, eps=ADAM_EPSILON, weight_decay=0.0)
        self.rules = ((muon, 1.0), (adam, adam_rate_ratio))

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply one update with learning rate `rate` and clear the gradients. A layer that was left
        out of this batch has none and stays as it is."""
        for name, parameter in self.parameters.items():
            own = parameter.grad
            self.master[name].grad = None if own is None else own.float()
        norm = get_total_norm([p.grad for p in self.master.values() if p.grad is not None])
        clip_grads_with_norm_(self.others, CLIP_NORM, norm)  # Muon's steps are of one length
        for rule, ratio in self.rules:
            for group in rule.param_groups:
                group["lr"] = rate * ratio
            rule.step()
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        master = {name: weight.detach() for name, weight in self.master.items()}
        return {"master": master, "rules": [rule.state_dict() for rule, _ in self.rules]}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        for (rule, _), saved in zip(self.rules, state["rules"], strict=True):
            rule.load_state_dict(saved)
        for name, parameter in self.parameters.items():
            self.master[name].copy_(state["master"][name])
            parameter.copy_(self.master[name])
