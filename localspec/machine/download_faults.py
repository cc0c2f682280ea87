"""Why a download stopped, as one sentence of fact and reason and one of remedy.

Contract: `fault_of` takes whatever the hub's client, the network or the disk raised and always
answers; of the client's own text nothing is shown but, where nothing better is known, its first
line. `code` is for the page and for tests. "Continue" in a remedy is the button of the page; on
the command line it is the same command once more.

Source: huggingface_hub/errors.py and utils/_http.py of 2.4.0 (which status becomes which error).
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass

from localspec.core.errors import ConfigError, LocalspecError, first_line

# What ends a remedy of a download, and of a question, after which nothing has arrived.
OF_DOWNLOAD = {"Again": "Continue", "again": "continue", "kept": "; what has arrived is kept"}
OF_QUESTION = {"Again": "Try again", "again": "try again", "kept": ""}

# By code: the fact with its reason, and the remedy. In braces: see `fault` and `fault_of`.
SENTENCES: Mapping[str, tuple[str, str]] = {
    "gated": (
        "{model_id} is given only to those who agreed to its terms, and {account}.",
        "Agree on the model's page{and_log_in}, then {again}.",
    ),
    "unknown_model": (
        "The hub has no model {model_id}, or shows it to some people only (404).",
        "Check the spelling{or_log_in}.",
    ),
    "unauthorised": (
        "The hub does not accept {who} for {model_id} (401).",
        "Log in with `hf auth login`, or set HF_TOKEN to a valid token, and start again.",
    ),
    "forbidden": (
        "The hub refuses {model_id} to this account (403).",
        "See on the model's page whether it asks for anything, then {again}.",
    ),
    "missing_file": (
        "The hub no longer has a file of {model_id} that it listed (404).",
        "{Again}: the list is read anew.",
    ),
    "too_many_requests": (
        "The hub has been asked too often from here and wants a pause (429).",
        "Wait {wait} and {again}; being logged in raises the limit.",
    ),
    "hub_down": (
        "The hub answers with an error of its own ({status}).",
        "{Again} in a few minutes{kept}.",
    ),
    "stalled": (
        "No byte came for {timeout_s} seconds, several times over.",
        "{Again} when the connection is better{kept}.",
    ),
    "dropped": (
        "The connection to the hub keeps breaking off.",
        "{Again} when it is better{kept}.",
    ),
    "certificate": (
        "The connection to the hub is not trusted: its certificate cannot be verified.",
        "Check the computer's clock; if a company's proxy is in between, add its certificate.",
    ),
    "no_network": (
        "The model hub cannot be reached: there is no connection to it.",
        "Connect to the network (or set the proxy) and {again}{kept}.",
    ),
    "captive_portal": (
        "The network answered with a page of its own in place of the hub's: perhaps one that "
        "wants a sign-in first, as in hotels and trains.",
        "Open any web page, sign in there, and {again}.",
    ),
    "disk_full": (
        "The disk of {place} is full.",
        "Free disk space and {again}{kept}.",
    ),
    "not_writable": (
        "{place} cannot be written ({reason}).",
        "Make the folder writable, or set HF_HOME to one that is, and start again.",
    ),
    "too_little_disk": (
        "{model_id} needs {needed} more on the disk of {place}, and {free} can be used there.",
        "Nothing was fetched. Free disk space, or choose a smaller model.",
    ),
    "no_safetensors": (
        "{model_id} has no .safetensors weights, and other kinds can run code when opened.",
        "Choose a copy of the model that has them.",
    ),
    "changed": (
        "The hub lists one version of {name} and serves another.",
        "{Again}: the list is read anew.",
    ),
    "damaged": (
        "{name} is damaged on the hub itself: its header does not fit ({reason}).",
        "Choose another copy of the model.",
    ),
    "wrong_bytes": (
        "{name} is not what the hub says it is: {reason}. It was deleted and fetched once more, "
        "with the same result.",
        "{Again} later; if it stays so, a proxy in between cuts or changes files.",
    ),
    "wrong_size": (
        "{name} has {expected} bytes, but the server keeps sending {got}.",
        "{Again} later; if it stays so, a proxy in between cuts or changes files.",
    ),
    "strange_answer": (
        "The hub's answer was not read: {reason}.",
        "{Again} later; if it stays so, a proxy in between changes it.",
    ),
    "slow_answer": (
        "The hub did not come to the end of its answer within {seconds} seconds.",
        "{Again} when the connection is better{kept}.",
    ),
    "worker_ended": (
        "The program that fetches ended without saying why (exit code {exit_code}).",
        "{Again}{kept}.",
    ),
    "other": ("{model_id} could not be fetched: {line}.", "{Again}{kept}."),
}
ON_ITS_PAGE = ("gated", "unauthorised", "forbidden", "missing_file")
BY_STATUS = {401: "unauthorised", 403: "forbidden", 404: "missing_file", 429: "too_many_requests"}
BY_ERRNO = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "disk_full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "not_writable"),
}


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
    """values: what stands in braces in SENTENCES, OF_QUESTION where the hub was only asked."""
    from huggingface_hub import constants

    text, remedy = SENTENCES[code]
    page = f"{constants.ENDPOINT}/{values['model_id']}" if code in ON_ITS_PAGE else None
    values = {**OF_DOWNLOAD, **values}
    return DownloadFault(code, text.format(**values), remedy.format(**values), page)


def fault_of(error: BaseException, model_id: str, is_question: bool = False) -> DownloadFault:
    """The fault behind an exception, or behind what the client wrapped in it."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, DownloadError):
        return error.fault
    if isinstance(error, ConfigError):
        return DownloadFault("proxy", str(error), "")
    code, below = _code_of(error), error.__cause__ or error.__context__
    if code is None and below is not None:
        return fault_of(below, model_id, is_question)
    values: dict[str, object] = {
        "model_id": model_id,
        "timeout_s": f"{constants.HF_HUB_DOWNLOAD_TIMEOUT:.0f}",
        "line": first_line(error).rstrip(".:"),
        **(OF_QUESTION if is_question else {}),
    }
    if get_token() is not None:
        values |= {"who": "the token it was given", "or_log_in": "", "and_log_in": ""}
        values["account"] = "the account of your token has not agreed yet"
    else:
        values |= {"who": "strangers", "account": "nobody is logged in here"}
        values["or_log_in"] = ", or log in (`hf auth login`, or set HF_TOKEN)"
        values["and_log_in"] = " and log in (`hf auth login`, or set HF_TOKEN) and start again"
    if isinstance(error, HfHubHTTPError):
        after = error.response.headers.get("Retry-After", "")
        values["wait"] = f"{after} seconds" if after.isdecimal() else "some minutes"
        values["status"] = error.response.status_code
    elif isinstance(error, OSError):
        values |= {"place": error.filename or "the model cache", "reason": error.strerror}
    return fault(code or "other", **values)


def _code_of(error: BaseException) -> str | None:
    import httpx2
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    match error:
        case GatedRepoError():
            return "gated"
        case RepositoryNotFoundError():
            return "unknown_model"
        case HfHubHTTPError():
            return BY_STATUS.get(error.response.status_code, "hub_down")
        case httpx2.TimeoutException():
            return "stalled"
        case httpx2.ConnectError() if "CERTIFICATE" in str(error).upper():
            return "certificate"
        case httpx2.ReadError() | httpx2.RemoteProtocolError():
            return "dropped"
        case httpx2.TransportError():
            return "no_network"
        case FileMetadataError() | json.JSONDecodeError() | httpx2.DecodingError():
            return "captive_portal"
        case OSError():
            return BY_ERRNO.get(error.errno or 0)
    return None
