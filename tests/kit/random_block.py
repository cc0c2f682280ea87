"""A random DSpark drafter, in DeepSpec's layout, for a tiny target.

Its Markov head has counted which token follows which in what the target writes, so that some of its
guesses are right; its layers are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from localspec.forward.heads.files import TargetSizes
from localspec.forward.model import LanguageModel

BLOCK_SIZE = 5


def config_for(target: LanguageModel, **changed: Any) -> dict[str, Any]:
    """A config as DeepSpec writes it."""
    sizes = TargetSizes.of(target)
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": 2 * sizes.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "num_target_layers": sizes.num_layers,
        "target_layer_ids": [-1, 0],
        "block_size": BLOCK_SIZE,
        "mask_token_id": sizes.vocab_size - 1,
        "num_anchors": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "markov_rank": sizes.vocab_size,
        "markov_head_type": "vanilla",
        **changed,
    }


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of its layers, `fc` and norms, as every published layout names them."""
    width, size, ffn_size = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config["target_layer_ids"]) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.q_norm.weight": (size,),
            "self_attn.k_norm.weight": (size,),
            "mlp.gate_proj.weight": (ffn_size, width),
            "mlp.up_proj.weight": (ffn_size, width),
            "mlp.down_proj.weight": (width, ffn_size),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def random_tensors(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    """Norms about one, and products that keep the size of a row."""
    rng, made = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=rng)
        is_norm = len(shape) == 1
        made[name] = 1.0 + 0.1 * drawn if is_norm else scale * drawn * shape[-1] ** -0.5
    return made


def followers(target: LanguageModel, num_texts: int = 6, length: int = 24) -> torch.Tensor:
    """How often each token follows each in what the target writes greedily, about, [V, V]."""
    counts = 3.0 * torch.eye(target.vocab_size)  # Such a target often repeats itself.
    length = min(length, target.cache.shape.capacity - 2)
    for text in range(num_texts):
        target.cache.rollback(0)
        token = (7 * text + 3) % target.vocab_size
        for _ in range(length):
            following = int(target.forward([token])[0].argmax())
            counts[token, following] += 1.0
            token = following
    target.cache.rollback(0)
    return counts


def write_random(folder: Path, target: LanguageModel) -> None:
    config, sizes = config_for(target), TargetSizes.of(target)
    tensors = random_tensors(layer_shapes(config))
    tensors["norm.weight"] *= 0.01  # The layers say little beside the Markov head.
    tensors |= {
        "embed_tokens.weight": target.embed(range(sizes.vocab_size)),
        "lm_head.weight": target.head(torch.eye(sizes.hidden_size)).T.contiguous(),
        "markov_head.markov_w1.weight": torch.eye(sizes.vocab_size),
        "markov_head.markov_w2.weight": 4.0 * (1.0 + followers(target)).log().T.contiguous(),
        "confidence_head.proj.weight": 0.1 * torch.ones(1, sizes.hidden_size + sizes.vocab_size),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.clone() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
