"""Write a decoder as a transformers folder: config, generation settings, weight shards, tokenizer.

Contract: the folder loads as LlamaForCausalLM and gives the same logits as the plain torch model.
Weights are bf16 in safetensors shards below `MAX_SHARD_BYTES`, with an index. The tied head is not
stored twice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from localspec.training.model import Decoder, ModelShape
from localspec.training.tokenizer import END_OF_TEXT_ID, PAD_ID, TURN_END_ID, save_tokenizer

MAX_SHARD_BYTES = 14 * 1024 * 1024


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
