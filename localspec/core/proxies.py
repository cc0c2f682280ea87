"""The proxies that the environment names, as far as the HTTP client can use them.

The client raises errors of its own for a proxy that it cannot use, when it is made. Here the person
gets a sentence instead.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies

from localspec.core.errors import ConfigError

# The variables that the client reads, in lower case, by the kind of address that asks them.
VARIABLES = {"http": "http_proxy", "https": "https_proxy", "all": "all_proxy"}
HTTP_SCHEMES = ("http", "https")
SOCKS_SCHEMES = ("socks5", "socks5h")
SOCKS_PACKAGE = "socksio"


def require_usable_proxies() -> None:
    """Raise ConfigError for a proxy that the client cannot use, before the client is made.

    A proxy for all addresses is asked only where the others are missing, so an unusable one beside
    them is removed from the environment: programs such as Clash set all three."""
    proxies = {kind: address for kind, address in getproxies().items() if kind in VARIABLES}
    faults = {kind: fault for kind, address in proxies.items() if (fault := _fault_of(address))}
    if "all" in faults and {"http", "https"} <= set(proxies):
        del faults["all"]
        for name in _names_of("all"):
            del os.environ[name]
    for kind, fault in faults.items():
        where = next(iter(_names_of(kind)), "the system's settings")
        raise ConfigError(
            f"The proxy in {where} cannot be used: {fault}. Name another one or remove it, and "
            "start localspec again."
        )


def _fault_of(address: str) -> str | None:
    """Return why a proxy cannot be used, as a clause that shows none of its passwords; None if it
    can be used."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return "it is no address"
    if parts.scheme in SOCKS_SCHEMES and find_spec(SOCKS_PACKAGE) is not None:
        return None
    if parts.scheme not in HTTP_SCHEMES:
        return f"it is of the kind {parts.scheme}://, and only http:// and https:// are supported"
    return None if is_whole else "it is no address"


def _names_of(kind: str) -> list[str]:
    """Return the names of the environment's variables of this kind, as they are written there."""
    return [name for name in os.environ if name.lower() == VARIABLES[kind]]
