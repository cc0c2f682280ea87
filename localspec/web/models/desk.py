"""What the Models tab knows and does: between the service, the catalogue of models and the tab.

Contract: `view` is everything the tab shows as HTML by part, made anew at most every LOOK_S seconds
unless something changed; `act` does what a button asks and says a sentence where there is something
to say. Only models that were offered can be named; a folder is opened by its path only where the
person at this machine asks (the route sees to that). Nothing is fetched but by the act "download",
"resume" or "size".

Not here: HTML (models_html), what is recommended and why (machine.recommend).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localspec.chat import tune_up
from localspec.chat.service import ChatService
from localspec.errors import RequestError
from localspec.machine.catalogue import Catalogue, CatalogueState
from localspec.machine.download_faults import DownloadFault
from localspec.machine.recommend import Card, Recommendation
from localspec.options import LoadOptions
from localspec.web.models import page as models_html

LOOK_S = 15.0
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DEFAULT_CONTEXT = 8192
TUNE_UP = "Tune-up: trying a drafter of each kind"


@dataclass(frozen=True)
class Tuning:
    """The latest tune-up. error: why it ended early, if it failed."""

    result: tune_up.TuneUp | None = None
    is_running: bool = False
    error: str | None = None


class ModelsDesk:
    """One for each server."""

    def __init__(self, service: ChatService, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._service = service
        self._lock = threading.Lock()
        self._look: CatalogueState | None = None
        self._looked_s = 0.0
        self._seen: object = None
        self._context_length = DEFAULT_CONTEXT
        self._folder: str | None = None
        self._faults: dict[str, DownloadFault] = {}  # of dry runs
        self._task: Any = None
        self._tuning = Tuning()
        self._acts: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
            "context": self._choose_context,
            "folder": self._choose_folder,
            "size": self._ask_sizes,
            "download": self._download,
            "pause": lambda said: self.catalogue.downloads.pause(self._known_download(said)),
            "resume": lambda said: self.catalogue.downloads.resume(self._known_download(said)),
            "cancel": lambda said: self.catalogue.downloads.cancel(self._known_download(said)),
            "forget": lambda said: self.catalogue.downloads.forget(self._known_download(said)),
            "load": self._load,
            "unload": lambda said: self._service.unload(),
            "retry": lambda said: self._service.retry(),
            "tune": self._tune,
            "skip": self._skip,
        }

    # what is shown

    def view(self) -> dict[str, Any]:
        """{"parts": {name: html}}."""
        look, status = self._fresh_look(), self._service.status()
        downloads = self.catalogue.downloads.downloads
        found = look.recommendation
        parts = {
            "found": models_html.found_html(look, CONTEXTS),
            "loaded": models_html.loaded_html(status, self._service.options),
            "first": models_html.first_html(found, look.hardware.device, self._faults),
            "near": models_html.near_html(found),
            "downloads": models_html.downloads_html(downloads),
            "here": models_html.here_html(found, status.description),
            "folder": models_html.folder_html(look),
            "others": models_html.others_html(found),
            "tune": models_html.tune_html(
                self._tuning.result,
                self._tuning.is_running,
                self._tuning.error,
                status.description is not None,
            ),
        }
        return {"parts": parts}

    def _fresh_look(self) -> CatalogueState:
        """Read the machine again when something changed that it depends on, or after a while."""
        description = self._service.status().description
        done = [
            each.model_id for each in self.catalogue.downloads.downloads if each.state == "done"
        ]
        folder = self._folder
        seen = (description and description.target, tuple(done), self._context_length, folder)
        with self._lock:
            is_old = time.monotonic() - self._looked_s > LOOK_S
            if self._look is None or is_old or seen != self._seen:
                freed = self._freed_bytes()
                self._look = self.catalogue.read(self._context_length, freed, folder)
                self._looked_s, self._seen = time.monotonic(), seen
            return self._look

    def _freed_bytes(self) -> int:
        """What switching gives back before it loads; what is not known is not counted on."""
        loaded = self._service.status().description
        if loaded is None:
            return 0
        drafters = [each.memory_bytes or 0 for each in loaded.drafters if each.is_available]
        return (loaded.target_bytes or 0) + (loaded.kv_bytes or 0) + max(drafters, default=0)

    def _forget_look(self) -> None:
        with self._lock:
            self._look = None

    # what the buttons do

    def act(self, said: Mapping[str, Any]) -> str | None:
        """Do what was asked; a sentence where there is something to say. Raises RequestError."""
        act = self._acts.get(str(said.get("act")))
        if act is None:
            raise RequestError(
                "The page asked for something this version does not know. Reload it."
            )
        return act(said)

    def _choose_context(self, said: Mapping[str, Any]) -> None:
        wanted = said.get("value")
        if wanted not in CONTEXTS:
            raise RequestError(f"A context of {wanted} tokens cannot be planned for.")
        self._context_length = int(wanted)

    def _choose_folder(self, said: Mapping[str, Any]) -> str | None:
        text = str(said.get("value", "")).strip()
        self._folder = text or None
        self._forget_look()
        return self._fresh_look().folder_fault if text else None

    def _ask_sizes(self, said: Mapping[str, Any]) -> str | None:
        """The dry run of everything the card would fetch."""
        card = self._card(said)
        for part in card.parts:
            if not part.is_here and not part.is_exact:
                answer = self.catalogue.ask_size(part.id)
                if isinstance(answer, DownloadFault):
                    self._faults[card.id] = answer
                    return str(answer)
        self._faults.pop(card.id, None)
        self._forget_look()
        return None

    def _download(self, said: Mapping[str, Any]) -> None:
        card = self._card(said)
        self._faults.pop(card.id, None)
        for part in card.parts:
            if not part.is_here:
                self.catalogue.downloads.ask(part.id)

    def _known_download(self, said: Mapping[str, Any]) -> str:
        model_id = str(said.get("id"))
        if self.catalogue.downloads.find(model_id) is None:
            raise RequestError(f"There is no download of {model_id}.")
        return model_id

    def _load(self, said: Mapping[str, Any]) -> str | None:
        """Free what is loaded, then load the card's plan. A draft that is not here is left out."""
        card = self._card(said)
        if not card.parts[0].is_here:
            raise RequestError(f"{card.id} is not on this machine yet. Download it first.")
        is_anyway = said.get("anyway") is True
        if card.refusal is not None and not is_anyway:
            raise RequestError(card.refusal)
        has_draft = all(part.is_here for part in card.parts[1:])
        options = card.load_options(is_anyway)
        options = replace(
            options,
            draft=options.draft if has_draft else None,
            home=(self._service.options or LoadOptions()).home,
        )
        self._service.switch(options)
        self._tuning = Tuning()
        if card.draft is not None and not has_draft:
            return f"{card.draft} is not on this machine, so {card.id} is loaded without it."
        return None

    def _card(self, said: Mapping[str, Any]) -> Card:
        wanted = str(said.get("id"))
        for card in cards_of(self._fresh_look().recommendation):
            if card.id == wanted:
                return card
        raise RequestError(f"{wanted} is not among the models that are offered here.")

    # the tune-up

    def _tune(self, said: Mapping[str, Any]) -> None:
        if self._tuning.is_running:
            return
        self._tuning = Tuning(is_running=True)

        def job(backend: Any, cancel: threading.Event) -> None:
            tune_up.tune_up(backend, cancel, self._take)

        self._task = self._service.enqueue(TUNE_UP, job)
        threading.Thread(target=self._wait, args=(self._task,), daemon=True).start()

    def _take(self, result: tune_up.TuneUp) -> None:
        self._tuning = replace(self._tuning, result=result)

    def _wait(self, task: Any) -> None:
        task.done.wait()
        self._tuning = replace(self._tuning, is_running=False, error=task.error)

    def _skip(self, said: Mapping[str, Any]) -> None:
        if self._task is not None:
            self._task.cancel.set()


def cards_of(found: Recommendation) -> tuple[Card, ...]:
    first = () if found.card is None else (found.card,)
    return (*first, *found.smaller, *found.larger, *found.here, *found.others)
