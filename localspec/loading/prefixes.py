"""What the caches of loaded models keep of the texts that they read: how much, where, and by what
name, so that a model that differs in anything finds nothing of another one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from localspec import __version__
from localspec.formats.fingerprint import fingerprint
from localspec.formats.prefix_files import PrefixFiles
from localspec.machine.hardware import probe
from localspec.machine.memory import prefix_bytes

if TYPE_CHECKING:
    from localspec.drafters.parts import Parts
    from localspec.forward.model import LanguageModel
    from localspec.forward.prefix_store import PrefixStore
    from localspec.loading.placement import Place
    from localspec.machine.model import Model


def keep_texts(
    source: Model, parts: Parts, place: Place, kernels: str, folder: Path | None
) -> PrefixStore:
    """Let the caches of the target and of its draft models keep what they read. folder: of what is
    kept on the disk; None for nothing."""
    from localspec.forward.prefix_store import PrefixStore

    files = None if folder is None else PrefixFiles(folder)
    store = PrefixStore(prefix_bytes(probe()), files)
    _attach(store, parts.target, source.folder, place, kernels)
    is_foreign = parts.draft_code == "incompatible_vocabulary"
    if parts.draft is not None and source.draft is not None:
        _attach(store, parts.draft, source.draft.folder, place, kernels)
    if parts.foreign is not None:
        named = source.drafts if is_foreign else source.foreign
        if named and named[0].path is not None:
            _attach(store, parts.foreign.model, named[0].path, place, kernels)
    return store


def _attach(
    store: PrefixStore, model: LanguageModel, folder: Path, place: Place, kernels: str
) -> None:
    """Give a model's cache its view of the store. Its name holds all that the numbers depend on:
    weights, precision, device, kernels and programs. The cache adds its layout and context."""
    import torch

    from localspec.forward.cache import KVCache
    from localspec.forward.prefixes import Prefixes

    if type(model.cache) is not KVCache:  # a state of transformers is in no slots
        return
    parts = (
        fingerprint(folder),
        place.precision,
        str(model.cache.dtype),
        f"{model.device} {place.hardware.device_name}",
        f"experts in RAM: {place.experts_in_ram}",
        kernels,
        f"torch {torch.__version__}",
        f"localspec {__version__}",
    )
    model.cache.prefixes = Prefixes(store, " | ".join(parts))
