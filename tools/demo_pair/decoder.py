"""The models of the pair: transformers' Llama, with tied embeddings and no biases.

Contract: `hidden_with_exit` runs the layers one by one, which the library's own forward cannot
leave out. Everything else is `LlamaForCausalLM` as it is. localspec.forward.decoder cannot take its
place: it runs one sequence under inference mode over packed weights, so nothing can be
differentiated through it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_pair.tokenizer import END_OF_TEXT_ID, PAD_ID, TURN_END_ID

DEVIATION = 0.02  # of a new weight


def llama_config(
    vocabulary_size: int,
    num_layers: int,
    hidden_size: int,
    ffn_size: int,
    num_heads: int,
    context_length: int = 4096,
) -> LlamaConfig:
    """The shape of a model of the pair, and the tokens that end its replies."""
    return LlamaConfig(
        vocab_size=vocabulary_size,
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=ffn_size,
        num_attention_heads=num_heads,
        max_position_embeddings=context_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[TURN_END_ID, END_OF_TEXT_ID],
        pad_token_id=PAD_ID,
    )


@torch.no_grad()
def new_decoder(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """With small normal weights, fp32; projections back into the stream are scaled by depth."""
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    scale = (2 * config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_back = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = DEVIATION * (scale if is_back else 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
    return model


def hidden_states(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """What the output head reads, [B, n, H]. tokens: [B, n]."""
    found: Tensor = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    return found


def hidden_with_exit(
    model: LlamaForCausalLM, tokens: Tensor, exit_layers: int, skipped: frozenset[int]
) -> tuple[Tensor, Tensor]:
    """The same, and after the first `exit_layers` layers, both behind the final norm. skipped:
    layers left out of this pass."""
    body = model.model
    x = left = body.embed_tokens(tokens)
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotation = body.rotary_emb(x, position_ids=places)
    for place, layer in enumerate(body.layers):
        if place not in skipped:
            x = layer(x, position_embeddings=rotation)
        if place + 1 == exit_layers:
            left = x
    return body.norm(x), body.norm(left)
