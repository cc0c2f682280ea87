"""What the files of a model hold and the model does not read, and the other way round.

A weight that the files lack is an error. A tensor that the model does not read is an error if it
belongs to a part of the model, such as a bias, since every reply would be computed without it.
Other such tensors are reported, unless they are known to be needless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from safetensors import safe_open

from localspec.core.errors import ModelError
from localspec.core.units import counted
from localspec.formats.folder_files import ModelFolder
from localspec.formats.native import TOWERS

# Tables that are computed anew; modules that only draft; scales of what passes through a layer or
# is cached, which is kept in full precision here; state of the library that trained the model.
NEEDLESS = re.compile(
    r"rotary_emb\.inv_freq|(^|\.)position_ids$|(^|\.)mtp|(^|\.)nextn|(^|\.)medusa|(^|\.)eagle"
    r"|\.([kqv]|kv|input|output|activation)_scale$|_extra_state$"
)


def weights_missing(name: str, names: list[str]) -> ModelError:
    return ModelError(
        f"{name} lacks some of its weights: {len(names)}, first {names[0]}. Fetch the model again."
    )


def shape_error(
    name: str, tensor: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> ModelError:
    return ModelError(
        f"The weights of {name} have another shape than its config.json says, first {tensor}: "
        f"{list(shape)}, not {list(wanted)}. Fetch the model again."
    )


def unread_of_module(found: ModelFolder, module: Any, info: Mapping[str, Any]) -> str | None:
    """Return what `unread_notice` says of a module that transformers loaded.

    info: what its loading says of the names in the files. Raises ModelError for weights that
    transformers would fill with noise or leave out."""
    if missing := sorted(info["missing_keys"]):
        raise weights_missing(found.name, missing)
    if unlike := sorted(info["mismatched_keys"]):
        name, held, wanted = unlike[0]
        raise ModelError(
            f"{len(unlike)} weights of {found.name} have another shape than its config.json says, "
            f"first {name}: {list(held)}, not {list(wanted)}. Fetch the model again."
        )
    ignored = [re.compile(each) for each in module._keys_to_ignore_on_load_unexpected or ()]
    names = [
        name for name in info["unexpected_keys"] if not any(each.search(name) for each in ignored)
    ]
    parts = dict(module.named_modules())
    return unread_notice(found, names, lambda name: _is_in_module(name, parts))


def unread_notice(
    found: ModelFolder, names: Iterable[str], is_in_model: Callable[[str], bool]
) -> str | None:
    """Return a sentence on tensors of the files that nothing reads; None without any.

    names: of what the model does not read. is_in_model: whether a name belongs to a part of it.
    Raises ModelError for one that does."""
    unread = sorted(
        name
        for name in names
        if not NEEDLESS.search(name) and set(TOWERS).isdisjoint(name.split("."))
    )
    lost = [name for name in unread if is_in_model(name) and not _is_zero_bias(found, name)]
    if lost:
        family = (found.config.get("text_config") or found.config).get("model_type")
        raise ModelError(
            f"{found.name} holds {counted(len(lost), 'tensor')} that a {family} model with its "
            f"config.json does not read, first {lost[0]}. Its replies would be computed without "
            "them. Fetch the model again, or choose another copy of it."
        )
    others = [name for name in unread if not is_in_model(name)]
    if not others:
        return None
    return (
        f"The files of this model hold {counted(len(others), 'tensor')} that nothing reads, "
        f"first {others[0]}. Replies are computed without them."
    )


def _is_in_module(name: str, parts: Mapping[str, Any]) -> bool:
    """True if the nearest part of the module on the way to the name lies in a layer, or has weights
    of its own."""
    path = name.rpartition(".")[0]
    while path and path not in parts:
        path = path.rpartition(".")[0]
    is_in_layer = any(word.isdigit() for word in path.split("."))
    return is_in_layer or any(True for _ in parts[path].parameters(recurse=False))


def _is_zero_bias(found: ModelFolder, name: str) -> bool:
    """True for a bias of zeros, which some programs that quantise write for each layer."""
    if not name.endswith(".bias"):
        return False
    for file in (file for file in found.files if file.suffix == ".safetensors"):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118  (no mapping)
                return not bool(opened.get_tensor(name).any())
    return False
