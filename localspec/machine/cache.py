"""Models that are whole on this machine, in the hub's cache. Asks nobody, loads nothing.

Contract: a repository is listed when its newest snapshot holds everything a model needs
(machine.sources.missing_part); one that lacks a file is not listed as ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from localspec.machine.sources import missing_part


@dataclass(frozen=True)
class CachedModel:
    """folder: the snapshot to load from. num_bytes: on disk."""

    id: str
    folder: Path
    num_bytes: int


def cached_models() -> list[CachedModel]:
    """By name. An absent or unreadable cache is an empty one."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, OSError):
        return []
    models = []
    for repo in found.repos:
        if repo.repo_type != "model":
            continue
        named = [one for one in repo.revisions if "main" in one.refs]
        newest = max(named or repo.revisions, key=lambda one: one.last_modified, default=None)
        if newest is not None and missing_part(newest.snapshot_path) is None:
            models.append(CachedModel(repo.repo_id, newest.snapshot_path, newest.size_on_disk))
    return sorted(models, key=lambda one: one.id.lower())
