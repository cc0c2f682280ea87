"""Why a download stopped, as one sentence of fact and reason and one of remedy.

`fault_of` takes whatever the hub's client, the network or the disk raised and always answers. It
shows nothing of the client's own text but its first line, where nothing better is known. A code
stands for a remedy; what differs inside a code is the reason. "Continue" in a remedy is the button
of the page; on the command line it is the same command once more.

Source: huggingface_hub/errors.py and utils/_http.py of 2.4.0 (which status becomes which error).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from localspec.core.errors import ConfigError, LocalspecError, first_line

# What ends a remedy of a download, and of a question, after which nothing has arrived.
OF_DOWNLOAD = {"Again": "Continue", "again": "continue", "kept": "; what has arrived is kept"}
OF_QUESTION = {"Again": "Try again", "again": "try again", "kept": ""}
LOG_IN = "log in with a valid token (`hf auth login`, or set HF_TOKEN)"

# The fact with its reason, and the remedy, by code. The names in braces are values of `fault`.
SENTENCES: Mapping[str, tuple[str, str]] = {
    "access": (
        "The hub does not give {model_id} out: {reason}.",
        f"Agree to its terms on the model's page if it has any, {LOG_IN}, and {{again}}.",
    ),
    "unknown_model": (
        "The hub has no model {model_id}, or shows it to some people only ({status}).",
        f"Check the spelling, or {LOG_IN}.",
    ),
    "hub_busy": (
        "The hub turned the request down: {reason}.",
        "Wait {wait} and {again}{kept}.",
    ),
    "network": (
        "The model hub cannot be reached: {reason}.",
        "Connect to the network (or set the proxy) and {again}{kept}.",
    ),
    "answer": (
        "The hub's answer cannot be used: {reason}.",
        "Open any web page and sign in there if the network asks for it, as in hotels and trains, "
        "then {again}; if it stays so, a proxy in between changes what the hub sends.",
    ),
    "disk": (
        "The disk of {place} cannot take {model_id}: {reason}.",
        "Free disk space, choose a smaller model, or set HF_HOME to a folder with room in which "
        "you may write; then {again}{kept}.",
    ),
    "file": (
        "{name} cannot be used: {reason}.",
        "{Again} later; if it stays so, a proxy in between cuts or changes files, or another copy "
        "of the model is needed.",
    ),
    "format": (
        "{model_id} has no .safetensors weights, and other kinds can run code when opened.",
        "Choose a copy of the model that has them.",
    ),
    "other": ("{model_id} could not be fetched: {reason}.", "{Again}{kept}."),
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class DownloadFault:
    """code: short and stable. page: where the person can do something about it, on the hub."""

    code: str
    text: str
    remedy: str
    page: str | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}".strip()


class DownloadError(LocalspecError):
    """A failure that is known already when it is raised."""

    def __init__(self, code: str, **values: object) -> None:
        self.fault = fault(code, **values)
        super().__init__(str(self.fault))


def fault(code: str, **values: object) -> DownloadFault:
    """Return a fault. values: what stands in braces in SENTENCES, and OF_QUESTION where the hub was
    only asked."""
    from huggingface_hub import constants

    text, remedy = SENTENCES[code]
    page = f"{constants.ENDPOINT}/{values['model_id']}" if code == "access" else None
    values = {**OF_DOWNLOAD, **values}
    return DownloadFault(code, text.format(**values), remedy.format(**values), page)


def fault_of(error: BaseException, model_id: str, is_question: bool = False) -> DownloadFault:
    """Return the fault behind an exception, or behind what the client wrapped in it."""
    if isinstance(error, DownloadError):
        return error.fault
    if isinstance(error, ConfigError):
        return DownloadFault("network", str(error), "")
    known, below = _known(error), error.__cause__ or error.__context__
    if known is None and below is not None:
        return fault_of(below, model_id, is_question)
    code, values = known or ("other", {"reason": first_line(error).rstrip(".:")})
    ending = OF_QUESTION if is_question else {}
    return fault(code, **{"model_id": model_id, **ending, **values})


def _known(error: BaseException) -> tuple[str, dict[str, Any]] | None:
    """Return the code and its values; None for an error that says too little."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import FileMetadataError, HfHubHTTPError

    match error:
        case HfHubHTTPError():
            return _refusal(error)
        case httpx2.TimeoutException():
            seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
            reason = f"no byte came for {seconds:.0f} seconds, several times over"
        case httpx2.ConnectError() if "CERTIFICATE" in str(error).upper():
            reason = (
                "its certificate cannot be verified, because the computer's clock is wrong or the "
                "certificate of a company's proxy is missing here"
            )
        case httpx2.ReadError() | httpx2.RemoteProtocolError():
            reason = "the connection keeps breaking off"
        case httpx2.TransportError():
            reason = "there is no connection to it"
        case FileMetadataError() | json.JSONDecodeError() | httpx2.DecodingError():
            return "answer", {"reason": "the network sent a page of its own in its place"}
        case OSError():
            return _disk(error)
        case _:
            return None
    return "network", {"reason": reason}


def _refusal(error: Any) -> tuple[str, dict[str, Any]]:
    """Return the code and its values for a status that is an error."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    status, has_token = error.response.status_code, get_token() is not None
    if isinstance(error, GatedRepoError):
        agreed = "the account of your token has not agreed yet"
        account = agreed if has_token else "nobody is logged in here"
        return "access", {"reason": f"only those who agreed to its terms get it, and {account}"}
    if isinstance(error, RepositoryNotFoundError):
        return "unknown_model", {"status": status}
    match status:
        case 401:
            who = "the token it was given" if has_token else "people who are not logged in"
            return "access", {"reason": f"it does not accept {who} (401)"}
        case 403:
            return "access", {"reason": "this account may not have it (403)"}
        case 404:
            name = error.response.request.url.path.rpartition("/")[2]
            return "file", {"name": name, "reason": "the hub no longer has it (404)"}
    seconds = error.response.headers.get("Retry-After", "")
    wait = f"{seconds} seconds" if seconds.isdecimal() else "some minutes"
    reason = "it has an error of its own"
    if status == 429:
        reason = "it was asked too often from here, and allows more to those who are logged in"
    return "hub_busy", {"reason": f"{reason} ({status})", "wait": wait}


def _disk(error: OSError) -> tuple[str, dict[str, Any]] | None:
    """Return the code and its values for an error of the disk."""
    place = error.filename or "the model cache"
    if error.errno in DISK_FULL:
        return "disk", {"place": place, "reason": "it is full"}
    if error.errno in NOT_WRITABLE:
        return "disk", {"place": place, "reason": f"it cannot be written ({error.strerror})"}
    return None
