"""Writes a model of the pair as a folder, reads one back, and widens it.

Contract: the weights are bf16 in safetensors shards below `MAX_SHARD_BYTES`. `widened` gives a
model a larger feed-forward part that computes the same function: new gate and up weights are small
and random, new down weights are zero.
Source: Net2Net (arXiv 1511.05641).
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from localspec.core.errors import ModelError
from localspec.formats.folder_files import check_folder
from tools.demo_pair.decoder import DEVIATION, llama_config
from tools.demo_pair.tokenizer import save_tokenizer

MAX_SHARD_BYTES = 14 * 1024 * 1024
# What a config must say beside its sizes.
FIXED = ("model_type", "eos_token_id", "pad_token_id", "hidden_act", "rms_norm_eps",
         "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_parameters")  # fmt: skip


def export_model(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    made = deepcopy(model).to("cpu", dtype)
    ends = made.config.eos_token_id
    made.generation_config = GenerationConfig(
        eos_token_id=ends, pad_token_id=made.config.pad_token_id, do_sample=False
    )
    made.save_pretrained(folder, max_shard_size=MAX_SHARD_BYTES)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def load_exported(folder: Path) -> LlamaForCausalLM:
    """The model of an exported folder, fp32, on the processor. Raises ModelError."""
    config, fixed = check_folder(folder).config, llama_config(8, 1, 8, 8, 1).to_dict()
    if any(config.get(key) != fixed[key] for key in FIXED):
        raise ModelError(
            f"{folder.name} is not a model of the kind that `python -m tools.demo_pair` makes. "
            "Start from one of those, or from nothing."
        )
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


@torch.no_grad()
def widened(model: LlamaForCausalLM, ffn_size: int, seed: int) -> LlamaForCausalLM:
    """The same function with `ffn_size` feed-forward units. Raises ModelError if that is fewer."""
    config = deepcopy(model.config)
    extra = ffn_size - config.intermediate_size
    if extra < 0:
        raise ModelError(
            f"A model of {config.intermediate_size} feed-forward units cannot shrink to {ffn_size}."
        )
    config.intermediate_size = ffn_size
    generator, state = torch.Generator().manual_seed(seed), model.state_dict()
    for name, weight in state.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            units = torch.randn(extra, weight.shape[1], generator=generator)
            state[name] = torch.cat((weight, DEVIATION * units))
        elif name.endswith("down_proj.weight"):
            state[name] = torch.cat((weight, weight.new_zeros(len(weight), extra)), 1)
    wide = LlamaForCausalLM(config)
    wide.load_state_dict(state)
    return wide
