"""Reads modules for multi-token prediction: of our own format, or as a model's own files hold them.

A shipped module is a decoder layer of the target's kind with a projection and three norms. It is
built by the builder of the target, so that it is kept in the target's precision and read from every
format of weights. What the parts are called, and whether the state or the embedding stands first,
is told by the names of the tensors (`LAYOUTS`). Other layouts are refused by name.

Source: names and order as in transformers' MtpModel, llama.cpp's conversion of Qwen3.5, and vLLM's
mimo_mtp.py, deepseek_mtp.py and qwen3_next_mtp.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from localspec.core.errors import ModelError
from localspec.formats.decoder_settings import DecoderSettings
from localspec.formats.folder_files import (
    ModelFolder,
    check_folder,
    gguf_file,
    weight_files,
)
from localspec.formats.gguf_file import read_header
from localspec.formats.gguf_module import module_near, require_module_of
from localspec.formats.gguf_settings import tensor_names
from localspec.formats.head_folder import is_published
from localspec.formats.rotation_settings import NotNative
from localspec.formats.safetensors_file import tensor_shapes as tensor_shapes_in
from localspec.forward.builder import Builder
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import HeadParts
from localspec.forward.heads.ends import output_of_target
from localspec.forward.heads.files import Shapes, TargetSizes, read_head, take
from localspec.forward.heads.layer import BlockLayer
from localspec.forward.heads.mtp import KIND, MtpNetwork, read_shape, tensor_shapes
from localspec.forward.load import native_settings
from localspec.forward.model import LanguageModel
from localspec.forward.rotation import frequencies_of
from localspec.forward.tensor_names import TensorNames
from localspec.weights.precision import Bits, precision_for
from localspec.weights.source import WeightSource, open_source
from localspec.weights.stored import Dense, Weight


@dataclass(frozen=True)
class MtpLayout:
    """The names of a shipped module's parts. begin: of all its tensors. layer: of those of its
    decoder layer, after that. is_hidden_first: the state stands before the embedding in `input`."""

    begin: str
    layer: str
    input: str
    hidden_norm: str
    token_norm: str
    final_norm: str
    is_hidden_first: bool = False

    @property
    def mark(self) -> str:
        """The tensor that tells this layout."""
        return f"{self.begin}{self.input}.weight"

    @property
    def norms(self) -> dict[str, str]:
        """The published norms by the names of MtpNetwork's."""
        names = ("hidden_norm", "token_norm", "final_norm")
        return {name: getattr(self, name) for name in names}


# By the family that is known for it.
LAYOUTS = {
    "Qwen3.5": MtpLayout(
        "mtp.", "layers.0.", "fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm"
    ),
    "MiMo-7B": MtpLayout(
        "model.mtp_layers.0.",
        "",
        "input_proj",
        "hidden_layernorm",
        "token_layernorm",
        "final_layernorm",
        is_hidden_first=True,
    ),
}
# A part of a tensor's name -> the layout it belongs to, of those that are not read.
OTHER_LAYOUTS = {
    ".eh_proj.": "DeepSeek-V3 or GLM-4.5",
    "mtp.fc_": "Qwen4",
    "mtp_block.": "ERNIE 4.5",
    "mtp.layers.": "another family",
    "model.mtp_layers.": "another family",
}
REMEDY = f"Train one for this target: python -m localspec train {KIND}."


def read_mtp(folder: Path, target: LanguageModel, bits: Bits | None = None) -> HeadParts:
    """Return the module in `folder`, of our own format or shipped with a model.

    bits: see load_model; a module of our own format stays whole. Raises ModelError."""
    if is_published(folder):
        return _read_shipped(_with_module(check_folder(folder)), target, bits)
    sizes, dtype = TargetSizes.of(target), target.embed([0]).dtype
    files = read_head(folder, KIND, sizes)
    shape = read_shape(files.settings, sizes)
    wanted = tensor_shapes(shape)
    tensors = take(files.tensors, wanted, folder.name, dtype, target.device)
    return HeadParts.sharing(target, shape, MtpNetwork, tensors)


def ships_mtp(folder: Path) -> bool:
    """Return True if a model's files hold a module of any layout; False where the folder cannot be
    read, for loading the model will say why."""
    try:
        names = _names_in(folder)
    except ModelError:
        return False
    parts = (*(layout.mark for layout in LAYOUTS.values()), *OTHER_LAYOUTS)
    return any(part in name for name in names for part in parts)


def _names_in(folder: Path) -> list[str]:
    """The names of all tensors, as the headers of a model's files say them. Raises ModelError."""
    file = gguf_file(folder)
    if file is not None:
        near = module_near(file)
        headers = [read_header(each) for each in (file, near) if each is not None]
        return [name for header in headers for name in tensor_names(header).values()]
    return [name for file in weight_files(folder) for name in tensor_shapes_in(file)]


def _with_module(found: ModelFolder) -> ModelFolder:
    """The same with the file of its module alone, where the module is in one. Raises ModelError for
    the module of another model."""
    file = gguf_file(found.path)
    near = None if file is None else module_near(file)
    if file is None or near is None:
        return found
    require_module_of(file, near)
    return replace(found, files=(near,))


def _read_shipped(found: ModelFolder, target: LanguageModel, bits: Bits | None) -> HeadParts:
    """Raises ModelError."""
    precision = precision_for(found.stored, bits, target.embed([0]).dtype, target.device)
    source = _FiniteSource(open_source(found, precision.dtype), found.name)
    layout, begin = _layout_of(source.names, found.name)
    actual = _named(layout, begin, source.names)
    settings = _settings_of(found, target, actual)
    width = settings.hidden_size
    others: Shapes = {f"{norm}.weight": (width,) for norm in layout.norms.values()}
    others[f"{layout.input}.weight"] = (width, 2 * width)
    title = f"{found.name}'s multi-token-prediction module"
    names = TensorNames.of_layers(settings, actual, others, title)
    _require_all_read(names, found.name)
    builder = Builder(settings, source, names, precision, target.cache.shape.capacity)
    block = builder.block(0)
    assert block.attention_norm is not None, "these families have a norm before attention"
    norms = {ours: builder.norm(name) for ours, name in layout.norms.items()}
    product = builder.product(layout.input)
    parts = {**norms, "attention_norm": block.attention_norm, "input": product}
    frequencies, rope_scale = frequencies_of(settings.rotations[0])
    return HeadParts(
        layers=(LAST,),
        network=MtpNetwork(BlockLayer(block), parts, layout.is_hidden_first),
        output=output_of_target(target),
        embed=target.embed,
        frequencies=frequencies.to(target.device),
        rope_scale=rope_scale,
        dtype=precision.dtype,
        body_bytes=block.weight_bytes
        + product.weight_bytes
        + sum(norm.weight_bytes for norm in norms.values()),
    )


def _layout_of(names: Collection[str], model: str) -> tuple[MtpLayout, str]:
    """The layout of a module, and how all its names begin. Raises ModelError where there is none
    that is read."""
    for layout in LAYOUTS.values():
        marked = next((name for name in names if name.endswith(layout.mark)), None)
        if marked is not None:
            return layout, marked.removesuffix(f"{layout.input}.weight")
    for part, family in OTHER_LAYOUTS.items():
        for name in names:
            if part in name:
                raise ModelError(
                    f"{model} ships a multi-token-prediction module of the layout of {family} "
                    f"({name}), which is not run here; those of {' and '.join(LAYOUTS)} are. "
                    f"{REMEDY}"
                )
    raise ModelError(f"{model} ships no multi-token-prediction module. {REMEDY}")


def _named(layout: MtpLayout, begin: str, names: Collection[str]) -> dict[str, str]:
    """The names here of a module's tensors, those of its layer as of a first one, and in the
    files."""
    outer = {f"{part}.weight" for part in (layout.input, *layout.norms.values())}
    actual = dict[str, str]()
    for name in names:
        own = name.removeprefix(begin)
        if own != name and own not in outer and own.startswith(layout.layer):
            actual[f"layers.0.{own.removeprefix(layout.layer)}"] = name
        elif own != name:
            actual[own] = name
    return actual


def _settings_of(
    found: ModelFolder, target: LanguageModel, actual: Collection[str]
) -> DecoderSettings:
    """Those of a decoder of one layer with full attention, as the model has them. Raises
    ModelError for the module of another target."""
    try:
        settings = native_settings(found, target.cache.shape.capacity)
    except NotNative as reason:
        raise ModelError(
            f"The multi-token-prediction module of {found.name} runs on the native decoder only. "
            f"{reason} {REMEDY}"
        ) from reason
    made_for = TargetSizes(settings.hidden_size, settings.vocab_size, settings.num_layers)
    sizes = TargetSizes.of(target)
    for name, size in asdict(sizes).items():
        if getattr(made_for, name) != size:
            raise ModelError(
                f"The multi-token-prediction module in {found.name} was made for a target with "
                f"{name} {getattr(made_for, name)}; this one has {size}. Use the module of this "
                "target's own files."
            )
    has_windows = any(window is not None for window in settings.windows)
    if has_windows or found.config.get("use_sliding_window"):
        raise ModelError(
            f"The multi-token-prediction module in {found.name} may attend to a window only, which "
            f"its files do not tell. {REMEDY}"
        )
    delta, mixture = settings.delta, settings.mixture
    like = next(
        layer
        for layer in reversed(range(settings.num_layers))
        if delta is None or not delta.layers[layer]
    )
    turn = settings.turns[like]
    has_experts = "layers.0.mlp.gate.weight" in actual
    return replace(
        settings,
        num_layers=1,
        layers=(settings.layers[like],),
        windows=(None,),
        turns=(None if turn is None else 0,),
        rotations=settings.rotations if turn is None else (settings.rotations[turn],),
        delta=None,
        mixture=None if mixture is None else replace(mixture, layers=(has_experts,)),
        has_qkv_bias="layers.0.self_attn.q_proj.bias" in actual,
    )


def _require_all_read(names: TensorNames, model: str) -> None:
    """Raise ModelError for a tensor that no part of a module reads."""
    unread = sorted(names.unread(list(names.actual.values())))
    if unread:
        raise ModelError(
            f"The multi-token-prediction module in {model} holds {unread[0]}, which no module here "
            f"has. {REMEDY}"
        )


class _FiniteSource:
    """A source that refuses values which are not finite, such as a damaged file holds."""

    def __init__(self, source: WeightSource, model: str) -> None:
        self._source, self._model = source, model

    @property
    def names(self) -> frozenset[str]:
        return self._source.names

    def read(self, name: str) -> Weight:
        """See WeightSource."""
        return self._checked(self._source.read(name), name)

    def entries(self, name: str) -> Iterator[Weight]:
        """See WeightSource."""
        yield from (self._checked(weight, name) for weight in self._source.entries(name))

    def _checked(self, weight: Weight, name: str) -> Weight:
        if isinstance(weight, Dense) and not bool(weight.values.isfinite().all()):
            raise ModelError(f"The head in {self._model}: {name} holds values that are not finite.")
        return weight
