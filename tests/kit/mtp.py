"""A tiny model with a next-token layer as its publisher ships it, and its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

SIZE, VOCAB = 48, 64


class Shipped(nn.Module):
    """The names of MiMo's module, around transformers' own layer."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            setattr(self, name, Qwen2RMSNorm(SIZE, eps=config.rms_norm_eps))
        self.input_proj = nn.Linear(2 * SIZE, SIZE, bias=False)
        self.layer = Qwen2DecoderLayer(config, layer_idx=0)

    def forward(self, states: torch.Tensor, embedded: torch.Tensor, rotation: Any) -> torch.Tensor:
        joined = torch.cat((self.hidden_layernorm(states), self.token_layernorm(embedded)), -1)
        mask = torch.full((states.shape[0],) * 2, float("-inf")).triu(1)[None, None]
        rows = self.layer(self.input_proj(joined)[None], mask, position_embeddings=rotation)
        return self.final_layernorm(rows)[0]


def shipped() -> tuple[Any, Shipped]:
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_theta=640000.0,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model, module = Qwen2ForCausalLM(config).eval(), Shipped(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model, module


def write(folder: Path, model: Any, module: Shipped, **settings: Any) -> Path:
    """As the published repository holds it: one checkpoint for both."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "num_nextn_predict_layers": 1, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in module.state_dict().items():
        tensors[f"model.mtp_layers.0.{name.removeprefix('layer.')}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
