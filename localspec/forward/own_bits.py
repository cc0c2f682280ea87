"""Models whose files hold 4-bit weights, with those very weights.

Contract: `in_its_own_bits` builds a transformers module whose packed layers are Int4Linear and all
others dense, without ever holding the packed ones in full precision. On a processor, for the
families that the native decoder takes.

Not here: reading the files (stored), the layers (grouped), other ways to 4 bits (weights).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from localspec.errors import ModelError
from localspec.formats.stored import stored_of
from localspec.forward.from_transformers import FAMILIES
from localspec.forward.grouped import Int4Linear
from localspec.forward.stored import stored_weights

MOST_REPACKING_ERROR = 0.05  # of a layer's output, by its norm: rounded scales are near 0.002


def in_its_own_bits(
    name: str,
    config: Mapping[str, Any],
    known: Any,
    files: Sequence[Path],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """The module with the 4-bit layers of its files as they are; None where the files hold none or
    the device, the family or the layout has no kernel for them. known: the config as transformers
    reads it. Raises ModelError."""
    from transformers import AutoModelForCausalLM

    stored = stored_of(config, name)
    if stored is None or device.type != "cpu" or known.model_type not in FAMILIES:
        return None
    weights = stored_weights(config, files, dtype, keeps=True)
    if weights is None or not weights.kept:
        return None
    del known.quantization_config
    with torch.device("meta"):
        module: Any = AutoModelForCausalLM.from_config(
            known, dtype=dtype, attn_implementation="sdpa"
        )
    for place, weight in weights.kept.items():
        path = place.removesuffix(".weight")
        layer = Int4Linear(weight, weights.dense.pop(f"{path}.bias", None), dtype)
        if not layer.error <= MOST_REPACKING_ERROR:  # NaN too
            raise ModelError(
                f"The 4-bit kernel of this machine answers {layer.error:.1%} off for {path} in "
                f"{name}. Load it with --dtype bfloat16."
            )
        module.set_submodule(path, layer)
    module.load_state_dict(weights.dense, strict=False, assign=True)
    module.tie_weights()
    module.model.rotary_emb = type(module.model.rotary_emb)(known)  # computed, in no file
    missing = [place for place, tensor in module.named_parameters() if tensor.is_meta]
    if missing:
        raise weights_missing(name, missing)
    return module.eval().requires_grad_(False)


def weights_missing(name: str, names: list[str]) -> ModelError:
    return ModelError(
        f"{len(names)} weights are missing from {name}, first {names[0]}. Fetch the model again."
    )
