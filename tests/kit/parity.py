"""Outputs of published drafters' own code on made-up weights, and what they were computed of.

A file holds for each case the config, the shapes of its tensors, and what the reference gave for a
prompt and rounds that accept different numbers of tokens. Weights, tokens and the target's states
are made anew from their names, so that the file stays small.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from localspec.forward.cache import KVCache, KVShape
from localspec.forward.features import Features

VOCAB, WIDTH, NUM_LAYERS, CAPACITY = 40, 32, 4, 64  # of the target
PROMPT_LENGTH = 9
CPU = torch.device("cpu")


def made_up(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Numbers that follow from a name: norms about one, and products that keep the size of rows."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    drawn = torch.randn(tuple(shape), generator=generator)
    if name.endswith(".bias") or name.startswith("states"):
        return drawn
    if name.endswith("layer_scalar"):
        return torch.full(tuple(shape), 0.75)
    if len(shape) == 1:
        return 1.0 + 0.3 * drawn
    return drawn * (1.5 if "markov" in name or "codebook" in name else shape[-1] ** -0.5)


def text(length: int = CAPACITY) -> list[int]:
    """Tokens of a made-up text."""
    return [(5 * place * place + 3 * place + 7) % VOCAB for place in range(length)]


def states_of(layer: int, tokens: Sequence[int]) -> torch.Tensor:
    """The target's state of each token in a layer, [n, d]: what its token and place make of it."""
    of_tokens = made_up(f"states of tokens {layer}", (VOCAB, WIDTH))[list(tokens)]
    return of_tokens + made_up(f"states of places {layer}", (CAPACITY, WIDTH))[: len(tokens)]


class MadeUpTarget:
    """A target whose states are `states_of`, as a head sees it. scale: of its embedding. cap: the
    bound of its logits."""

    device, vocab_size, num_layers = CPU, VOCAB, NUM_LAYERS

    def __init__(self, scale: float = 1.0, cap: float | None = None) -> None:
        self.cache = KVCache(KVShape(NUM_LAYERS, 1, 2, CAPACITY), torch.float32, CPU)
        self.table = made_up("target.embed", (VOCAB, WIDTH)) * WIDTH**0.5
        self.product = made_up("target.head", (VOCAB, WIDTH)) * 3.0
        self._scale, self._cap = scale, cap
        self._features = Features(CAPACITY, WIDTH, torch.float32, CPU)

    def embed(self, ids: Any) -> torch.Tensor:
        ids = ids if isinstance(ids, torch.Tensor) else torch.tensor(list(ids), dtype=torch.int64)
        return self.table[ids] * self._scale

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        logits = rows @ self.product.T
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def features(self, layers: Sequence[int], tokens: Sequence[int]) -> Features:
        """Its states of tokens, as a forward leaves them."""
        features = self._features
        features.follow(layers)
        features.write(len(tokens), {layer: states_of(layer, tokens) for layer in features.layers})
        return features


@dataclass(frozen=True)
class Case:
    """What a reference was run on, and its results. shapes: of its tensors. accepted: of each
    round."""

    config: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    accepted: Sequence[int]
    results: Mapping[str, torch.Tensor]

    @property
    def lengths(self) -> list[int]:
        """Tokens of the text before each round."""
        lengths = [PROMPT_LENGTH]
        for accepted in self.accepted:
            lengths.append(lengths[-1] + accepted + 1)
        return lengths[:-1]

    def tensors(self, target: MadeUpTarget) -> dict[str, torch.Tensor]:
        """The weights, as a published file holds them."""
        own = {"embed_tokens.weight": target.table, "lm_head.weight": target.product}
        made = dict[str, torch.Tensor]()
        for name, shape in self.shapes.items():
            whole = own.get(name)
            if name == "d2t":
                made[name] = ids_of(shape[0]) - torch.arange(shape[0])
            elif whole is not None and list(whole.shape) == list(shape):
                made[name] = whole.clone()
            else:
                made[name] = made_up(name, shape)
        return made

    def write(self, folder: Path, target: MadeUpTarget) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors(target), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(self.config)))
        return folder


def ids_of(size: int) -> torch.Tensor:
    """The target's ids of a draft vocabulary of so many tokens."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:size].sort().values


@lru_cache
def cases(file: Path) -> dict[str, Case]:
    """Every case of a file, by name."""
    results = dict[str, dict[str, torch.Tensor]]()
    with safe_open(file, framework="pt") as opened:
        told = {name: json.loads(each) for name, each in opened.metadata().items()}
        for key in opened.keys():  # noqa: SIM118
            name, _, part = key.partition("/")
            results.setdefault(name, {})[part] = opened.get_tensor(key)
    return {name: Case(**each, results=results[name]) for name, each in sorted(told.items())}


def save_cases(file: Path, made: Mapping[str, Case]) -> None:
    """Write cases, whose results are of a reference."""
    tensors = {
        f"{name}/{part}": tensor.contiguous()
        for name, case in made.items()
        for part, tensor in case.results.items()
    }
    told = {
        name: json.dumps(
            {"config": dict(case.config), "shapes": case.shapes, "accepted": case.accepted}
        )
        for name, case in made.items()
    }
    save_file(tensors, file, told)


def target_of(case: Case) -> MadeUpTarget:
    """The target that a case is for: Gemma's scale and cap where its config says a cap."""
    cap = case.config.get("final_logit_softcapping")
    return MadeUpTarget() if cap is None else MadeUpTarget(scale=WIDTH**0.5, cap=cap)


def largest_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of numbers that are no infinities, which must stand at the same places."""
    is_number = wanted.isfinite()
    if not torch.equal(is_number, found.isfinite()):
        return float("inf")
    return float((found[is_number] - wanted[is_number]).abs().max())
