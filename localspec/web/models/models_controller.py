"""The controller of the Models tab: what it shows and what its buttons do.

Contract: `view` gives all parts of the tab as HTML; the machine is read again at most every
READ_AGAIN_S seconds, unless something changed. `act` does what a button asks and tells what is to
be shown. Only models that were offered can be named; the route decides who may name a folder. Only
the acts "download", "resume", "size" and "search" use the network.

Not here: HTML (templates/models.html), what is recommended and why (machine.recommend).
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from localspec.chat.service import ChatService
from localspec.chat.tune_up import TEMPERATURES, TuneUp, in_words, tune_up
from localspec.core.backend import Backend, Description
from localspec.core.config import settings_for
from localspec.core.decoding import OFF
from localspec.core.errors import RequestError, StoreError
from localspec.core.options import LoadOptions, RemoteServer
from localspec.drafters.registry import REGISTRY
from localspec.machine import downloads
from localspec.machine.catalogue import Catalogue, CatalogueState
from localspec.machine.download_faults import DownloadFault
from localspec.machine.downloads import Download
from localspec.machine.found_line import found_line
from localspec.machine.model import Model
from localspec.machine.plans import DEFAULT_CONTEXT, Plan
from localspec.machine.recommend import Card
from localspec.record.api_keys import MOST_CHARACTERS
from localspec.record.rows import RecentGain
from localspec.web.live import precision_words, short
from localspec.web.markup import macros
from localspec.web.stats import hindsight

READ_AGAIN_S = 15.0
MAX_WORDS = 100  # characters of a search
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
DEVICES = {"cuda": "this GPU", "mps": "this Mac", "cpu": "this computer"}
SIZES = {  # as the hub writes a number of parameters, and in words
    "": "Any size", "1B": "Up to 1 B", "4B": "Up to 4 B", "9B": "Up to 9 B", "15B": "Up to 15 B",
    "35B": "Up to 35 B",
}  # fmt: skip
Told = dict[str, str | None]  # "message" and "key", after a click


def _summary_of(drafter: str) -> str:
    no_drafter = "nothing: the model writes without a drafter"
    return no_drafter if drafter == OFF else REGISTRY[drafter].summary


PAGE = macros(
    "models.html",
    found_line=found_line,
    summary_of=_summary_of,
    precision_words=precision_words,
    progress=downloads.in_words,
    so_far=downloads.so_far,
    verdict=in_words,
    temperatures=TEMPERATURES,
)


class Around(NamedTuple):
    """What the lines of the models stand among. faults: of dry runs. loaded: the target. lately:
    the gain of the last replies. All by model."""

    downloads: tuple[Download, ...]
    faults: Mapping[str, DownloadFault]
    loaded: str | None
    lately: Mapping[str, RecentGain]


class Tuning:
    """A tune-up in the service's queue. result: what is measured so far."""

    def __init__(self, service: ChatService) -> None:
        self.result: TuneUp | None = None
        self.task = service.enqueue("Tune-up: trying a drafter of each kind", self._run)

    @property
    def is_running(self) -> bool:
        return not self.task.done.is_set()

    def _run(self, backend: Backend, cancel: threading.Event) -> None:
        tune_up(backend, cancel, self._take)

    def _take(self, result: TuneUp) -> None:
        self.result = result


class ModelsController:
    """One for each server."""

    def __init__(self, service: ChatService, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._service = service
        self._lock = threading.Lock()
        self._state: CatalogueState | None = None
        self._read_s = 0.0
        self._seen: object = None
        self._context_length = DEFAULT_CONTEXT
        self._folder: str | None = None
        self._faults: dict[str, DownloadFault] = {}  # of dry runs
        self._lately: Mapping[str, RecentGain] = {}
        self._searched = ("", "")  # words and size
        self._found: tuple[Model, ...] | DownloadFault | None = None
        self.tuning: Tuning | None = None
        self._server = None if service.options is None else service.options.remote
        self._acts: dict[str, Callable[[Mapping[str, Any]], str | Told | None]] = {
            "context": self._choose_context,
            "folder": self._choose_folder,
            "search": self._search,
            "size": self._ask_sizes,
            "download": self._download,
            "pause": lambda said: self.catalogue.downloads.pause(self._known_download(said)),
            "resume": lambda said: self.catalogue.downloads.ask(self._known_download(said)),
            "cancel": lambda said: self.catalogue.downloads.cancel(self._known_download(said)),
            "forget": lambda said: self.catalogue.downloads.forget(self._known_download(said)),
            "connect": self._connect,
            "load": self._load,
            "unload": lambda said: self._service.unload(),
            "retry": lambda said: self._service.retry(),
            "tune": self._tune,
            "skip": self._skip,
            "make-key": self._make_key,
            "revoke-key": self._revoke_key,
        }

    # what is shown

    def view(self) -> dict[str, Any]:
        """{"parts": {name: html}, "ready": [what the menu over the chat offers]}."""
        state, status = self._machine(), self._service.status()
        found, under_way = state.recommendation, self.catalogue.downloads.downloads
        loaded = None if status.description is None else status.description.target
        around = Around(tuple(under_way), self._faults, loaded, self._lately)
        shown = {each.id for each in self._results()}
        shown |= {id for card in self.cards() for id in card.fetched_ids}
        parts = {
            "found": PAGE.found(state, [(each, f"{each:,} tokens") for each in CONTEXTS]),
            "loaded": PAGE.loaded(status, self._service.options),
            "first": PAGE.first(found, DEVICES[state.hardware.device], around),
            "here": PAGE.here(found, around),
            "search": PAGE.search(*self._searched, SIZES.items()),
            "results": PAGE.results(
                self._found,
                {each.model_id: each for each in under_way},
                {card.id: card for card in found.here},
                state.free_bytes,
            ),
            "downloads": PAGE.downloads([one for one in under_way if one.model_id not in shown]),
            "elsewhere": PAGE.elsewhere(state.others),
            "folder": PAGE.folder(state),
            "server": PAGE.server("" if self._server is None else self._server.url),
            "others": PAGE.others(found, around),
            "programs": PAGE.programs(self._service.api_keys.all(), loaded, MOST_CHARACTERS),
            "tune": PAGE.tune(
                self.tuning,
                status.description is not None and status.description.server is None,
                hindsight.COLUMNS,
                self._judged(status.description),
            ),
        }
        made = {name: part.strip() for name, part in parts.items()}
        return {"parts": made, "ready": self._ready(status.description)}

    def _judged(self, loaded: Description | None) -> list[tuple[str, ...]]:
        """What the drafters would have gained in the chats with this model; empty if unknown."""
        if loaded is None:
            return []
        usable = [each.name for each in loaded.drafters if each.is_available]
        try:
            return hindsight.lines(self._service.store.hindsight.of_model(loaded.target), usable)
        except StoreError:  # Stats says why the log cannot be read.
            return []

    def _ready(self, loaded: Description | None) -> list[dict[str, Any]]:
        """The models that are whole on this machine, each as it would be loaded, and the server
        that was connected last."""
        target = None if loaded is None or loaded.server is not None else loaded.target
        ready = [
            {
                "id": card.id,
                "name": short(card.name),
                "words": precision_words(card.plan.precision, _draft_at_load(card)),
                "is_loaded": card.id == target,
            }
            for card in self.cards()
            if card.has_target
        ]
        return ready if self._server is None else [_entry_of(self._server, loaded), *ready]

    def _machine(self) -> CatalogueState:
        """The machine as it was read last; read again after a while, or when something changed
        that it depends on."""
        description = self._service.status().description
        downloads, folder = self.catalogue.downloads.downloads, self._folder
        done = tuple(each.model_id for each in downloads if each.state == "done")
        seen = (description and description.target, done, self._context_length, folder)
        with self._lock:
            is_old = time.monotonic() - self._read_s > READ_AGAIN_S
            if self._state is None or is_old or seen != self._seen:
                freed = 0 if description is None else description.held_bytes or 0
                self._state = self.catalogue.read(self._context_length, freed, folder)
                self._lately = self._service.recent_gains()
                self._read_s, self._seen = time.monotonic(), seen
            return self._state

    def _read_again(self) -> None:
        with self._lock:
            self._state = None

    # what the buttons do

    def act(self, said: Mapping[str, Any]) -> Told:
        """Do what was asked; a sentence where there is something to say, and the key that was made,
        which stands in this answer and nowhere else. Raises RequestError, StoreError."""
        act = self._acts.get(str(said.get("act")))
        if act is None:
            raise RequestError(
                "The page asked for something this version does not know. Reload it."
            )
        told = act(said)
        return told if isinstance(told, dict) else {"message": told}

    def _choose_context(self, said: Mapping[str, Any]) -> None:
        wanted = said.get("value")
        if wanted not in CONTEXTS:
            raise RequestError(f"A context of {wanted} tokens cannot be planned for.")
        self._context_length = int(wanted)

    def _choose_folder(self, said: Mapping[str, Any]) -> None:
        """What is wrong with it stands in its part of the tab. Windows copies a path in quotes."""
        self._folder = str(said.get("value", "")).strip().strip('"') or None
        self._read_again()

    def _ask_sizes(self, said: Mapping[str, Any]) -> str | None:
        """The dry run of everything the card would fetch."""
        card = self._card(said)
        for part in card.parts:
            if not part.is_here and not part.is_exact:
                answer = self.catalogue.downloads.survey(part.id)
                if isinstance(answer, DownloadFault):
                    self._faults[card.id] = answer
                    return str(answer)
        self._faults.pop(card.id, None)
        self._read_again()
        return None

    def _search(self, said: Mapping[str, Any]) -> None:
        words, size = str(said.get("value", "")).strip()[:MAX_WORDS], str(said.get("size", ""))
        if size not in SIZES:
            raise RequestError("The page asked for a size that is none. Choose one of its list.")
        self._found = self.catalogue.downloads.search(words, size)
        self._searched = words, size  # the form is made anew once there is an answer

    def _results(self) -> tuple[Model, ...]:
        return self._found if isinstance(self._found, tuple) else ()

    def _download(self, said: Mapping[str, Any]) -> None:
        """Fetch a result of a search, one drafter that was offered, or all parts of a card."""
        wanted = str(said.get("id"))
        is_result = wanted in {each.id for each in self._results()}
        cards = self.cards()
        is_offer = any(card.offer_of(wanted) for card in cards)
        if is_result or (is_offer and wanted not in {card.id for card in cards}):
            self.catalogue.downloads.ask(wanted)
            return
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

    def _connect(self, said: Mapping[str, Any]) -> None:
        """Free what is loaded, then attach to a server that answers. Raises ConfigError."""
        server = RemoteServer(str(said.get("value", "")), key=str(said.get("key") or "") or None)
        self._attach(server)
        self._server = server

    def _attach(self, server: RemoteServer) -> None:
        now = self._service.options or LoadOptions()
        self._service.switch(LoadOptions(remote=server, home=now.home, parallel=now.parallel))
        self.tuning = None

    def _load(self, said: Mapping[str, Any]) -> str | None:
        """Free what is loaded, then load the card's plan or that of a drafter which was chosen, or
        attach to the server again. A draft that is not here is left out."""
        if self._server is not None and said.get("id") == self._server.url:
            self._attach(self._server)
            return None
        card = self._card(said)
        if not card.has_target:
            raise RequestError(f"{card.name} is not on this machine yet. Download it first.")
        is_anyway = said.get("anyway") is True
        if card.refusal is not None and not is_anyway:
            raise RequestError(card.refusal)
        plan = self._chosen_plan(card, said.get("drafter"))
        options = card.load_options(is_anyway, plan)
        if plan.draft is not None and not plan.draft.is_here:
            options = replace(options, draft=None, draft_device=None)
        home = (self._service.options or LoadOptions()).home
        asked = self.catalogue.asked
        experts = options.experts or asked.experts
        options = replace(options, home=home, device=asked.device, experts=experts)
        self._service.switch(options)
        self.tuning = None
        missing = card.plan.draft
        if said.get("drafter") is None and missing is not None and not missing.is_here:
            return f"{missing.name} is not on this machine, so {card.name} is loaded without it."
        return None

    def _chosen_plan(self, card: Card, drafter: object) -> Plan:
        """Return the plan with the drafter that was named, else the best with what is here. Raises
        RequestError."""
        if drafter is None:
            return card.ready or card.plan
        offer = card.offer_of(str(drafter))
        if offer is None or offer.plan is None or not offer.is_here:
            raise RequestError(f"{drafter} cannot be loaded with {card.name} now. Reload the page.")
        return offer.plan

    def cards(self) -> tuple[Card, ...]:
        """Every model that is offered."""
        found = self._machine().recommendation
        first = () if found.card is None else (found.card,)
        return (*first, *found.smaller, *found.larger, *found.here, *found.others)

    def _card(self, said: Mapping[str, Any]) -> Card:
        wanted = str(said.get("id"))
        for card in self.cards():
            if card.id == wanted:
                return card
        raise RequestError(f"{wanted} is not among the models that are offered here.")

    def _tune(self, said: Mapping[str, Any]) -> None:
        if self.tuning is None or not self.tuning.is_running:
            self.tuning = Tuning(self._service)

    def _skip(self, said: Mapping[str, Any]) -> None:
        if self.tuning is not None:
            self.tuning.task.cancel.set()

    def _make_key(self, said: Mapping[str, Any]) -> Told:
        name = str(said.get("value", "")).strip()
        key = self._service.api_keys.make(name)
        return {"message": f"The key {name!r}, shown this once:", "key": key}

    def _revoke_key(self, said: Mapping[str, Any]) -> None:
        self._service.api_keys.revoke(str(said.get("id")))


def _draft_at_load(card: Card) -> str | None:
    """Return the name of what drafts if a card is loaded now."""
    return (card.ready or card.plan).draft_name


def _entry_of(server: RemoteServer, loaded: Description | None) -> dict[str, Any]:
    """Of the menu over the chat: the server's model while it is connected, else its address."""
    is_loaded = loaded is not None and loaded.server is not None
    name = short(loaded.target) if loaded is not None and is_loaded else "Server"
    return {"id": server.url, "name": name, "words": server.url, "is_loaded": is_loaded}


def controller_of(service: ChatService) -> ModelsController:
    """The controller of a service: profiles and downloads lie where its log lies."""
    asked = service.options or LoadOptions()
    settings = settings_for(service.data_folder)
    catalogue = Catalogue(settings, measured=service.measurements, asked=asked)
    atexit.register(catalogue.close)  # a download must not outlive the app
    return ModelsController(service, catalogue)
