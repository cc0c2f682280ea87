"""Writes a decoder as a transformers folder, reads one back, and widens it.

Contract: the folder loads as LlamaForCausalLM and gives the same logits as the plain torch model.
Weights are bf16 in safetensors shards below `MAX_SHARD_BYTES`, with an index. The tied head is not
stored twice. `load_exported` reads such a folder back; `widened` gives a decoder a larger
feed-forward part that computes the same function: new gate and up weights are small and random,
new down weights are zero.
Source: Net2Net (arXiv 1511.05641).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from localspec.errors import ModelError
from localspec.formats.folder_files import check_folder, weight_files
from tools.demo_pair.decoder import Decoder, ModelShape
from tools.demo_pair.tokenizer import END_OF_TEXT_ID, PAD_ID, TURN_END_ID, save_tokenizer

MAX_SHARD_BYTES = 14 * 1024 * 1024
DEVIATION = 0.02  # of a new gate's weights, as at the start of a training


def model_config(shape: ModelShape) -> dict[str, Any]:
    """Return config.json of a Llama of this shape."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary_size,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }


def generation_config() -> dict[str, Any]:
    """Return generation_config.json: where an answer ends."""
    return {
        "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
        "pad_token_id": PAD_ID,
        "do_sample": False,
    }


def llama_weights(model: Decoder) -> dict[str, Tensor]:
    """Return the weights under the names of LlamaForCausalLM, fused projections split."""
    weights = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.norm.weight,
    }
    for place, block in enumerate(model.blocks):
        prefix = f"model.layers.{place}."
        state = block.state_dict()
        query, key, value = state["qkv.weight"].chunk(3)
        gate, up = state["gate_up.weight"].chunk(2)
        named = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": state["out.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": state["down.weight"],
            "input_layernorm": state["attention_norm.weight"],
            "post_attention_layernorm": state["ffn_norm.weight"],
        }
        weights |= {f"{prefix}{name}.weight": tensor for name, tensor in named.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}


def make_shards(weights: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Split weights into shards of at most `max_bytes`, in order."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in weights.items():
        size = tensor.numel() * tensor.element_size()
        if used + size > max_bytes and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write the shards and, if there are several, their index; remove shards of an older export."""
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards = make_shards(weights, MAX_SHARD_BYTES)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for place, shard in enumerate(shards, 1):
        file = f"model-{place:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )


def export_model(
    model: Decoder, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype) for name, tensor in llama_weights(model).items()}
    write_weights(weights, folder)
    config = model_config(model.shape) | {"dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config())
    save_tokenizer(tokenizer, folder, model.shape.context_length)


def load_exported(folder: Path) -> Decoder:
    """The decoder of an exported folder, fp32, on the processor. Raises ModelError."""
    config = check_folder(folder)
    shape = _shape(config, folder)
    if any(config.get(key) != value for key, value in _fixed(shape).items()):
        raise ModelError(
            f"{folder.name} is not a model of the kind that `python -m tools.demo_pair` makes. "
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
