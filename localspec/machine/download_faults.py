"""Why a download stopped, as one sentence of fact and reason and one of remedy.

Contract: `fault_of` takes whatever the hub's client, the network or the disk raised and always
answers; of the client's own text nothing is shown but, where nothing better is known, its first
line. `code` is for the page and for tests.

Source: huggingface_hub/errors.py and utils/_http.py of 2.4.0 (which status becomes which error).
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass

from localspec.errors import LocalspecError

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class DownloadFault:
    """code: short and stable. page: where the person can do something about it, on the hub."""

    code: str
    text: str
    remedy: str
    page: str | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.remedy}"


class DownloadError(LocalspecError):
    """A failure that is known already when it is raised."""

    def __init__(self, fault: DownloadFault) -> None:
        self.fault = fault
        super().__init__(str(fault))


def fault_of(
    error: BaseException, model_id: str, has_token: bool, timeout_s: float
) -> DownloadFault:
    """The fault behind an exception. has_token: whether one was sent along. timeout_s: for how
    long no byte may come before an attempt is given up."""
    known = _by_kind(error, model_id, has_token, timeout_s)
    if known is not None:
        return known
    below = error.__cause__ or error.__context__  # the client wraps what the network said
    if below is not None:
        return fault_of(below, model_id, has_token, timeout_s)
    first_line = (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".:")
    return DownloadFault("other", f"{model_id} could not be fetched: {first_line}.", TRY_AGAIN)


TRY_AGAIN = "Press Continue to try again; what has arrived is kept."
NO_NETWORK = DownloadFault(
    "no_network",
    "The model hub cannot be reached: there is no connection to it.",
    "Connect to the network (or set the proxy) and press Continue; what has arrived is kept.",
)
PORTAL = DownloadFault(
    "captive_portal",
    "The network answered with a page of its own in place of the model: perhaps one that wants a "
    "sign-in first, as in hotels and trains.",
    "Open any web page, sign in there, and press Continue.",
)


def disk_full(folder: str) -> DownloadFault:
    return DownloadFault(
        "disk_full",
        f"The disk of {folder} is full.",
        "Free some space and press Continue; what has arrived is kept.",
    )


def changed(name: str) -> DownloadFault:
    return DownloadFault(
        "changed",
        f"The hub lists one version of {name} and serves another.",
        "Press Continue: the list is read anew.",
    )


def wrong_bytes(name: str, why: str) -> DownloadFault:
    return DownloadFault(
        "wrong_bytes",
        f"{name} is not what the hub says it is: {why}. It was deleted and fetched once more, with "
        "the same result.",
        "Press Continue later; if it stays so, a proxy on the way changes files.",
    )


def wrong_size(name: str, expected: int, got: int) -> DownloadFault:
    return DownloadFault(
        "wrong_size",
        f"{name} has {expected} bytes, but the server keeps sending {got}.",
        "Press Continue later; if it stays so, a proxy on the way cuts or changes files.",
    )


def _by_kind(
    error: BaseException, model_id: str, has_token: bool, timeout_s: float
) -> DownloadFault | None:
    import httpx2
    from huggingface_hub.errors import (
        FileMetadataError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
    )

    if isinstance(error, DownloadError):
        return error.fault
    if isinstance(error, GatedRepoError):
        return _gated(model_id, has_token)
    if isinstance(error, RepositoryNotFoundError):
        return _unknown_model(model_id, has_token)
    if isinstance(error, HfHubHTTPError):
        retry_after = error.response.headers.get("Retry-After")
        return _by_status(error.response.status_code, model_id, has_token, retry_after)
    if isinstance(error, httpx2.TimeoutException):
        return DownloadFault(
            "stalled",
            f"No byte came for {timeout_s:.0f} seconds, several times over.",
            "Press Continue when the connection is better; what has arrived is kept.",
        )
    if isinstance(error, httpx2.ConnectError) and "CERTIFICATE" in str(error).upper():
        return DownloadFault(
            "certificate",
            "The connection to the hub is not trusted: its certificate cannot be verified.",
            "Check the computer's clock; if a company's proxy is in between, add its certificate.",
        )
    if isinstance(error, httpx2.ReadError | httpx2.RemoteProtocolError):
        return DownloadFault(
            "dropped",
            "The connection to the hub keeps breaking off.",
            "Press Continue when it is better; what has arrived is kept.",
        )
    if isinstance(error, httpx2.TransportError):
        return NO_NETWORK
    if isinstance(error, FileMetadataError | json.JSONDecodeError | httpx2.DecodingError):
        return PORTAL
    if isinstance(error, OSError) and error.errno in DISK_ERRNOS:
        return disk_full(str(error.filename or "the model cache"))
    if isinstance(error, OSError) and error.errno in UNWRITABLE_ERRNOS:
        return DownloadFault(
            "not_writable",
            f"{error.filename or 'The model cache'} cannot be written ({error.strerror}).",
            "Make the folder writable, or set HF_HOME to one that is, and start again.",
        )
    return None


def _by_status(
    status: int, model_id: str, has_token: bool, retry_after: str | None
) -> DownloadFault:
    wait = f"{retry_after} seconds" if (retry_after or "").isdecimal() else "some minutes"
    who = "the token it was given" if has_token else "strangers"
    known = {
        401: (
            "unauthorised",
            f"The hub does not accept {who} for {model_id} (401).",
            "Log in with `hf auth login`, or set HF_TOKEN to a valid token, and start again.",
            _page(model_id),
        ),
        403: (
            "forbidden",
            f"The hub refuses {model_id} to this account (403).",
            "See on the model's page whether it asks for anything, then press Continue.",
            _page(model_id),
        ),
        404: (
            "missing_file",
            f"The hub no longer has a file of {model_id} that it listed (404).",
            "Press Continue: the list is read anew.",
            _page(model_id),
        ),
        429: (
            "too_many_requests",
            "The hub has been asked too often from here and wants a pause (429).",
            f"Wait {wait} and press Continue; being logged in raises the limit.",
            None,
        ),
    }
    other = (
        "hub_down",
        f"The hub answers with an error of its own ({status}).",
        "Press Continue in a few minutes; what has arrived is kept.",
        None,
    )
    return DownloadFault(*known.get(status, other))


def _gated(model_id: str, has_token: bool) -> DownloadFault:
    login = "" if has_token else " and log in (`hf auth login`, or set HF_TOKEN) and start again"
    who = (
        "the account of your token has not agreed yet" if has_token else "nobody is logged in here"
    )
    return DownloadFault(
        "gated",
        f"{model_id} is given only to those who agreed to its terms, and {who}.",
        f"Agree on the model's page{login}, then press Continue.",
        _page(model_id),
    )


def _unknown_model(model_id: str, has_token: bool) -> DownloadFault:
    login = "" if has_token else ", or log in (`hf auth login`, or set HF_TOKEN)"
    return DownloadFault(
        "unknown_model",
        f"The hub has no model {model_id}, or shows it to some people only (404).",
        f"Check the spelling{login}.",
    )


def _page(model_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{model_id}"
