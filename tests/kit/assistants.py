"""Tiny assistants of tiny Gemma 4 targets, and the steps that transformers makes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

from tests.kit.families import GEMMA4, SHAPE, scrambled_in_place

NUM_LAYERS = 4
NUM_CLUSTERS = 6


@contextmanager
def shared_keys() -> Iterator[None]:
    """transformers 5.23 cannot build a model all of whose layers read another's keys, and passes no
    keys on from a model none of whose layers share them. Here it does both."""
    classes = (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    modes = [each.kv_sharing_modes for each in classes]
    for each, usual in zip(classes, modes, strict=True):
        each.kv_sharing_modes = property(partial(_sharing_modes, usual))
    try:
        yield
    finally:
        for each, usual in zip(classes, modes, strict=True):
            each.kv_sharing_modes = usual


def _sharing_modes(usual: property, config: Any) -> list[str | None]:
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    if config.num_kv_shared_layers:
        return list(usual.__get__(config))
    kinds = config.layer_types
    last = {len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
    return ["store" if layer in last else None for layer in range(len(kinds))]


def assistant_of(target: Any, is_ordered: bool = False) -> Any:
    """A random assistant for a module of transformers."""
    text = {
        **SHAPE,
        **GEMMA4,
        "hidden_size": 16,
        "num_hidden_layers": NUM_LAYERS,
        "num_kv_shared_layers": NUM_LAYERS,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "vocab_size": target.config.vocab_size,
        "sliding_window": target.config.sliding_window,
        "attention_k_eq_v": target.config.attention_k_eq_v,
        "num_global_key_value_heads": 1 if target.config.attention_k_eq_v else None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(
        "gemma4_assistant",
        text_config=text,
        backbone_hidden_size=target.config.hidden_size,
        use_ordered_embeddings=is_ordered,
        num_centroids=NUM_CLUSTERS,
        centroid_intermediate_top_k=2,
    )
    with shared_keys():
        module: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    scrambled_in_place(module)
    if is_ordered:
        size = target.config.vocab_size
        order = torch.randperm(size, generator=torch.Generator().manual_seed(4))
        module.masked_embedding.token_ordering.copy_(order)
    return module


def save_assistant(folder: Path, target: Any, is_ordered: bool = False) -> Any:
    """Write the assistant into a folder as transformers does; return its module."""
    module = assistant_of(target, is_ordered)
    with shared_keys():
        module.save_pretrained(folder)
    return module


@torch.no_grad()
def reference_steps(
    target: Any, assistant: Any, tokens: Sequence[int], guesses: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [V] and projected state [d] of chained steps, as transformers drafts: the target has
    read all of `tokens` but the last; guesses: the tokens drafted after it."""
    read = target(
        input_ids=torch.tensor([tokens[:-1]]),
        output_hidden_states=True,
        return_shared_kv_states=True,
        use_cache=False,
    )
    state, steps = read.hidden_states[-1][:, -1:], list[tuple[torch.Tensor, torch.Tensor]]()
    position = torch.tensor([[len(tokens) - 1]])
    for token in (tokens[-1], *guesses):
        embedded = target.get_input_embeddings()(torch.tensor([[token]]))
        out = assistant(
            inputs_embeds=torch.cat((embedded, state), -1),
            position_ids=position,
            shared_kv_states=read.shared_kv_states,
        )
        state = out.last_hidden_state
        steps.append((out.logits[0, 0], state[0, 0]))
    return steps
