"""EAGLE heads from folders: our own format, and those that their authors publish.

Contract: `load_head` gives a head that fits the target. Ours shares the target's embedding and
output head. A published folder holds `config.json` (that of a Llama of one layer) and
`model.safetensors`. With `hidden_norm` among the tensors it is an EAGLE-3: features of three
layers, an output head of its own on a part of the vocabulary (d2t: what to add to a draft id to
have the target's). Otherwise an EAGLE-1 or 2, which reads and writes what the target's own head
reads. An embedding in the file is used only where it differs from the target's. Raises ModelError
for what does not fit.

Layouts as in SafeAILab/EAGLE model/cnets1.py and cnets.py; layer indices as vLLM and SGLang read
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from localspec.errors import ModelError
from localspec.forward.features import LAST
from localspec.forward.from_transformers import ROTATIONS
from localspec.forward.heads.eagle import (
    KIND,
    EagleParts,
    EagleShape,
    FirstForm,
    Network,
    OwnForm,
    Speech,
    ThirdForm,
)
from localspec.forward.heads.files import (
    CONFIG,
    TargetSizes,
    is_fraction,
    read_head,
    read_tensors,
    take,
)
from localspec.forward.heads.layer import (
    DecoderLayer,
    LayerShape,
    Rows,
    packed_parts,
    plain_frequencies,
)
from localspec.forward.model import LanguageModel
from localspec.forward.weights import read_object

PUBLISHED_CONFIG, PUBLISHED_WEIGHTS = "config.json", "model.safetensors"
ATTENTION, FEED_FORWARD = "layer.self_attn", "layer.mlp"
MAPS = ("d2t", "t2d")
FRACTIONS = ("norm_epsilon", "rope_base")


def load_head(folder: Path, target: LanguageModel) -> EagleParts:
    """The head in `folder`, of our own format or a published one. Raises ModelError."""
    is_published = (folder / PUBLISHED_CONFIG).is_file() and not (folder / CONFIG).is_file()
    return load_published(folder, target) if is_published else load_own(folder, target)


def load_own(folder: Path, target: LanguageModel) -> EagleParts:
    """Raises ModelError."""
    sizes = TargetSizes.of(target)
    files = read_head(folder, KIND, sizes)
    shape = read_shape(files.settings, folder, sizes)
    dtype = target.embed([0]).dtype
    tensors = take(files.tensors, shape.shapes(), folder.name, dtype, target.device)
    parts = packed_parts(tensors, shape.norm_epsilon)
    return EagleParts(
        layers=shape.layers,
        network=OwnForm.of(shape.layer(), parts),
        speech=Speech(target.head, target.vocab_size),
        embed=target.embed,
        frequencies=plain_frequencies(shape.head_dim, shape.rope_base, target.device),
        rope_scale=1.0,
        dtype=dtype,
        weight_bytes=sum(part.weight_bytes for part in parts.values()),
    )


def read_shape(settings: Mapping[str, Any], folder: Path, sizes: TargetSizes) -> EagleShape:
    """The settings, checked. Raises ModelError."""
    odd = sorted(settings.keys() ^ set(EagleShape.__dataclass_fields__))
    if odd:
        raise _unfit(folder, f"{odd[0]} is missing from its settings or unknown there")
    layers, numbers = settings["layers"], {k: v for k, v in settings.items() if k != "layers"}
    for name, value in numbers.items():
        if not is_fraction(value) or (name not in FRACTIONS and type(value) is not int):
            raise _unfit(folder, f"its {name} is {value!r}")
    known = (LAST, *range(sizes.num_layers))
    if not isinstance(layers, list) or not layers or any(i not in known for i in layers):
        raise _unfit(
            folder, f"it reads the layers {layers!r} of a target that has {sizes.num_layers}"
        )
    shape = EagleShape(layers=tuple(layers), **numbers)
    if shape.hidden_size != sizes.hidden_size:
        raise _unfit(
            folder, f"its rows are {shape.hidden_size} wide, the target's {sizes.hidden_size}"
        )
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2:
        raise _unfit(folder, "its attention heads do not divide evenly")
    return shape


def _unfit(folder: Path, reason: str) -> ModelError:
    return ModelError(
        f"The EAGLE head in {folder.name} cannot be used: {reason}. "
        "Choose the head made for this target, or train one (python -m localspec train eagle)."
    )


# -- published heads


def load_published(folder: Path, target: LanguageModel) -> EagleParts:
    """The head in `folder` for this target. Raises ModelError."""
    sizes = TargetSizes.of(target)
    config = _Config(folder, _read_config(folder))
    tensors = {_our_name(name): t for name, t in read_tensors(folder / PUBLISHED_WEIGHTS).items()}
    layout = _Layout.of(config, tensors, sizes)
    maps = {name: tensors.pop(name) for name in MAPS if name in tensors}
    dtype = target.embed([0]).dtype
    held = take(tensors, layout.shapes(tensors), folder.name, dtype, target.device)
    table = held.pop("embed_tokens.weight", None)
    embed, own_bytes = _embedding(table, target)
    parts = packed_parts(_fused(held), layout.layer.norm_epsilon)
    frequencies, rope_scale = config.rotation(target.device)
    return EagleParts(
        layers=layout.layers,
        network=layout.network(parts),
        speech=_speech(parts, maps, target, config),
        embed=embed,
        frequencies=frequencies,
        rope_scale=rope_scale,
        dtype=dtype,
        weight_bytes=own_bytes + sum(part.weight_bytes for part in parts.values()),
    )


@dataclass(frozen=True)
class _Config:
    """A published config, its values asked for one by one."""

    folder: Path
    values: Mapping[str, Any]

    def whole(self, name: str, default: int | None = None) -> int:
        """A positive whole number. Raises ModelError."""
        found = self.values.get(name)
        found = default if found is None else found
        if type(found) is not int or found < 1:
            raise self.unfit(f"{PUBLISHED_CONFIG} names {name} {found!r}, which no head has")
        return found

    def fraction(self, name: str, default: float) -> float:
        """A positive number. Raises ModelError."""
        found = self.values.get(name, default)
        if not is_fraction(found):
            raise self.unfit(f"{PUBLISHED_CONFIG} names {name} {found!r}, which no head has")
        return float(found)

    def require(self, name: str, wanted: object, default: object) -> None:
        found = self.values.get(name, default)
        if found != wanted:
            raise self.unfit(f"its {name} is {found!r}, and only {wanted!r} is known here")

    def rotation(self, device: torch.device) -> tuple[torch.Tensor, float]:
        """Frequencies [head_dim / 2] and scale, by transformers' own code."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
        given = {name: self.values[name] for name in names if self.values.get(name) is not None}
        heads, width = self.whole("num_attention_heads"), self.whole("hidden_size")
        head_dim = self.whole("head_dim", width // heads)
        try:
            made = LlamaConfig(
                hidden_size=width, num_attention_heads=heads, head_dim=head_dim, **given
            )
            turned: Any = LlamaRotaryEmbedding(made)
        except Exception as error:  # a stranger's values in other people's code: any type may come
            first_line = str(error).strip().split("\n")[0]
            raise self.unfit(f"{PUBLISHED_CONFIG} describes no rotation ({first_line})") from error
        kind = (made.rope_parameters or {}).get("rope_type", "default")
        if kind not in ROTATIONS:
            raise self.unfit(f"its positions are turned by {kind}, which changes with the length")
        return turned.inv_freq.float().to(device), float(turned.attention_scaling)

    def unfit(self, reason: str) -> ModelError:
        return ModelError(
            f"The EAGLE head in {self.folder.name} cannot be used: {reason}. Choose the head that "
            "was published for this very target, or train one (python -m localspec train eagle)."
        )


@dataclass(frozen=True)
class _Layout:
    """What a published head is made of. layers: empty features of EAGLE-1 and 2 are (LAST,)."""

    layer: LayerShape
    layers: tuple[int, ...]
    is_third: bool
    vocab_size: int
    draft_vocab_size: int

    @classmethod
    def of(
        cls, config: _Config, tensors: Mapping[str, torch.Tensor], sizes: TargetSizes
    ) -> _Layout:
        """Raises ModelError for another target or an unknown variant."""
        is_third = "layer.hidden_norm.weight" in tensors
        config.require("num_hidden_layers", 1, 1)
        config.require("hidden_act", "silu", "silu")
        config.require("norm_before_residual", False, False)
        width, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
        vocab_size = config.whole("vocab_size")
        read = config.whole("target_hidden_size", width)
        if (width, read, vocab_size) != (sizes.hidden_size, sizes.hidden_size, sizes.vocab_size):
            raise config.unfit(
                f"it was made for a target {read} wide with {vocab_size} tokens; this one is "
                f"{sizes.hidden_size} wide with {sizes.vocab_size}"
            )
        layer = LayerShape(
            hidden_size=width,
            input_size=2 * width if is_third else width,
            ffn_size=config.whole("intermediate_size"),
            num_heads=heads,
            num_kv_heads=config.whole("num_key_value_heads", heads),
            head_dim=config.whole("head_dim", width // heads),
            norm_epsilon=config.fraction("rms_norm_eps", 1e-6),
        )
        if heads % layer.num_kv_heads or layer.head_dim % 2:
            raise config.unfit("its attention heads do not divide evenly")
        layers = _third_layers(config, sizes) if is_third else (LAST,)
        return cls(
            layer, layers, is_third, vocab_size, config.whole("draft_vocab_size", vocab_size)
        )

    def shapes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """All that must be there, and of what may be what is."""
        layer, width = self.layer, self.layer.hidden_size
        queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        wanted: dict[str, tuple[int, ...]] = {
            f"{ATTENTION}.q_proj.weight": (queries, layer.input_size),
            f"{ATTENTION}.k_proj.weight": (keys, layer.input_size),
            f"{ATTENTION}.v_proj.weight": (keys, layer.input_size),
            f"{ATTENTION}.o_proj.weight": (width, queries),
            f"{FEED_FORWARD}.gate_proj.weight": (layer.ffn_size, width),
            f"{FEED_FORWARD}.up_proj.weight": (layer.ffn_size, width),
            f"{FEED_FORWARD}.down_proj.weight": (width, layer.ffn_size),
            "layer.post_attention_layernorm.weight": (width,),
            "fc.weight": (width, (len(self.layers) if self.is_third else 2) * width),
        }
        optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, width)}
        if self.is_third:
            norms = ("layer.hidden_norm.weight", "layer.input_layernorm.weight", "norm.weight")
            wanted |= dict.fromkeys(norms, (width,))
            wanted["lm_head.weight"] = (self.draft_vocab_size, width)
        else:
            optional["fc.bias"] = (width,)
            sides = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
            optional |= {f"{ATTENTION}.{side}.bias": (size,) for side, size in sides.items()}
        return wanted | {name: shape for name, shape in optional.items() if name in tensors}

    def network(self, parts: Mapping[str, Rows]) -> Network:
        if self.is_third:
            return ThirdForm.of(self.layer, parts)
        return FirstForm(parts["fuse"], DecoderLayer.of(self.layer, parts))


def _third_layers(config: _Config, sizes: TargetSizes) -> tuple[int, ...]:
    """The blocks whose output an EAGLE-3 reads: as named in its config, else its authors' choice,
    what goes into blocks 2, n / 2 and n - 3."""
    number = sizes.num_layers
    nested = config.values.get("eagle_config") or {}
    named = nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    layers = named or [1, number // 2 - 1, number - 4]
    if not isinstance(layers, list) or not all(type(i) is int and 0 <= i < number for i in layers):
        raise config.unfit(f"it reads the layers {layers} of a target that has {number} layers")
    return tuple(layers)


def _read_config(folder: Path) -> dict[str, Any]:
    missing = f"There is no EAGLE head at {folder} ({PUBLISHED_CONFIG} is missing)."
    return read_object(folder / PUBLISHED_CONFIG, missing, "Fetch the head again.")


def _our_name(name: str) -> str:
    """The one layer is called layers.0 or midlayer; some files put `model.` before all."""
    name = name.removeprefix("model.")
    for layer in ("layers.0.", "midlayer."):
        if name.startswith(layer):
            return f"layer.{name.removeprefix(layer)}"
    return name


def _fused(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names of forward.heads.layer, products of one input as one."""
    alike = {
        "fuse.weight": "fc.weight",
        "fuse.bias": "fc.bias",
        "output.weight": f"{ATTENTION}.o_proj.weight",
        "down.weight": f"{FEED_FORWARD}.down_proj.weight",
        "feed_forward_norm.weight": "layer.post_attention_layernorm.weight",
        "embedding_norm.weight": "layer.input_layernorm.weight",
        "hidden_norm.weight": "layer.hidden_norm.weight",
        "final_norm.weight": "norm.weight",
        "speech.weight": "lm_head.weight",
    }
    made = {ours: held[theirs] for ours, theirs in alike.items() if theirs in held}
    sides = [f"{ATTENTION}.{side}_proj" for side in "qkv"]
    made["qkv.weight"] = torch.cat([held[f"{side}.weight"] for side in sides])
    gates = [f"{FEED_FORWARD}.{side}_proj.weight" for side in ("gate", "up")]
    made["gate_up.weight"] = torch.cat([held[gate] for gate in gates])
    if any(f"{side}.bias" in held for side in sides):
        made["qkv.bias"] = torch.cat([_bias(held, side) for side in sides])
    return made


def _bias(held: Mapping[str, torch.Tensor], side: str) -> torch.Tensor:
    weight = held[f"{side}.weight"]
    return held.get(f"{side}.bias", weight.new_zeros(weight.shape[0]))


def _embedding(
    table: torch.Tensor | None, target: LanguageModel
) -> tuple[Callable[[Sequence[int]], torch.Tensor], int]:
    """The target's embedding where the head has none or the same; and the bytes of its own."""
    if table is None or torch.equal(table, target.embed(range(target.vocab_size))):
        return target.embed, 0

    def embed(ids: Sequence[int]) -> torch.Tensor:
        return F.embedding(torch.tensor(ids, device=table.device), table)

    return embed, table.numel() * table.element_size()


def _speech(
    parts: Mapping[str, Rows],
    maps: Mapping[str, torch.Tensor],
    target: LanguageModel,
    config: _Config,
) -> Speech:
    """Raises ModelError for a map that leads outside the target's vocabulary."""
    own = parts.get("speech")
    if own is None:
        return Speech(target.head, target.vocab_size)
    size, vocab_size = config.whole("draft_vocab_size", target.vocab_size), target.vocab_size
    offsets = maps.get("d2t")
    if offsets is None:
        if size != vocab_size:
            raise config.unfit(
                f"it says {size} of {vocab_size} tokens and has no d2t to tell which"
            )
        return Speech(own, vocab_size)
    if offsets.shape != (size,) or offsets.dtype not in (torch.int64, torch.int32):
        raise config.unfit(f"its d2t is {offsets.dtype} {list(offsets.shape)}, not int64 [{size}]")
    ids = torch.arange(size) + offsets.long()
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(set(ids.tolist())) != size:
        raise config.unfit(f"its d2t does not name {size} different tokens of the {vocab_size}")
    return Speech(own, vocab_size, ids.to(target.device))
