"""What the hub holds of a model and what of it is wanted: names, sizes and hashes at one commit.

Contract: `survey` asks the hub (it is the dry run: nothing is fetched or written) and pins the
commit it found; `wanted` is the allow list: weights as safetensors, JSON, chat templates and the
tokenizer's own files, from the top folder only. `held_bytes` says what of it is on this disk.

Not here: fetching (fetch), what a failure means (faults).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localspec.machine.sources import UNWANTED_FILES, WANTED_FILES


@dataclass(frozen=True)
class HubFile:
    """One file at one commit. etag: the name the hub's cache keeps it by; for a large file its
    SHA-256, for a small one the SHA-1 that git gives it. is_large: kept beside git (LFS)."""

    name: str
    num_bytes: int
    etag: str
    is_large: bool


@dataclass(frozen=True)
class Survey:
    """What a model consists of. files: the wanted ones, small ones first."""

    model_id: str
    commit: str
    files: tuple[HubFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model_id": self.model_id,
            "commit": self.commit,
            "files": [asdict(file) for file in self.files],
        }


def survey_from(data: dict[str, Any]) -> Survey:
    """The inverse of `as_dict`. Raises LookupError, TypeError for other data."""
    files = tuple(HubFile(**each) for each in data["files"])
    return Survey(str(data["model_id"]), str(data["commit"]), files)


def survey(model_id: str) -> Survey:
    """Ask the hub. Raises whatever its client raises (faults.fault_of puts that into words)."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    commit = str(api.model_info(model_id, revision="main").sha)
    listed = [
        HubFile(
            name=each.path,
            num_bytes=each.lfs.size if each.lfs is not None else each.size,
            etag=each.lfs.sha256 if each.lfs is not None else each.blob_id,
            is_large=each.lfs is not None,
        )
        for each in api.list_repo_tree(model_id, revision=commit)
        if isinstance(each, RepoFile)
    ]
    return Survey(model_id, commit, wanted(listed))


def wanted(files: Iterable[HubFile]) -> tuple[HubFile, ...]:
    """Those on the allow list, the small ones first: they tell early that access is refused."""
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

    kept = filter_repo_objects(
        files,
        allow_patterns=list(WANTED_FILES),
        ignore_patterns=list(UNWANTED_FILES),
        key=lambda file: file.name,
    )
    return tuple(sorted(kept, key=lambda file: (file.num_bytes, file.name)))


# -- where it lies on this disk -------------------------------------------------------------


@dataclass(frozen=True)
class Shelfmark:
    """Where the hub's cache keeps one model."""

    folder: Path
    commit: str

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.commit

    def blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.etag

    def part(self, file: HubFile) -> Path:
        """What has arrived of a file. It survives a crash, and the next attempt goes on from it."""
        return self.folder / "blobs" / f"{file.etag}.incomplete"

    def is_there(self, file: HubFile) -> bool:
        place = self.snapshot / file.name
        return place.is_file() and place.stat().st_size == file.num_bytes


def shelfmark(found: Survey) -> Shelfmark:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=found.model_id, repo_type="model")
    return Shelfmark(Path(constants.HF_HUB_CACHE) / name, found.commit)


def held_bytes(found: Survey) -> dict[str, int]:
    """Bytes of each wanted file that are on this disk, whole or in part."""
    place = shelfmark(found)
    held = {}
    for file in found.files:
        part = place.part(file)
        if place.is_there(file):
            held[file.name] = file.num_bytes
        else:
            held[file.name] = min(part.stat().st_size, file.num_bytes) if part.is_file() else 0
    return held
