"""What a family does to its logits behind the output embedding, as its config tells it.

Contract: `scaled` turns products with the output embedding into the logits that the family's own
forward gives: divided (Granite), multiplied (Cohere) or capped (Gemma 2); unchanged where the
config names none of these. A family that does something else is not known here; whoever depends
on it compares with a forward first (training.target).

Source: the modelling code of these families in transformers.
"""

from __future__ import annotations

from typing import Any

import torch


def scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """logits: [..., V] fp32, as the output embedding gives them. config: of transformers."""
    text = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None)
    factor = getattr(text, "logit_scale", None)
    cap = getattr(text, "final_logit_softcapping", None)
    if divisor:
        logits = logits / divisor
    if factor:
        logits = logits * factor
    return cap * torch.tanh(logits / cap) if cap else logits
