"""The commands for other programs: `serve` without a page, and the `keys` that it asks for.

Contract: as in cli. A key is printed once, when it is made, and is nowhere to be read again.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from localspec.cli.flags import HostFlag, JsonFlag, KeptFlag, OriginFlag, PortFlag, UnloadFlag
from localspec.cli.output import finish, to_stderr
from localspec.core.config import with_server
from localspec.core.errors import StoreError
from localspec.core.flags import Flag
from localspec.core.options import HomeFlag, LoadOptions, RemoteFlags, is_loopback

if TYPE_CHECKING:
    from pathlib import Path

    from localspec.chat.service import ChatService
    from localspec.record.api_keys import ApiKeys
    from localspec.record.store import Store

FIRST_KEY = "first"
LOOK_S = 0.5
EXPOSED = (
    "--host {host} lets other machines use this one's models with a key. The connection is not "
    "encrypted: whoever listens on the network can read along, keys included. Elsewhere leave "
    "--host out and use a tunnel: ssh -L {port}:127.0.0.1:{port} this-machine"
)

KeyName = Annotated[str, Flag("A name to tell the key by.", is_positional=True)]


def serve(
    options: LoadOptions,
    remote: RemoteFlags,
    host: HostFlag = "127.0.0.1",
    port: PortFlag = 8000,
    allow_origin: OriginFlag = (),
    unload_after: UnloadFlag = 0,
    keep_chats: KeptFlag = None,
) -> None:
    """Serve OpenAI's and Anthropic's interfaces, without a page."""
    from localspec.core.bootstrap import check_port
    from localspec.loading.service import opened_service
    from localspec.web.server import serve_interfaces

    options = with_server(options, remote)
    check_port(host, port)  # before a key is made and shown
    if not is_loopback(host):
        to_stderr(EXPOSED.format(host=host, port=port))
    with opened_service(options, 60.0 * unload_after or None, beside_page=False) as service:
        if keep_chats is not None:
            service.kept_chats.limit(keep_chats, is_lasting=False)
        announce_first_key(service.api_keys)
        threading.Thread(target=tell_news, args=(service,), daemon=True).start()
        serve_interfaces(service, host, port, announce, allow_origin)


def announce(address: str) -> None:
    finish({}, f"localspec → {address}/v1", False)


def tell_news(service: ChatService) -> None:
    """Print what a page would show, each sentence once: what is loaded, what could not be, and why
    something is not kept."""
    told = set[str]()
    while True:
        status = service.status()
        loaded, has_failed = status.description, status.phase == "failed"
        news = [*status.notices, *([status.phrase] if has_failed else [])]
        news += [] if loaded is None else [f"{loaded.target} is loaded."]
        to_stderr(*(one for one in dict.fromkeys(news) if one not in told))
        told.update(news)
        time.sleep(LOOK_S)


def announce_first_key(api_keys: ApiKeys) -> None:
    """Make one where there is none."""
    if not api_keys.all():
        to_stderr(f"Key {FIRST_KEY!r}, shown this once: {api_keys.make(FIRST_KEY)}")


def make_key(name: KeyName, home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Make a key by which other programs use the API, and print it, this once."""
    with closing(_store_of(home)) as store:
        _require_kept(store)
        key = store.api_keys.make(name)
    finish({"name": name, "key": key}, "" if as_json else key, as_json)


def list_keys(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """List the names of all keys, and when each was made and last used."""
    with closing(_store_of(home)) as store:
        to_stderr(*store.notices)
        found = store.api_keys.all()
    lines = "\n".join(
        f"{key.name}  made {key.created_at_utc}  last used {key.last_used_at_utc or 'never'}"
        for key in found
    )
    result = {"keys": [asdict(key) for key in found]}
    finish(result, "" if as_json else lines or "There is no key.", as_json)


def revoke_key(name: KeyName, home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Take a key back; it opens nothing from now on."""
    with closing(_store_of(home)) as store:
        _require_kept(store)
        store.api_keys.revoke(name)
    finish({"name": name}, "" if as_json else f"{name} is revoked.", as_json)


def _store_of(home: Path | None) -> Store:
    """The log that holds the keys, also while another process serves it."""
    from localspec.core.config import settings_for
    from localspec.record.store import Store

    return Store.open(settings_for(home).database)


def _require_kept(store: Store) -> None:
    """Raises StoreError where the log is in memory, so that a change would end with the command."""
    if store.path is None:
        raise StoreError(f"Keys are kept in the log, so none was changed. {store.notices[0]}")
