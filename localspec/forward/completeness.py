"""Compares the tensors of a model's files with the weights of the module that was made of them.

A weight that the files lack is an error. A tensor that the module does not take is an error if it
belongs to a part of the module, such as a bias, since every reply would be computed without it.
Other such tensors are reported, unless they are known to be needless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
UNREAD = "unread_tensors"  # attribute of a module: names of those that are reported


def weights_missing(name: str, names: list[str]) -> ModelError:
    return ModelError(
        f"{name} lacks some of its weights: {len(names)}, first {names[0]}. Fetch the model again."
    )


def require_every_weight(found: ModelFolder, module: Any, info: Mapping[str, Any]) -> None:
    """Raise ModelError for weights that transformers would fill with noise or leave out.
    info: what its loading says of the names in the files."""
    if missing := sorted(info["missing_keys"]):
        raise weights_missing(found.name, missing)
    if unlike := sorted(info["mismatched_keys"]):
        name, held, wanted = unlike[0]
        raise ModelError(
            f"{len(unlike)} weights of {found.name} have another shape than its config.json says, "
            f"first {name}: {list(held)}, not {list(wanted)}. Fetch the model again."
        )
    require_read(found, module, info["unexpected_keys"])


def require_read(found: ModelFolder, module: Any, names: Iterable[str]) -> None:
    """Raise ModelError if a part of the module lacks one of these tensors of its files. The others
    are kept for `unread_notice`. names: of tensors that the module does not take."""
    needless = [NEEDLESS.pattern, *(module._keys_to_ignore_on_load_unexpected or ())]
    is_needless = re.compile("|".join(f"({pattern})" for pattern in needless)).search
    unread = sorted(
        name for name in names if not is_needless(name) and set(TOWERS).isdisjoint(name.split("."))
    )
    parts = dict(module.named_modules())
    lost = [name for name in unread if _belongs(name, parts) and not _is_zero_bias(found, name)]
    if lost:
        raise ModelError(
            f"{found.name} holds {counted(len(lost), 'tensor')} that a {module.config.model_type} "
            f"model with its config.json does not read, first {lost[0]}. Its replies would be "
            "computed without them. Fetch the model again, or choose another copy of it."
        )
    setattr(module, UNREAD, [name for name in unread if not _belongs(name, parts)])


def unread_notice(module: Any) -> str | None:
    """Return a sentence on the tensors of the files that nothing reads, None without any."""
    names = getattr(module, UNREAD, ())
    if not names:
        return None
    return (
        f"The files of this model hold {counted(len(names), 'tensor')} that nothing reads, "
        f"first {names[0]}. Replies are computed without them."
    )


def _belongs(name: str, parts: Mapping[str, Any]) -> bool:
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
