"""A multi-token-prediction module: one decoder layer that goes on where the target ends.

Contract: row j joins the target's last state of token j with the embedding of token j + 1, sees the
rows before it, and becomes a state from which the target's own head names token j + 2. Given its
own state and the token it named, the module is applied again for the token after. `MtpModule` is
that function over any parts: torch's modules in training, packed layers in `MtpHead`, which keeps
keys and values in a cache of its own.

Not here: catching up and drafting (drafters.mtp), the weights models ship (mtp_native), training.
Source: DeepSeek-V3 (arXiv 2412.19437), after Gloeckle et al. 2024 (arXiv 2404.19737); one module
for all steps as such models are run, which is also what speculative streaming (arXiv 2402.11131)
comes to on a finished target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from localspec.errors import ModelError
from localspec.forward.heads.files import TargetSizes, is_fraction, read_head, take
from localspec.forward.heads.layer import (
    Attend,
    DecoderLayer,
    LayerShape,
    Rotation,
    Rows,
    Shapes,
    cached_attention,
    layer_cache,
    packed_parts,
    plain_frequencies,
)
from localspec.forward.model import LanguageModel
from localspec.forward.tree import additive_mask

KIND = "mtp"
MAX_SIZE = 1 << 20  # of any count in a settings file; more is damage


@dataclass(frozen=True)
class MtpShape:
    """Sizes of a module, as its settings say them. has_bias: whether queries, keys and values
    have one."""

    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation_base: float = 10000.0
    norm_epsilon: float = 1e-6
    has_bias: bool = False

    def layer(self, hidden_size: int) -> LayerShape:
        return LayerShape(
            hidden_size=hidden_size,
            input_size=hidden_size,
            ffn_size=self.ffn_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            norm_epsilon=self.norm_epsilon,
        )

    def shapes(self, hidden_size: int) -> Shapes:
        """Every tensor of a module. The state stands before the embedding in `input`."""
        layer = self.layer(hidden_size).shapes()
        bias = {"qkv.bias": layer["qkv.weight"][:1]} if self.has_bias else {}
        norms = ("hidden_norm", "token_norm", "attention_norm", "final_norm")
        return {
            **{f"{name}.weight": (hidden_size,) for name in norms},
            "input.weight": (hidden_size, 2 * hidden_size),
            **layer,
            **bias,
        }

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, settings: Mapping[str, Any], where: str) -> MtpShape:
        """The shape that settings describe. Raises ModelError for what none can be."""
        for name in ("ffn_size", "num_heads", "num_kv_heads", "head_dim"):
            if type(settings.get(name)) is not int or not 0 < settings[name] <= MAX_SIZE:
                raise _odd(where, name, settings.get(name))
        for name in ("rotation_base", "norm_epsilon"):
            if not is_fraction(settings.get(name)):
                raise _odd(where, name, settings.get(name))
        if type(settings.get("has_bias", False)) is not bool:
            raise _odd(where, "has_bias", settings["has_bias"])
        if settings["num_heads"] % settings["num_kv_heads"]:
            raise _odd(where, "num_kv_heads", settings["num_kv_heads"])
        if settings["head_dim"] % 2:
            raise _odd(where, "head_dim", settings["head_dim"])
        return cls(
            ffn_size=settings["ffn_size"],
            num_heads=settings["num_heads"],
            num_kv_heads=settings["num_kv_heads"],
            head_dim=settings["head_dim"],
            rotation_base=float(settings["rotation_base"]),
            norm_epsilon=float(settings["norm_epsilon"]),
            has_bias=settings.get("has_bias", False),
        )


@dataclass(frozen=True)
class MtpModule:
    """The module's function, over whatever computes its parts."""

    hidden_norm: Rows
    token_norm: Rows
    input: Rows
    attention_norm: Rows
    layer: DecoderLayer
    final_norm: Rows

    @classmethod
    def of(cls, shape: LayerShape, parts: Mapping[str, Rows]) -> MtpModule:
        return cls(
            parts["hidden_norm"],
            parts["token_norm"],
            parts["input"],
            parts["attention_norm"],
            DecoderLayer.of(shape, parts),
            parts["final_norm"],
        )

    def __call__(
        self,
        states: torch.Tensor,
        embeddings: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """states and embeddings [..., d], cos and sin [..., 1, head_dim] -> states [..., d]."""
        joined = torch.cat((self.hidden_norm(states), self.token_norm(embeddings)), dim=-1)
        stream = self.input(joined)
        stream = self.layer(self.attention_norm(stream), stream, cos, sin, attend)
        return self.final_norm(stream)


@dataclass(frozen=True)
class MtpWeights:
    """A module as read. tensors: those of shape.shapes, on the target's device."""

    shape: MtpShape
    tensors: Mapping[str, torch.Tensor]


class MtpHead:
    """A module ready to draft, with a cache of one layer. Slot j holds row j, under token j + 1."""

    def __init__(self, weights: MtpWeights, capacity: int) -> None:
        shape, tensors = weights.shape, weights.tensors
        like = tensors["final_norm.weight"]
        self._layer = shape.layer(like.shape[0])
        self._parts = packed_parts(tensors, shape.norm_epsilon)
        self._module = MtpModule.of(self._layer, self._parts)
        frequencies = plain_frequencies(shape.head_dim, shape.rotation_base, like.device)
        self._rotation = Rotation.of(frequencies, capacity, like.dtype)
        self.cache = layer_cache(self._layer, capacity, like.dtype, like.device)

    @property
    def memory_bytes(self) -> int:
        weights = sum(part.weight_bytes for part in self._parts.values())
        return weights + self._rotation.table_bytes + self.cache.kv_bytes

    @torch.inference_mode()
    def advance(
        self, tokens: Sequence[int], states: torch.Tensor, embeddings: torch.Tensor
    ) -> torch.Tensor:
        """Append one row for each of `tokens`, the ones embedded: states and embeddings [n, d] ->
        [n, d], what the target's head reads. Raises CacheError at the context's end."""
        size = len(tokens)
        with self.cache.append(tokens) as start:
            cos, sin = self._rotation.at(slice(start, start + size))
            mask = additive_mask(size, None, start, self.cache.dtype, self.cache.device)
            attend = cached_attention(self.cache, start, mask)
            return self._module(states, embeddings, cos, sin, attend)


def read_mtp(folder: Path, target: LanguageModel) -> MtpWeights:
    """The module in `folder`, in our format. Raises ModelError."""
    sizes = TargetSizes.of(target)
    files = read_head(folder, KIND, sizes)
    shape = MtpShape.of(files.settings, folder.name)
    wanted = shape.shapes(sizes.hidden_size)
    dtype = target.embed([0]).dtype
    return MtpWeights(shape, take(files.tensors, wanted, folder.name, dtype, target.device))


def _odd(where: str, name: str, value: object) -> ModelError:
    return ModelError(
        f"The settings in {where} say {name} = {value!r}, which no module has. Fetch or train it "
        "again."
    )
