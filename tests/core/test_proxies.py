"""A proxy of the environment that the HTTP client cannot use is said; one that is never asked does
not stand in the way."""

from __future__ import annotations

import os

import httpx2
import pytest

from localspec.core.errors import ConfigError
from localspec.core.options import RemoteServer
from localspec.core.proxies import require_usable_proxies
from localspec.machine.download_faults import fault_of
from localspec.machine.hub_files import search
from localspec.remote.connection import Connection

SOCKS = "socks://me:secret@127.0.0.1:7891/"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("name", "address", "fault"),
    [
        ("ALL_PROXY", SOCKS, "of the kind socks://"),
        ("https_proxy", "ftp://127.0.0.1:1", "of the kind ftp://"),
        ("HTTP_PROXY", "http://127.0.0.1:port", "no address"),
        ("https_proxy", "http://[::1", "no address"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, name: str, address: str, fault: str
) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(ConfigError, match=rf"The proxy in {name} cannot be used: .*{fault}") as hub:
        search("any", "")
    assert (
        "secret" not in str(fault_of(hub.value, "any")) and fault_of(hub.value, "any").remedy == ""
    )
    with pytest.raises(ConfigError, match=rf"The proxy in {name} cannot be used"):
        Connection(RemoteServer("http://10.0.0.1:8000"))
    Connection(RemoteServer("http://127.0.0.1:8000")).close()  # asks no proxy


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "127.0.0.1:9", "https://me@127.0.0.1"])
def test_a_proxy_for_all_addresses_is_left_out_where_it_is_never_asked(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    for name in ("HTTPS_PROXY", "http_proxy"):
        monkeypatch.setenv(name, address)
    monkeypatch.setenv("all_proxy", SOCKS)
    require_usable_proxies()
    httpx2.Client().close()
    assert "all_proxy" not in os.environ and os.environ["HTTPS_PROXY"] == address
