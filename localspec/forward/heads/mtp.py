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

`read_mtp` reads our own format. `ships_mtp` says whether a model's folder holds such a module at
all; `read_native` gives the one of MiMo-7B's layout (a Qwen2 layer under model.mtp_layers.0). Other
layouts are known by their names and refused in words: their layers have experts or compressed
attention, and their targets cannot take a draft back or are not run here. Names from the published
checkpoints and from vLLM's mimo_mtp.py, deepseek_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

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
from localspec.forward.weights import check_safetensors, weight_files

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


PREFIX = "model.mtp_layers."
FIRST = f"{PREFIX}0."
# In the order in which our tensors stack them.
LAYOUT = {
    "hidden_norm.weight": ("hidden_layernorm.weight",),
    "token_norm.weight": ("token_layernorm.weight",),
    "attention_norm.weight": ("input_layernorm.weight",),
    "final_norm.weight": ("final_layernorm.weight",),
    "input.weight": ("input_proj.weight",),
    "qkv.weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
    "qkv.bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "output.weight": ("self_attn.o_proj.weight",),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}
# What part of a name tells of another layout.
OTHERS = {
    ".eh_proj.": "DeepSeek-V3 or GLM-4.5",
    "mtp.fc.": "Qwen3-Next or Qwen3.5",
    "mtp_block.": "ERNIE 4.5",
    "mtp.layers.": "another family",
}


def ships_mtp(folder: Path) -> bool:
    """Whether a model's files hold a multi-token-prediction module of any kind. False where the
    folder cannot be read: loading the model will say why."""
    try:
        return any(_is_mtp(name) for name in _places(folder))
    except ModelError:
        return False


def read_native(folder: Path, target: LanguageModel) -> MtpWeights:
    """The module that the model in `folder` ships. Raises ModelError."""
    places = _places(folder)
    _require_known(folder, places)
    found = _read(places)
    has_bias = "self_attn.q_proj.bias" in found
    shape = _shape(folder, _config(folder), has_bias)
    stacked = _stacked(found, folder.name, has_bias)
    sizes = TargetSizes.of(target)
    wanted = shape.shapes(sizes.hidden_size)
    dtype = target.embed([0]).dtype
    return MtpWeights(shape, take(stacked, wanted, folder.name, dtype, target.device))


def _is_mtp(name: str) -> bool:
    return name.startswith(PREFIX) or any(part in name for part in OTHERS)


def _places(folder: Path) -> dict[str, Path]:
    """Name -> file of every tensor, from the files' own headers. Raises ModelError."""
    found = dict[str, Path]()
    for file in weight_files(folder):
        check_safetensors(file)
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


def _require_known(folder: Path, places: Mapping[str, Path]) -> None:
    """Raises ModelError unless a module of the known layout is there, alone."""
    if not any(name.startswith(FIRST) for name in places):
        for name in places:
            kind = next((kind for part, kind in OTHERS.items() if part in name), None)
            if kind is not None:
                raise ModelError(
                    f"{folder.name} ships a multi-token-prediction module of the layout of {kind} "
                    f"({name}), which is not run here; that of MiMo-7B is. Train one for this "
                    "target: python -m localspec train mtp."
                )
        raise ModelError(
            f"{folder.name} ships no multi-token-prediction module. Train one: "
            "python -m localspec train mtp."
        )


def _read(places: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The first module's tensors, by their names within it."""
    found = dict[str, torch.Tensor]()
    for file in {file for name, file in places.items() if name.startswith(FIRST)}:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in places if name.startswith(FIRST) and places[name] == file]
            found.update({name.removeprefix(FIRST): opened.get_tensor(name) for name in names})
    return found


def _stacked(
    found: Mapping[str, torch.Tensor], where: str, has_bias: bool
) -> dict[str, torch.Tensor]:
    """Our tensors from theirs. Raises ModelError for one too few, too many or of another shape."""
    layout = {ours: parts for ours, parts in LAYOUT.items() if has_bias or ours != "qkv.bias"}
    known = {part for parts in layout.values() for part in parts}
    missing, extra = sorted(known - found.keys()), sorted(found.keys() - known)
    if missing or extra:
        said = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which is not known"
        raise ModelError(
            f"The multi-token-prediction module of {where} {said} ({len(missing)} tensors "
            f"missing, {len(extra)} too many). Fetch the model again."
        )
    try:
        return {ours: torch.cat([found[part] for part in parts]) for ours, parts in layout.items()}
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"The multi-token-prediction module of {where} has queries, keys and values, or gate "
            "and up, of sizes that do not go together. Fetch the model again."
        ) from error


def _shape(folder: Path, config: Mapping[str, Any], has_bias: bool) -> MtpShape:
    """Raises ModelError for settings that would change the layer's mathematics."""
    if config.get("hidden_act", "silu") != "silu":
        raise _unsuited(folder, f"its activation is {config['hidden_act']}, not silu")
    rotation = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind != "default":
        raise _unsuited(folder, f"its positions are turned by {kind}")
    if config.get("use_sliding_window"):
        raise _unsuited(folder, "it attends to a window only")
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    derived = size // heads if isinstance(heads, int) and isinstance(size, int) and heads else None
    settings = {
        "ffn_size": config.get("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or derived,
        "rotation_base": config.get("rope_theta") or rotation.get("rope_theta"),
        "norm_epsilon": config.get("rms_norm_eps"),
        "has_bias": has_bias,
    }
    return MtpShape.of(settings, f"{folder.name}/config.json")


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{folder}/config.json cannot be read. Fetch the model again.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{folder}/config.json is not a JSON object. Fetch the model again.")
    return found


def _unsuited(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"The multi-token-prediction module of {folder.name} is not run here: {reason}. Train one "
        "for this target: python -m localspec train mtp."
    )
