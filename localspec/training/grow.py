"""Go on training from an exported model, wider if asked.

Contract: `load_exported` reads a folder that `export` wrote back into the plain torch decoder;
`widened` gives it a larger feed-forward part that computes the same function: the new gates and
ups are small and random, and what they feed starts at nothing.

Source: function-preserving growth as in Net2Net (Chen et al. 2015, arXiv 1511.05641).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from localspec.errors import ModelError
from localspec.forward.weights import check_folder, weight_files
from localspec.training.export import model_config
from localspec.training.model import Decoder, ModelShape

DEVIATION = 0.02  # of a new gate's weights, as at the start of a training


def load_exported(folder: Path) -> Decoder:
    """The decoder of an exported folder, fp32, on the processor. Raises ModelError."""
    config = check_folder(folder)
    shape = _shape(config, folder)
    if any(config.get(key) != value for key, value in _fixed(shape).items()):
        raise ModelError(
            f"{folder.name} is not a model of the kind that `train pair` makes. "
            "Start from one of those, or from nothing."
        )
    weights = dict[str, Tensor]()
    for file in weight_files(folder):
        weights |= load_file(file)
    model = Decoder(shape)
    model.load_state_dict({name: t.float() for name, t in _fused(weights, shape).items()})
    return model


def widened(model: Decoder, ffn_size: int, seed: int) -> Decoder:
    """The same function with `ffn_size` feed-forward units. Raises ModelError if that is fewer."""
    old = model.shape.ffn_size
    if ffn_size < old:
        raise ModelError(f"A model of {old} feed-forward units cannot shrink to {ffn_size}.")
    generator = torch.Generator().manual_seed(seed)
    wide = Decoder(replace(model.shape, ffn_size=ffn_size))
    state = dict(model.state_dict())
    extra = ffn_size - old
    for name in [n for n in state if n.endswith("gate_up.weight")]:
        halves = [
            torch.cat((half, DEVIATION * torch.randn(extra, half.shape[1], generator=generator)))
            for half in state[name].chunk(2)
        ]
        state[name] = torch.cat(halves)  # [2 * ffn_size, H]
        down = name.replace("gate_up", "down")
        state[down] = torch.cat((state[down], state[down].new_zeros(len(state[down]), extra)), 1)
    wide.load_state_dict(state)
    return wide


def _shape(config: dict[str, object], folder: Path) -> ModelShape:
    keys = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size",
            "num_attention_heads", "max_position_embeddings")  # fmt: skip
    sizes = [config.get(key) for key in keys]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"config.json in {folder.name} gives no sizes. Fetch the model again.")
    return ModelShape(*(int(str(size)) for size in sizes))


def _fixed(shape: ModelShape) -> dict[str, object]:
    """What such a config must say beside its sizes."""
    kept = ("model_type", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
            "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_parameters")  # fmt: skip
    whole = model_config(shape)
    return {key: whole[key] for key in kept}


def _fused(weights: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Names of transformers to ours: the inverse of export.llama_weights."""
    state = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    for place in range(shape.num_layers):
        layer, block = f"model.layers.{place}.", f"blocks.{place}."
        joined = {
            "qkv": [f"self_attn.{one}_proj" for one in "qkv"],
            "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
            "out": ["self_attn.o_proj"],
            "down": ["mlp.down_proj"],
            "attention_norm": ["input_layernorm"],
            "ffn_norm": ["post_attention_layernorm"],
        }
        for name, parts in joined.items():
            found = [weights[f"{layer}{part}.weight"] for part in parts]
            state[f"{block}{name}.weight"] = torch.cat(found)
    return state
