"""What the hub holds of a model, what of it is wanted, and where the hub's cache keeps it.

`survey_model` asks the hub and pins the commit it names; nothing is fetched or written.
WANTED_FILES is the allow list: weights as safetensors, JSON, chat templates and the tokenizer's own
files, from the top folder only; never pickle or code. `Survey.held_bytes` says what is on this
disk. `search` finds models by name and size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from localspec.core.errors import first_line
from localspec.core.proxies import require_usable_proxies
from localspec.formats.native import NATIVE
from localspec.formats.safetensors_file import num_bytes_of
from localspec.machine.download_faults import DownloadError
from localspec.machine.model import Model, page_of

if TYPE_CHECKING:
    import httpx2

WANTED_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja",
    "merges.txt", "vocab.txt", "tokenizer.model",
)  # fmt: skip
MAX_FOUND = 20  # models, by a search
MOST_PARAMETERS = 10**15  # of a model; a larger number is no count
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SEARCH_S = 20.0  # that a search waits for the hub's answer
ANSWER_S = 60.0  # for the body of one answer that is no file
API = "/api/models"  # in the path of every question, also at a mirror of the hub
# Copies in other formats, often as large as the model itself.
UNWANTED_FILES = ("*/*", "*\\*", "consolidated*.safetensors")


@dataclass(frozen=True)
class HubFile:
    """One file at one commit. is_cached: the hub's cache had it when the hub was asked, if only as
    part of another commit."""

    name: str
    num_bytes: int
    is_cached: bool = False


@dataclass(frozen=True)
class Survey:
    """What a model consists of at one commit. files: the wanted ones, small ones first."""

    model_id: str
    commit: str
    files: tuple[HubFile, ...]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Survey:
        """The inverse of `asdict`, also for what earlier versions wrote. Raises LookupError,
        TypeError for other data."""
        files = (
            HubFile(str(file["name"]), int(file["num_bytes"]), bool(file.get("is_cached")))
            for file in data["files"]
        )
        return cls(str(data["model_id"]), str(data["commit"]), tuple(files))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of each file that are on this disk, whole or in part."""
        return {file.name: self._held(file) for file in self.files}

    def _held(self, file: HubFile) -> int:
        part = self.part(file)
        if part.is_file():
            return min(part.stat().st_size, file.num_bytes)
        return file.num_bytes if file.is_cached or self.is_there(file) else 0

    # places in the hub's cache

    @property
    def folder(self) -> Path:
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE) / self._folder_name

    @property
    def _folder_name(self) -> str:
        from huggingface_hub.file_download import repo_folder_name

        return repo_folder_name(repo_id=self.model_id, repo_type="model")

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.commit

    def is_there(self, file: HubFile) -> bool:
        return (self.snapshot / file.name).is_file()

    @property
    def parts(self) -> Path:
        """The folder of what has arrived and is not verified yet. Nothing loads from it."""
        return self.folder / "incomplete"

    def part(self, file: HubFile) -> Path:
        """What has arrived of a file. It survives a crash, and the next attempt continues it."""
        return self.parts / file.name

    @property
    def lock(self) -> Path:
        return self.folder.parent / ".locks" / self._folder_name / "incomplete.lock"


def survey_model(model_id: str) -> Survey:
    """Ask the hub. Raises whatever its client raises (`fault_of` puts it into words)."""
    from huggingface_hub import HfApi, snapshot_download

    limit_hub_client()
    with understood():
        # The commit first: for a branch the dry run would already write where it leads.
        commit = hash_of_hub(HfApi().model_info(model_id, revision="main").sha)
        listed = snapshot_download(
            model_id,
            revision=commit,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(UNWANTED_FILES),
            dry_run=True,
        )
        files = [_hub_file(file) for file in listed]
    # Small ones first: they tell early that access is refused.
    return Survey(model_id, commit, tuple(sorted(files, key=lambda f: (f.num_bytes, f.name))))


def limit_hub_client() -> None:
    """Let the hub's client of this process read the answers to one question within limits only,
    and print nothing. Files are bounded by the size that the hub lists. Raises ConfigError where
    the environment names a proxy that cannot be used."""
    from huggingface_hub import hf_raise_for_status, set_client_factory
    from huggingface_hub.utils import _http, disable_progress_bars  # type: ignore[attr-defined]

    from localspec.core.http_limits import Limits

    require_usable_proxies()
    disable_progress_bars()
    limits = Limits(_unreadable, ANSWER_S)

    def bound(response: httpx2.Response) -> None:
        if response.is_success and "html" in response.headers.get("content-type", "").lower():
            raise DownloadError("answer", reason="the network sent a page of its own in its place")
        if response.status_code == 429 and response.request.method == "HEAD":
            hf_raise_for_status(response)  # the dry run would wait in silence, for minutes
        if not response.is_success or API in response.request.url.path:
            limits.bound(response)

    def client() -> httpx2.Client:
        """The client may close a session and make another at any time."""
        session = _http.default_client_factory()
        session.headers["accept-encoding"] = "identity"
        session.event_hooks = {**session.event_hooks, "response": [bound]}
        return session

    set_client_factory(client)


def _unreadable(reason: str) -> NoReturn:
    raise DownloadError("answer", reason=f"it sent {reason}")


def _hub_file(file: Any) -> HubFile:
    """Raise ValueError where the hub names no size."""
    if file.file_size is None or file.file_size < 0:
        raise ValueError(f"no size of {file.filename}")
    return HubFile(file.filename, file.file_size, file.is_cached)


def hash_of_hub(value: Any) -> str:
    """Return a hash that the hub gives. It becomes the name of a file or folder here, so nothing
    else is taken."""
    if not isinstance(value, str) or HASH.fullmatch(value) is None:
        raise ValueError(f"{str(value)[:80]!r} in place of a hash")
    return value


@contextmanager
def understood() -> Iterator[None]:
    """Raise DownloadError where the answer is in no format that is known."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except (json.JSONDecodeError, HFValidationError):
        raise  # a page of the network's own; an id that was not asked for
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"it is in no form that is known ({first_line(error).rstrip('.')})"
        raise DownloadError("answer", reason=reason) from error


def search(words: str, most_params: str) -> list[Model]:
    """Models that write text and have .safetensors weights, the most fetched first. most_params:
    as the hub writes it, for example 4B; "" for any. Raises as `survey`.

    One request, made here: the client's `list_models` asks again for 24 s where the hub cannot be
    reached, and tells nothing meanwhile."""
    from huggingface_hub import HfApi, ModelInfo, get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    limit_hub_client()
    asked: dict[str, Any] = {
        "filter": "safetensors",
        "pipeline_tag": "text-generation",
        "sort": "downloads",
        "limit": MAX_FOUND,
        "expand": ["safetensors", "config", "gated"],
    }
    asked |= {"search": words} if words else {}
    asked |= {"num_parameters": f"max:{most_params}"} if most_params else {}
    address, headers = f"{HfApi().endpoint}/api/models", build_hf_headers()
    answer = get_session().get(address, params=asked, headers=headers, timeout=SEARCH_S)
    hf_raise_for_status(answer)
    with understood():
        return [_hub_model(ModelInfo(**each)) for each in answer.json()[:MAX_FOUND]]


def _hub_model(info: Any) -> Model:
    """A result of a search. What the hub does not say is None; a family that does not run natively
    here is a fault."""
    parameters = {} if info.safetensors is None else dict(info.safetensors.parameters)
    if not all(
        type(count) is int and 0 <= count <= MOST_PARAMETERS for count in parameters.values()
    ):
        parameters = {}
    sizes = [num_bytes_of(count, dtype) for dtype, count in parameters.items()]
    family = (info.config or {}).get("model_type")
    is_unknown = isinstance(family, str) and family not in NATIVE
    return Model(
        id=str(info.id),
        num_bytes=sum(sizes) or None,
        num_params=sum(parameters.values()) or None,
        fault=f"of the family {family}: not yet" if is_unknown else "",
        page=page_of(str(info.id)),
        is_gated=bool(info.gated),
    )


def searched(model: Model) -> dict[str, Any]:
    """Return the fields that a search fills, as one process says them to another."""
    fields = ("id", "num_bytes", "num_params", "fault", "page", "is_gated")
    return {field: getattr(model, field) for field in fields}
