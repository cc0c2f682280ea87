"""The weights of a larger model that computes the same function as a trained small one.

Contract: `Enlargement.tensors` yields every tensor of the wanted shape, layer by layer, so that
no more than one layer need be in memory. In exact arithmetic the logits are the source's.

1. The residual stream stands in the first `d` of `D` dimensions, or twice in the first `2d` where
   that makes the factor of point 2 a power of two; the others are always 0, since every row that
   writes them is 0. Norm weights there are 0, so columns that read them may hold noise.
2. Zeros dilute the mean square that a norm divides by: its weights are scaled by sqrt(copies*d/D)
   and its epsilon by copies*d/D.
3. A real query head stays in the group of its key head. Extra heads hold noise, and the output
   projection has zero columns for them; so have units the feed-forward width adds.
4. A wider head keeps its rotary pairs by base ** (new/old size): pair i turns as before. Queries
   are scaled by sqrt(new/old size) against the attention's own scaling; their added dimensions
   are 0, those of keys and values noise.
5. Extra layers are noise that writes nothing; they stand between the real ones.

A factor that is a power of two is exact in any precision (`is_exact`); another one is rounded
with the weight, as in any conversion: text and acceptance then differ a little in bf16, at places
where the two best tokens are nearly tied. The padded residual and the cut outputs are zeros: a
GPU multiplies them as fast, but draws a little less power.

Not here: files, sizes people ask for (inflate).
Source: zero padding with compensated norms is Net2Net's function-preserving growth
(arXiv 1511.05641) for rotary, grouped-query decoders; checked in tests/tools/test_enlarge.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localspec.core.errors import ConfigError, ModelError
from localspec.formats.native import SIZED
from localspec.machine.shapes import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")  # those that treat each frequency by itself
LAYER_WEIGHTS = {  # name in the layer -> (axis of its rows, axis of its columns)
    "self_attn.q_proj": ("query", "hidden"),
    "self_attn.k_proj": ("key", "hidden"),
    "self_attn.v_proj": ("value", "hidden"),
    "self_attn.o_proj": ("residual", "query"),
    "mlp.gate_proj": ("unit", "hidden"),
    "mlp.up_proj": ("unit", "hidden"),
    "mlp.down_proj": ("residual", "unit"),
}
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class Axis:
    """One dimension of a weight. places: where each real entry goes, one row for each copy.
    cleared: entries that must be 0 where a layer is real."""

    size: int
    places: Tensor
    cleared: Tensor


@dataclass(frozen=True)
class Enlargement:
    """From one shape to another that is at least as large everywhere.

    Raises ModelError for a family or shape whose function would not be preserved.
    final_noise: spread of a random factor on each weight of the last norm, 0 for none.
    """

    source: ModelShape
    wanted: ModelShape
    seed: int
    final_noise: float = 0.0

    def __post_init__(self) -> None:
        _check_family(self.source)
        _check_sizes(self.source, self.wanted)

    @property
    def copies(self) -> int:
        """How often the residual stands in the wider one."""
        doubles = math.log2(self.wanted.hidden_size / self.source.hidden_size)
        return 2 if doubles.is_integer() and doubles % 2 == 1 else 1

    @property
    def dilution(self) -> float:
        """What a norm's mean square shrinks by."""
        return self.copies * self.source.hidden_size / self.wanted.hidden_size

    @property
    def head_growth(self) -> float:
        return self.wanted.head_dim / self.source.head_dim

    @property
    def has_qk_norm(self) -> bool:
        """True if each query and key head has a norm of its own."""
        return SIZED[self.source.family].head_norms == "each"

    @property
    def factors(self) -> dict[str, float]:
        """What weights are multiplied by, by kind."""
        grown = math.sqrt(self.head_growth)
        if not self.has_qk_norm:
            return {"norm": math.sqrt(self.dilution), "query": grown, "key": 1.0}
        # The norm on each head shares the hidden norm's epsilon, so its input must follow suit;
        # its own dilution and the query's factor cancel out.
        input_factor = math.sqrt(self.dilution) * grown
        return {
            "norm": math.sqrt(self.dilution),
            "query": input_factor,
            "key": input_factor,
            "key_norm": 1.0 / grown,
        }

    @property
    def is_exact(self) -> bool:
        """Whether no weight is rounded, in any precision."""
        return self.final_noise == 0.0 and all(
            math.log2(factor).is_integer() for factor in self.factors.values()
        )

    def config(self, raw: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of the larger model. raw: the source's; full: the same with everything it
        implies. Raises ModelError for attention that would not be preserved."""
        _check_attention(self.source, full, self.head_growth)
        rope = full["rope_parameters"]
        wanted = self.wanted
        base = float(rope["rope_theta"]) ** self.head_growth
        kept = {name: value for name, value in raw.items() if name != "rope_scaling"}
        made = {
            **kept,
            "hidden_size": wanted.hidden_size,
            "num_hidden_layers": wanted.num_layers,
            "intermediate_size": wanted.intermediate_size,
            "num_attention_heads": wanted.num_heads,
            "num_key_value_heads": wanted.num_kv_heads,
            "head_dim": wanted.head_dim,
            "rms_norm_eps": full["rms_norm_eps"] * self.dilution,
            "rope_theta": base,
            "rope_parameters": {**rope, "rope_theta": base},
        }
        if "layer_types" in raw:
            made["layer_types"] = ["full_attention"] * wanted.num_layers
        if "max_window_layers" in raw:
            made["max_window_layers"] = wanted.num_layers
        return made

    def tensors(self, read: ReadTensor, names: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its name. read: a tensor of the source; names: those it has."""
        yield "model.embed_tokens.weight", self._embedding(read("model.embed_tokens.weight"))
        for index, (donor, is_real) in enumerate(self.layer_plan()):
            yield from self._layer(read, names, index, donor, is_real)
        yield "model.norm.weight", self._norm(self._disturbed(read("model.norm.weight")))
        if not self.source.is_tied:
            yield "lm_head.weight", self._head(read("lm_head.weight"))

    def layer_plan(self) -> list[tuple[int, bool]]:
        """(source layer to take after, whether it is that layer) of each layer. Evenly spread: a
        model whose first layers were all real would flatter early exits."""
        count, total = self.source.num_layers, self.wanted.num_layers
        real = [(i + 1) * total // count - 1 for i in range(count)]
        plan = list[tuple[int, bool]]()
        for index in range(total):
            donor = next(i for i, place in enumerate(real) if index <= place)
            plan.append((donor, real[donor] == index))
        return plan

    def _embedding(self, source: Tensor) -> Tensor:
        made = torch.zeros(len(source), self.wanted.hidden_size, dtype=source.dtype)
        for places in self._axis("residual").places:
            made[:, places] = source
        return made

    def _head(self, source: Tensor) -> Tensor:
        made = self._noise("lm_head.weight", (len(source), self.wanted.hidden_size), source)
        made[:, : source.shape[1]] = source
        return made

    def _layer(
        self, read: ReadTensor, names: frozenset[str], index: int, donor: int, is_real: bool
    ) -> Iterator[tuple[str, Tensor]]:
        old, new = f"model.layers.{donor}.", f"model.layers.{index}."
        for name, axes in LAYER_WEIGHTS.items():
            for kind in ("weight", "bias"):
                if f"{old}{name}.{kind}" in names:
                    source = read(f"{old}{name}.{kind}")
                    made = self._weight(f"{new}{name}.{kind}", source, axes, is_real)
                    yield f"{new}{name}.{kind}", made
        for name in LAYER_NORMS:
            yield f"{new}{name}.weight", self._norm(read(f"{old}{name}.weight"))
        if self.has_qk_norm:
            for name in ("query", "key"):
                called = f"self_attn.{name[0]}_norm.weight"
                yield new + called, self._head_norm(name, read(old + called))

    def _weight(self, name: str, source: Tensor, axes: tuple[str, str], is_real: bool) -> Tensor:
        """A matrix, or a bias as a matrix of one column."""
        rows = self._axis(axes[0])
        one = torch.zeros(1, dtype=torch.long)
        columns = Axis(1, one[None], one[:0]) if source.dim() == 1 else self._axis(axes[1])
        matrix = source.reshape(len(source), -1) * self.factors.get(axes[0], 1.0)
        shape = (rows.size, columns.size)
        # What writes the residual is 0 but for what was there; all else may be noise.
        if axes[0] == "residual":
            made = torch.zeros(shape, dtype=source.dtype)
        else:
            made = self._noise(name, shape, matrix)
        if is_real:
            made[rows.cleared] = 0.0
            for places in rows.places:
                made[places[:, None], columns.places[0]] = matrix
        return made.squeeze(1) if source.dim() == 1 else made

    def _axis(self, kind: str) -> Axis:
        source, wanted = self.source, self.wanted
        nothing = torch.zeros(0, dtype=torch.long)
        if kind in ("hidden", "residual"):
            first = torch.arange(source.hidden_size)
            copies = [first + i * source.hidden_size for i in range(self.copies)]
            return Axis(wanted.hidden_size, torch.stack(copies), nothing)
        if kind == "unit":
            places = torch.arange(source.intermediate_size)[None]
            return Axis(wanted.intermediate_size, places, nothing)
        heads = self._query_heads() if kind == "query" else torch.arange(source.num_kv_heads)
        num_heads = wanted.num_heads if kind == "query" else wanted.num_kv_heads
        places = (heads[:, None] * wanted.head_dim + self._head_places()).reshape(1, -1)
        whole = (heads[:, None] * wanted.head_dim + torch.arange(wanted.head_dim)).reshape(-1)
        # One factor of each product must be 0; a norm over the head needs both to be.
        is_cleared = kind == "query" or (kind == "key" and self.has_qk_norm)
        return Axis(num_heads * wanted.head_dim, places, whole if is_cleared else nothing)

    def _query_heads(self) -> Tensor:
        """The new place of each real query head, in the group of its key head."""
        old_group = self.source.num_heads // self.source.num_kv_heads
        new_group = self.wanted.num_heads // self.wanted.num_kv_heads
        heads = torch.arange(self.source.num_heads)
        return heads // old_group * new_group + heads % old_group

    def _head_places(self) -> Tensor:
        """Dimensions i and i + size/2 are a rotary pair: each half stands at the start of its."""
        half = torch.arange(self.source.head_dim // 2)
        return torch.cat((half, half + self.wanted.head_dim // 2))

    def _norm(self, source: Tensor) -> Tensor:
        made = torch.zeros(self.wanted.hidden_size, dtype=source.dtype)
        made[: len(source)] = source * self.factors["norm"]
        return made

    def _head_norm(self, kind: str, source: Tensor) -> Tensor:
        made = torch.ones(self.wanted.head_dim, dtype=source.dtype)
        made[self._head_places()] = source * self.factors.get(f"{kind}_norm", 1.0)
        return made

    def _disturbed(self, norm: Tensor) -> Tensor:
        if self.final_noise == 0.0:
            return norm
        rng = self._random("model.norm.weight")
        spread = torch.randn(norm.shape, generator=rng) * self.final_noise
        return (norm.float() * (1.0 + spread)).to(norm.dtype)

    def _noise(self, name: str, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Normal numbers of the spread of `like`, the same for the same seed and name."""
        made = torch.empty(shape, dtype=like.dtype)
        return made.normal_(0.0, _spread(like), generator=self._random(name))

    def _random(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))


def _spread(like: Tensor) -> float:
    return float(like.float().square().mean().sqrt())


def _check_family(source: ModelShape) -> None:
    if source.family not in FAMILIES or source.num_experts:
        raise ModelError(
            f"The model is a '{source.family}' model, and only dense models of these families can "
            f"be enlarged without changing what they say: {', '.join(FAMILIES)}. "
            "Choose one of them with --model."
        )


def _check_sizes(source: ModelShape, wanted: ModelShape) -> None:
    groups = (source.num_heads // source.num_kv_heads, wanted.num_heads // wanted.num_kv_heads)
    sizes = {
        "hidden width": (source.hidden_size, wanted.hidden_size),
        "number of layers": (source.num_layers, wanted.num_layers),
        "number of key heads": (source.num_kv_heads, wanted.num_kv_heads),
        "number of query heads for each key head": groups,
        "head size": (source.head_dim, wanted.head_dim),
        "feed-forward width": (source.intermediate_size, wanted.intermediate_size),
    }
    for name, (old, new) in sizes.items():
        if new < old:
            raise ConfigError(
                f"The model has a {name} of {old}, but the wanted size has only {new}. "
                "Choose a larger size, or a smaller model to enlarge."
            )


def _check_attention(source: ModelShape, full: Mapping[str, Any], head_growth: float) -> None:
    rope = full["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if head_growth != 1.0 and (kind not in ROPE_TYPES or "partial_rotary_factor" in rope):
        raise ModelError(
            f"The model turns its positions by '{kind}', which depends on the head size, so "
            "it cannot be enlarged to another one. Choose a size with the same head size."
        )
    if full.get("sliding_window") or set(full.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(
            "The model attends to a sliding window, which cannot be enlarged. "
            "Choose a model with full attention."
        )
