"""The service of the page and of other programs over a log, with its engine in another process
or on somebody's server.

Contract: `opened_service` is how `app.py` and `python -m localspec serve` begin; nothing is loaded
before the service is started, and this process never loads torch.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from localspec import __version__
from localspec.chat.backend_lifecycle import Opener
from localspec.chat.service import ChatService
from localspec.core.backend import Backend, Description
from localspec.core.config import settings_for
from localspec.core.decoding import AUTO
from localspec.core.options import LoadOptions, Offer
from localspec.core.workloads import load_workloads, workload_folders
from localspec.formats.prefix_files import FOLDER
from localspec.machine.catalogue import smaller_offer
from localspec.machine.doctor import version_of
from localspec.machine.hardware import on_device, probe
from localspec.machine.profiles import load_profiles
from localspec.record.opening import sole_use
from localspec.record.store import STATE_KEY, SessionInfo, Store
from localspec.remote.child import ChildBackend
from localspec.remote.server import ServerBackend
from localspec.remote.wire import Opening

# By name: that module brings torch, and this one must not.
ENGINE = "localspec.loading.local_backend:open_local_backend"


@contextmanager
def opened_service(
    options: LoadOptions, unload_after_s: float | None, *, beside_page: bool
) -> Iterator[ChatService]:
    """The service, not started; whoever serves it starts and closes it. unload_after_s: None never
    lets the model go. beside_page: as in load.open_local_backend. Raises LocalspecError, also where
    another process has the log."""
    settings = settings_for(options.home)

    def opener_for(options: LoadOptions) -> Opener:
        def open_backend(report: Callable[[str], None]) -> Backend:
            if options.remote is not None:
                report(f"connecting to {options.remote.url}")
                return ServerBackend(options.remote, options.parallel)
            keywords = {
                "options": options,
                "state": store.load_state(STATE_KEY),
                "past": store.conversation_list.earlier_texts(),
                "replies": store.conversation_list.earlier_replies(),
                "beside_page": beside_page,
                "prefix_folder": None if store.path is None else settings.home / FOLDER,
            }
            return ChildBackend.open(Opening(ENGINE, keywords), report)

        return open_backend

    def smaller(options: LoadOptions, loaded: Description) -> Offer | None:
        profiles = load_profiles(settings.profile_folders)
        if loaded.dtype is None:
            return None
        device = on_device(probe(), options.device).device
        return smaller_offer(options, loaded.target, loaded.dtype, profiles, device)

    with sole_use(settings.database), closing(Store.open(settings.database)) as store:
        yield ChatService(
            store,
            session_info,
            opener_for(options),
            options.drafter or AUTO,
            load_workloads(workload_folders(settings)),
            options=options,
            opener_for=opener_for,
            unload_after_s=unload_after_s,
            smaller=smaller,
            makes_titles=True,
        )


def session_info() -> SessionInfo:
    """The machine and the versions, for the log."""
    found = probe()
    return SessionInfo(
        app_version=__version__,
        device=found.device,
        gpu=found.gpu.name if found.gpu else None,
        driver=found.gpu.driver if found.gpu else None,
        vram_total_bytes=found.gpu.total_bytes if found.gpu else None,
        ram_total_bytes=found.host.ram_total_bytes,
        torch=version_of("torch"),
        transformers=version_of("transformers"),
        bitsandbytes=version_of("bitsandbytes"),
        python=platform.python_version(),
        platform=platform.platform(),
    )
