"""What the engine may keep of chats on the disk, so that a chat that is opened again is not read
again: of which chats, how much, and until when.

Only logged chats are kept, and what is kept goes with the chat. The engine writes it in idle time;
this process deletes it also while no engine runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from localspec.chat.jobs import Task
from localspec.chat.journal import OpenConversation
from localspec.chat.turn import Reply
from localspec.core.backend import Backend, Request
from localspec.core.errors import EngineLost, StoreError
from localspec.formats.prefix_files import FOLDER, USUAL_BYTES, PrefixFiles
from localspec.record.store import Store

KEY = "prefixes"  # of the setting in the log
GB = 10**9


class KeptChats:
    """One for each service. backend: the one that is loaded, None while there is none; set by
    whoever has it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folder = None if store.path is None else store.path.parent / FOLDER
        self._kept: int | None = None  # number of the latest reply that was kept
        self.backend: Callable[[], Backend | None] = lambda: None
        kept = (store.load_state(KEY) or {}).get("bytes")
        self.disk_bytes = kept if type(kept) is int and kept >= 0 else USUAL_BYTES

    @property
    def gigabytes(self) -> float:
        """The limit on the disk; 0 keeps nothing there."""
        return self.disk_bytes / GB

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept on the disk now."""
        return 0 if self._folder is None else PrefixFiles(self._folder).num_bytes

    def limit(self, gigabytes: float, is_lasting: bool = True) -> None:
        """Keep at most so much on the disk, from now on; what is beyond is deleted at once.
        is_lasting: also at later starts."""
        self.disk_bytes = int(gigabytes * GB)
        if is_lasting:
            self._store.save_state(KEY, {"bytes": self.disk_bytes})
        if self._folder is not None:
            PrefixFiles(self._folder).shrink(self.disk_bytes)

    def owned(self, request: Request, conversation: OpenConversation) -> Request:
        """Return a request with the chat that what is read of it may be kept with."""
        return replace(request, kept_with=self._owner(conversation))

    def _owner(self, conversation: OpenConversation) -> int | None:
        stored_id = conversation.stored_id
        if stored_id is None or conversation.is_deleted or not self._store.logs_text:
            return None
        with suppress(StoreError):
            return stored_id if self._store.has_all_texts(stored_id) else None
        return None

    def task(self, latest: Reply | None) -> Task | None:
        """Return the job that keeps what was read until this reply; None where it is kept, or was
        lost with its engine."""
        if latest is None or latest.number == self._kept:
            return None
        if latest.view.finish_reason == "interrupted":
            return None
        disk_bytes = self.disk_bytes if self._store.logs_text and self._folder else None

        def keep(backend: Backend, cancel: threading.Event) -> None:
            self._kept = latest.number
            for _ in backend.keep_read(disk_bytes, cancel):
                if cancel.is_set():  # the rest is kept after the reply that waits
                    return

        return Task("Keeping what was read", keep, gives_way=True)

    def forget(self, stored_id: int | None) -> None:
        """Delete what is kept of a chat. Files that other chats use stay."""
        if stored_id is None or self._folder is None:
            return
        if (backend := self.backend()) is not None:
            with suppress(EngineLost):  # it would write them again
                backend.forget(stored_id)
        PrefixFiles(self._folder).forget(stored_id)

    def tidy(self) -> None:
        """Delete what belongs to no chat of the log, or is beyond the limit."""
        if self._folder is not None and self._folder.is_dir():
            files = PrefixFiles(self._folder)
            files.keep_only({conversation.id for conversation in self._store.conversations()})
            files.shrink(self.disk_bytes)
