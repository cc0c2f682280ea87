"""A DFlash drafter of a tiny Gemma 4 that knows a few dialogues by heart, trained in seconds.

It is trained as transformers' own block drafter and written under the names of z-lab's layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from tests.kit.trained_assistant import NO_LABEL, SIZES, target_model, train, train_target

STEPS, NUM_ANCHORS = 250, 64
BLOCK_SIZE, MASK_ID, WINDOW = 5, 0, 8
LAYERS_READ = [0, 1]
LAYERS: dict[str, Any] = {
    "hidden_size": SIZES["hidden_size"],
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": WINDOW,
}
RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def write_pair(target_folder: Path, drafter_folder: Path) -> None:
    """Train both and write their folders."""
    target = target_model()
    ids = train_target(target_folder, target)
    rotation = {"rope_type": "default", "rope_theta": 1e4}
    config = AutoConfig.for_model(
        "muse_glimmer_assistant", **LAYERS, rope_parameters=rotation, block_size=BLOCK_SIZE,
        mask_token_id=MASK_ID, target_layer_ids=LAYERS_READ,
    )  # fmt: skip
    drafter = AutoModel.from_config(config, attn_implementation="eager")
    states = target(
        input_ids=ids.clamp(min=0), output_hidden_states=True, use_cache=False
    ).hidden_states
    context = torch.cat([states[layer + 1] for layer in LAYERS_READ], -1)
    generator = torch.Generator().manual_seed(1)
    train(drafter, STEPS, lambda: _block_loss(target, drafter, ids, context, generator))
    _write(drafter_folder, drafter)


def _block_loss(
    target: Any, drafter: Any, ids: torch.Tensor, context: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """The loss of blocks behind random roots."""
    num_texts, length = ids.shape
    texts = torch.randint(num_texts, (NUM_ANCHORS,), generator=generator)
    roots = torch.randint(WINDOW, length - BLOCK_SIZE, (NUM_ANCHORS,), generator=generator)
    own = roots[:, None] + torch.arange(BLOCK_SIZE)  # [anchors, b]
    tokens = ids[texts[:, None], own]
    block = torch.full_like(tokens, MASK_ID)
    block[:, 0] = tokens[:, 0].clamp(min=0)
    before = roots[:, None] + torch.arange(-WINDOW, 0)
    places = torch.cat((before, own), 1)
    is_hidden = places[:, None] <= own[:, :, None] - WINDOW  # [anchors, b, window + b]
    mask = torch.zeros(is_hidden.shape).masked_fill(is_hidden, torch.finfo(torch.float32).min)
    rows = drafter(
        noise_embeds=target.get_input_embeddings()(block),
        context_hidden_states=context[texts[:, None], before],
        attention_mask={"sliding_attention": mask[:, None], "full_attention": None},
        position_ids=places,
        use_cache=False,
    ).last_hidden_state
    logits = target.lm_head(rows[:, 1:])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=NO_LABEL)


def _write(folder: Path, drafter: Any) -> None:
    tensors = dict[str, torch.Tensor]()
    for name, tensor in drafter.state_dict().items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.detach().clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        **LAYERS,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": SIZES["vocab_size"],
        "rope_theta": 1e4,
        "attention_bias": False,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "num_target_layers": SIZES["num_hidden_layers"],
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "target_layer_ids": LAYERS_READ,
            "mask_token_id": MASK_ID,
            "causal": False,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
