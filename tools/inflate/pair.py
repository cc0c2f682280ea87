"""Benchmark pairs of any size without a download: a trained pair, enlarged.

Contract: `inflate` writes `out/target` and `out/draft`, model folders like any other, whose text
and acceptance are the source pair's while the work is that of the size asked for; beside them
`inflated.json` says what they are. Weights keep the source's precision and are written shard by
shard, so memory stays at about one shard. Either the whole folder appears or none of it.

Sizes are shapes; the vocabulary and the context stay the source's, so a model has fewer
parameters than its namesake by what a larger vocabulary would take. Drafts hold 6 to 7 % of
their target's weights. From the demo pair (256 wide, heads of 64) no weight of 350M and 1B is
rounded in bf16; what is left is the kernels' own rounding (365 of 368 greedy tokens the same as
the demo target's). 8B has heads of 128: queries are multiplied by the square root of 2 and
rounded. Its 15 GB were written in 88 s within 1.5 GiB of memory on two busy cores.

noise disturbs the draft alone: each weight of its last norm is multiplied by 1 + noise * N(0, 1).
For the demo pair, over 742 greedy tokens of 24 of our own prompts and three seeds, the share of
the draft's best tokens that are the target's is .66 at noise 0, .63 at 0.5, .57 at 1, .46 at 1.5,
.30 at 2 and .05 at 4 (fp32; at temperature 0.7 the overlap of the two distributions is the same
within .02).

Not here: how weights grow (enlarge).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, floor
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from localspec.core.backend import Report
from localspec.core.config import nearest
from localspec.core.errors import ConfigError
from localspec.core.units import gib
from localspec.formats.folder_files import check_folder, weight_files
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.shapes import ModelShape
from tools.inflate.enlarge import Enlargement

MAX_SHARD_BYTES = 1024**3
COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
SPARE_DISK_BYTES = 256 * 1024**2
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Widths:
    """What makes a decoder as large as it is."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    def of(self, source: ModelShape) -> ModelShape:
        """The source at these widths."""
        return replace(source, counted=None, **vars(self))


@dataclass(frozen=True)
class Pair:
    target: Widths
    draft: Widths


SIZES = {
    # 346 M parameters, draft 25 M: few layers, since eager torch pays for layers, not bytes
    "350M": Pair(
        Widths(24, 1024, 16, 8, 64, 3584),
        Widths(2, 1024, 16, 8, 64, 2048),
    ),
    # the layers of Llama 3.2 1B
    "1B": Pair(
        Widths(16, 2048, 32, 8, 64, 8192),
        Widths(4, 1024, 16, 8, 64, 4096),
    ),
    # the layers of Llama 3.1 8B, and half of those of Llama 3.2 1B
    "8B": Pair(
        Widths(32, 4096, 32, 8, 128, 14336),
        Widths(8, 2048, 32, 8, 64, 8192),
    ),
}


@dataclass(frozen=True)
class Order:
    """One model to write. noise: for a draft, see the module."""

    role: str
    source: Path
    widths: Widths
    noise: float
    seed: int


def inflate(
    source_target: Path,
    source_draft: Path | None,
    size: str,
    out: Path,
    noise: float,
    seed: int,
    report: Report,
) -> dict[str, Any]:
    """Write the pair; returns what was written, as plain data. Raises ConfigError, ModelError."""
    pair = _pair_of(size)
    if not 0.0 <= noise < float("inf"):
        raise ConfigError(f"--noise is {noise}, but it must be 0 or more.")
    orders = [Order("target", source_target, pair.target, 0.0, seed)]
    if source_draft is not None:
        orders.append(Order("draft", source_draft, pair.draft, noise, seed + 1))
    plans = [(order, _enlargement(order)) for order in orders]
    needed_bytes = sum(_bytes_of(order, plan) for order, plan in plans)
    with _written_whole(out, needed_bytes) as folder:
        made = {order.role: _write(order, plan, folder / order.role, report)
                for order, plan in plans}  # fmt: skip
        result = {"size": size, "noise": noise, "seed": seed, "draft": None, **made}
        _write_json(folder / "inflated.json", result)
    return {**result, "out": str(out)}


def _pair_of(size: str) -> Pair:
    if size not in SIZES:
        raise ConfigError(
            f"There is no size '{size}'. Did you mean '{nearest(size, SIZES)}'? "
            f"Sizes: {', '.join(SIZES)}."
        )
    return SIZES[size]


def _enlargement(order: Order) -> Enlargement:
    source = shape_from_folder(order.source)
    return Enlargement(source, order.widths.of(source), order.seed, order.noise)


def _bytes_of(order: Order, plan: Enlargement) -> int:
    return plan.wanted.num_params * BYTES_OF[_dtype_of(check_folder(order.source).config)]


def _dtype_of(config: dict[str, Any]) -> str:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in BYTES_OF:
        raise ConfigError(
            f"The model to enlarge is in {dtype}. Choose one in float32, bfloat16 or float16."
        )
    return dtype


def _write(order: Order, plan: Enlargement, folder: Path, report: Report) -> dict[str, Any]:
    from transformers import AutoConfig  # its import takes seconds

    raw = check_folder(order.source).config
    full = AutoConfig.from_pretrained(str(order.source), local_files_only=True).to_dict()
    config = plan.config(raw, full)
    folder.mkdir()
    for name in COPIED:
        if (order.source / name).is_file():
            shutil.copyfile(order.source / name, folder / name)
    _write_json(folder / "config.json", config)
    num_bytes = _write_weights(order, plan, folder, report)
    return {
        "source": order.source.resolve().name,
        "num_params": shape_from_folder(folder).num_params,
        "num_bytes": num_bytes,
        **vars(order.widths),
        "is_exact": plan.is_exact,
        "factors": plan.factors,
    }


def _write_weights(order: Order, plan: Enlargement, folder: Path, report: Report) -> int:
    """Shards of at most MAX_SHARD_BYTES (a single larger tensor apart) and their index."""
    read, names = _opened(order.source)
    shards = list[list[str]]()
    for shard in _shards(plan.tensors(read, names), MAX_SHARD_BYTES):
        shards.append(list(shard))
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        report(f"{order.role}: file {len(shards)} written, up to {shards[-1][-1]}")
        del shard  # or it would live until the next one is whole
    places = dict[str, str]()
    for number, shard_names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        (folder / f"{number}.part").rename(folder / file)
        places |= dict.fromkeys(shard_names, file)
    total = _bytes_of(order, plan)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)
    return total


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard, used = dict[str, Tensor](), 0
    for name, tensor in tensors:
        if shard and used + tensor.nbytes > max_bytes:
            yield shard
            shard, used = {}, 0
        shard[name] = tensor.contiguous()
        used += tensor.nbytes
    yield shard


def _opened(folder: Path) -> tuple[Callable[[str], Tensor], frozenset[str]]:
    """(read a tensor by name, the names there are) of a model folder; nothing is held."""
    places = dict[str, Path]()
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    return read, frozenset(places)


@contextmanager
def _written_whole(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, or is removed."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there and not empty. Give another folder with --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if needed_bytes + SPARE_DISK_BYTES > free_bytes:
        raise ConfigError(
            f"The pair takes {gib(needed_bytes, ceil)}, but the disk of {out.parent} has "
            f"{gib(free_bytes, floor)} free. Choose a smaller size or another disk with --out."
        )
    unfinished = out.with_name(f".{out.name}.unfinished")
    if unfinished.exists():  # of a run that was killed, or of one that still writes
        raise ConfigError(
            f"{unfinished} is left from a run that did not end, or belongs to one under way. "
            "Remove it, or give another folder with --out."
        )
    unfinished.mkdir()
    try:
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
