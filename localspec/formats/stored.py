"""What `quantization_config` in a config.json says of how the weights are kept.

Contract: `stored_of` gives the way of keeping as data, None where a model is kept as it computes.
A way that cannot be read here is a ModelError that names it and what would do. Pure, of the config
alone.

Not here: reading the weights (weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localspec.core.errors import ModelError
from localspec.core.units import enumerated

GGUF_IN_GROUPS = ("Q4_0", "Q4_K")  # of 32 weights of 4 bits
GROUP_SIZES = (32, 64, 128, 256)  # of torch's kernels for 4 bits in groups
WORD = 32  # bits of a number that holds packed weights
PACKED_BITS = (2, 4, 8)  # of a weight, so that whole weights fill a WORD
OF_LAYERS = ("bits", "group_size", "desc_act", "sym")  # what GPTQ may say of a layer alone
AWQ_NAMES = (("bits", "w_bit"), ("group_size", "q_group_size"))  # the second ones are AutoAWQ's
COMPRESSED_FORMATS = {
    "pack-quantized": "int",
    "int-quantized": "int",
    "float-quantized": "float",
    "naive-quantized": "float",
}
INSTEAD = (
    "Fetch the model itself, or its copy as GGUF, AWQ, GPTQ, compressed-tensors, FP8 or "
    "bitsandbytes."
)

ONE_PRECISION = f"Layers of different bits are read from GGUF files only. {INSTEAD}"


@dataclass(frozen=True)
class Stored:
    """method: by its name in the config. title: for a person. is_unpacked: whether the weights are
    unpacked while loading, so that the model takes the memory of its full precision. stays:
    the precision of what is kept as it is. per_word: weights in one number of a packed
    tensor. group_size: of 4-bit weights that torch has a kernel for, 0 for others;
    num_in_groups: how many there are, None for all linear layers. is_narrow: whether fp16
    holds the weights."""

    method: str
    title: str
    is_unpacked: bool = True
    stays: Literal["4-bit", "8-bit"] | None = None
    per_word: int = 1
    group_size: int = 0
    num_in_groups: int | None = None
    is_narrow: bool = False

    @property
    def is_in_4_bits(self) -> bool:
        """Whether whole numbers of 4 bits are kept, with a kernel for them or without."""
        return self.group_size > 0 or self.per_word == WORD // 4


def stored_of(config: Mapping[str, Any], name: str) -> Stored | None:
    """config: of config.json. name: of the model, for the message. Raises ModelError."""
    given = config.get("quantization_config") or config.get("quantization")  # MLX's name
    if not isinstance(given, Mapping) or not given:
        return None
    is_mlx = "quantization" in config and "quant_method" not in given
    method = "mlx" if is_mlx else str(given.get("quant_method") or "").lower()
    try:
        if method not in _READ:
            known = f"the format {method}" if method else "a format that its config does not name"
            raise _Unread(f"in {known}, which is not read here")
        return _READ[method](given)
    except _Unread as error:
        raise ModelError(f"{name} keeps its weights {error}. {INSTEAD}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"The quantization_config of {name} ({method}) cannot be understood ({error!r}). Fetch "
            "its config.json again."
        ) from error


class _Unread(Exception):
    """How the weights are kept, as the rest of a sentence."""


def _gguf(given: Mapping[str, Any]) -> Stored:
    title, count = f"GGUF ({', '.join(given['kinds'])})", int(given["num_in_groups"])
    is_narrow = {*given["kinds"]} <= {"F16", "BF16"}
    size = 32 if count else 0
    return Stored("gguf", title, group_size=size, num_in_groups=count, is_narrow=is_narrow)


def _awq(given: Mapping[str, Any]) -> Stored:
    version = str(given.get("version", "gemm")).lower()
    bits, size = (int(given.get(new) or given[old]) for new, old in AWQ_NAMES)
    if bits != 4 or version != "gemm":
        raise _refused(f"AWQ of {bits} bits in the layout {version}", "4 bits in gemm")
    return Stored("awq", f"AWQ, 4-bit, {_groups(size)}", per_word=8, group_size=_kept(size))


def _gptq(given: Mapping[str, Any]) -> Stored:
    layout = given.get("checkpoint_format", "gptq")
    if int(given["bits"]) not in PACKED_BITS or layout not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ of {given['bits']} bits in the layout {layout}", "4 or 8 bits")
    if given.get("pack_dtype", "int32") != "int32":
        raise _refused(f"GPTQ packed into {given['pack_dtype']}", "numbers packed into int32")
    order = ", inputs out of order" if given.get("desc_act") else ""
    bits, size = int(given["bits"]), int(given["group_size"])
    _require_one_kind(given, f"GPTQ, {bits}-bit, {_groups(size)}")
    kept = _kept(size) if bits == 4 and not order else 0
    title = f"GPTQ, {bits}-bit, {_groups(size)}{order}"
    return Stored("gptq", title, per_word=WORD // bits, group_size=kept)


def _require_one_kind(given: Mapping[str, Any], kind: str) -> None:
    """Raise _Unread if some layers are packed otherwise than the others. kind: of the others."""
    rules = dict(given.get("dynamic") or {})  # GPTQModel's: "-:" begins those that are not packed
    own = [each for pattern, each in rules.items() if not str(pattern).startswith("-:")]
    own += (given.get("extra_config") or {}).values()  # AutoRound's, whole ones with 16 bits
    for rule in own:
        changed = [name for name in OF_LAYERS if rule.get(name, given.get(name)) != given.get(name)]
        if changed and int(rule.get("bits", 0)) < 16:
            what = ", ".join(f"{name} {rule[name]}" for name in changed)
            raise _refused(f"{kind}, and some layers with {what}", "one kind for all layers")


def _compressed(given: Mapping[str, Any]) -> Stored:
    if (given.get("transform_config") or {}).get("config_groups"):  # also of what layers read
        raise _refused(
            "compressed-tensors that are rotated while they compute", "those as they are"
        )
    found = set()
    for group in given["config_groups"].values():
        weights = group["weights"]
        layout = str(group.get("format") or given.get("format"))
        kind, bits = str(weights.get("type", "int")), int(weights["num_bits"])
        if COMPRESSED_FORMATS.get(layout) != kind or bits not in (4, 8):
            raise _refused(f"compressed-tensors {layout} ({kind}{bits})", "int4, int8 or FP8")
        size = weights.get("group_size") or -1
        per_word = WORD // bits if layout == "pack-quantized" else 1
        found.add((kind, bits, int(size) if weights["strategy"] == "group" else 0, per_word))
    if len(found) > 1:
        kinds = enumerated(
            sorted(f"{kind}{bits}, {_groups(size)}" for kind, bits, size, _ in found)
        )
        raise _refused(f"compressed-tensors of several kinds ({kinds})", "one kind for all layers")
    if (given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refused("compressed-tensors that are sparse", "those that are dense")
    ((kind, bits, size, per_word),) = found
    title = f"compressed {f'{bits}-bit' if kind == 'int' else 'FP8'}"
    title += f", {_groups(size)}" if size else ""
    kept = _kept(size) if (kind, bits) == ("int", 4) else 0
    return Stored("compressed-tensors", title, per_word=per_word, group_size=kept)


def _fp8(given: Mapping[str, Any]) -> Stored:
    block = given.get("weight_block_size")
    sizes = "" if not block else f", blocks of {' x '.join(str(size) for size in block)}"
    return Stored(str(given["quant_method"]), f"FP8{sizes}")


def _bitsandbytes(given: Mapping[str, Any]) -> Stored | None:
    if given.get("load_in_8bit"):
        return Stored("bitsandbytes", "bitsandbytes, 8-bit", is_unpacked=False, stays="8-bit")
    if not given.get("load_in_4bit"):  # as transformers reads it: nothing is quantised
        return None
    kind = str(given.get("bnb_4bit_quant_type", "nf4"))
    return Stored("bitsandbytes", f"bitsandbytes, {kind}", is_unpacked=False, stays="4-bit")


def _mxfp4(given: Mapping[str, Any]) -> Stored:
    return Stored("mxfp4", "MXFP4", is_unpacked=False, per_word=2, is_narrow=True)


_READ: Mapping[str, Callable[[Mapping[str, Any]], Stored | None]] = {
    "gguf": _gguf,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}


def _kept(size: int) -> int:
    return size if size in GROUP_SIZES else 0


def _groups(size: Any) -> str:
    return f"groups of {size}" if int(size) > 0 else "one scale a row"


def _refused(what: str, instead: str) -> _Unread:
    return _Unread(f"as {what}; what is read here is {instead}")
