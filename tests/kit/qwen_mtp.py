"""A tiny Qwen3.5 with the module that its publisher ships beside it, as transformers runs both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.kit.families import small

PUBLISHED = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "post_norm": "norm",
}


@cache
def pair(family: str = "qwen3_5") -> tuple[Any, Any]:
    """The model, and transformers' module for it; every parameter of both is noise."""
    layers = ["linear_attention", "full_attention"]
    model = small(family, vocab_size=64, num_hidden_layers=2, layer_types=layers)
    model.set_attn_implementation("eager")
    return model, module_for(model)


def module_for(model: Any) -> Any:
    """A module of noise."""
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel(model, 1).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in module.layers.named_parameters():
            noise = torch.rand(tensor.shape, generator=generator) - 0.5
            tensor.copy_(noise if "norm" in name else 0.6 * noise)
    return module.requires_grad_(False)


def published(module: Any) -> dict[str, torch.Tensor]:
    """Its tensors by the names of published files."""
    named = dict[str, torch.Tensor]()
    for name, tensor in module.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        own = f"mtp.{PUBLISHED[part]}" if part in PUBLISHED else "mtp.layers.0"
        named[f"{own}.{rest}"] = tensor.clone().contiguous()
    return named


def write(folder: Path, model: Any, module: Any) -> Path:
    """As a published folder holds both, in one checkpoint."""
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_mtp_layers", "mtp_layer_types"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    file = folder / "model.safetensors"
    save_file({**load_file(file), **published(module)}, file, {"format": "pt"})
    return folder


class Reference:
    """Drafts after a text with transformers' module, from nothing each time."""

    def __init__(self, model: Any, module: Any) -> None:
        self._model, self._module = model, module
        self.values = torch.empty(0)  # those in the module's cache after reading a text

    @torch.no_grad()
    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the target's head reads of each token, [n, d]."""
        ids = torch.tensor([tokens])
        found = self._model(input_ids=ids, use_cache=False, output_hidden_states=True)
        states: torch.Tensor = found.hidden_states[-1][0]
        return states

    @torch.no_grad()
    def logits(self, text: Sequence[int], count: int) -> torch.Tensor:
        """The logits of each of `count` greedy draft tokens after a text: [count, V]."""
        rows, cache = self.states(text[:-1])[None], MtpCache(config=self._module.config)
        tokens, first, found = list(text[1:]), 1, list[torch.Tensor]()
        for step in range(count):
            places = torch.arange(first, first + len(tokens))[None]
            rows = self._module.forward_layer(
                0, rows, places, cache, input_ids=torch.tensor([tokens])
            )
            if step == 0:
                self.values = cache.layers[0].values[0].clone()
            found.append(self._model.lm_head(rows[0, -1]))
            rows, first = rows[:, -1:], first + len(tokens)
            tokens = [int(found[-1].argmax())]
        return torch.stack(found)
