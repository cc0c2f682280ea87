"""The states of the backend: loading, ready, measuring, unloaded, restarting, failed.

Contract: one thread calls the methods, `try_out` apart; the attributes may be read from any. A
load that fails becomes the phase "failed" with its sentence, never an exception. A lost engine is
opened again until it was lost MOST_LOSSES times in a row; then it waits for `reload`.

Not here: the queue (worker), where an engine runs (remote, load).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localspec.chat.turn import ServicePhase, unexpected
from localspec.core.backend import Backend, Description, Report, Request
from localspec.core.errors import EngineLost, LocalspecError
from localspec.core.hindsight import Hindsight
from localspec.core.options import LoadOptions, Offer

MOST_LOSSES = 3
SAVE_STATE_S = 10.0
SHORTEST_CONTEXT = 512
CONTEXT_STEP = 256

LOST_MEASURING = "The engine ended while this machine was measured."
START_AGAIN = "Start the engine again, or load a smaller model in the Models tab."
NOT_RUNNING = (
    "No engine was running, so this was not answered. Start the engine again, then press "
    "Regenerate."
)
NOTHING_LEFT = (
    "No draft is left that could be freed, and the context is as short as this conversation allows."
)

Opener = Callable[[Report], Backend]
Smaller = Callable[[LoadOptions, Description], Offer | None]

log = logging.getLogger(__name__)


class Abandoned(Exception):
    """Loading was ended because something else was asked for meanwhile."""


class BackendLifecycle:
    """The one backend of a service, or its absence.

    opener: opens `options`, which are None where the caller does not name them. opener_for: the
    opener of other options, None where nothing else can be opened. smaller: finds a smaller plan
    when memory is short and nothing more can be freed; offer: what it found. losses_in_a_row:
    engines lost since the last job that went well. was_lost: whether the present one replaces a
    lost one. opened_s: when it was opened, on the monotonic clock.
    """

    def __init__(
        self,
        opener: Opener,
        store_state: Callable[[dict[str, Any]], None],
        options: LoadOptions | None = None,
        opener_for: Callable[[LoadOptions], Opener] | None = None,
        smaller: Smaller | None = None,
    ) -> None:
        self.opener = opener
        self.options = options
        self.backend: Backend | None = None
        self.loaded: Description | None = None  # as of the last job: asked in one thread only
        self._unloaded: Description | None = None  # the next job loads it again
        self.notices: tuple[str, ...] = ()
        self.needs_calibration = False
        self.was_lost = False
        self.losses_in_a_row = 0
        self.phase: ServicePhase = "loading"
        self.phrase = "Loading the model"
        self.pause = threading.Event()  # ends measuring after the step under way
        self.abandon = threading.Event()  # ends a load under way
        self.offer: Offer | None = None
        self._opener_for = opener_for
        self._smaller = smaller
        self._store_state = store_state
        self._saved_s: float | None = None
        self._since_s = time.monotonic()
        self.opened_s = self._since_s

    @property
    def known(self) -> Description | None:
        """What is loaded, or was until it was unloaded and is loaded again by the next job; None
        where neither is known."""
        unloaded = None if self.phase == "failed" else self._unloaded
        return unloaded if self.loaded is None else self.loaded

    @property
    def seconds(self) -> float:
        """How long the present phase has lasted."""
        return time.monotonic() - self._since_s

    def enter(self, phase: ServicePhase, phrase: str) -> None:
        self._since_s = time.monotonic()
        self.phase, self.phrase = phase, phrase

    # open and close

    def load(self) -> None:
        """Open the backend, again after a loss, until it is there or has failed."""
        self.enter("loading", "Loading the model")
        self._open()

    def _open(self) -> None:
        while self.backend is None and self.phase in ("loading", "restarting"):
            self._try_to_open()

    def _try_to_open(self) -> None:
        try:
            backend = self.opener(self._report)
            self.loaded = backend.describe()
        except Abandoned:
            self.enter("unloaded", "Loading was ended.")
        except EngineLost as error:
            self._count_loss(error)
        except LocalspecError as error:
            self.enter("failed", str(error))
        except Exception as error:  # the edge of this thread: the page stays up and says why
            log.exception("loading failed")
            self.enter("failed", unexpected("Loading the model", error))
        else:
            self.backend, self.opened_s = backend, time.monotonic()
            self.needs_calibration = True
            self.enter("ready", "Ready")

    def _report(self, phrase: str) -> None:
        if self.abandon.is_set():
            raise Abandoned
        self.phrase = phrase

    def release(self, phrase: str) -> None:
        """Save what was learnt and free everything; the next job loads it again."""
        self._unloaded = self.known
        self.close()
        self.enter("unloaded", phrase)

    def close(self) -> None:
        self.save_state(at_most_every_s=0.0)
        backend, self.backend, self.loaded = self.backend, None, None
        self.needs_calibration = False
        if backend is not None:
            backend.close()

    def reload(self) -> None:
        """Free what is loaded, then load again; losses are counted from 0."""
        self.close()
        self.losses_in_a_row, self.was_lost, self.notices, self.offer = 0, False, (), None
        self.load()

    def switch(self, options: LoadOptions) -> None:
        """Free what is loaded, then load `options`."""
        self.options, self.opener, self._unloaded = options, self._opener_of(options), None
        self.reload()

    def try_out(self, options: LoadOptions) -> None:
        """Open what takes no memory and close it, beside what is loaded; in any thread. Raises
        LocalspecError where it cannot be opened."""
        self._opener_of(options)(lambda phrase: None).close()

    def _opener_of(self, options: LoadOptions) -> Opener:
        assert self._opener_for is not None, "the caller gave no way to open other options"
        return self._opener_for(options)

    # when the engine is lost

    def restart(self, error: EngineLost) -> None:
        """Open an engine in place of one that was lost, unless that happens too often."""
        if self.backend is not None:
            self.backend.close()
        self.backend, self.needs_calibration = None, False
        self._count_loss(error)
        self._open()

    def _count_loss(self, error: EngineLost) -> None:
        self.losses_in_a_row += 1
        self.was_lost = True
        log.warning("the engine was lost (%d in a row): %s", self.losses_in_a_row, error)
        if self.losses_in_a_row < MOST_LOSSES:
            self.enter("restarting", "Starting the engine again")
            return
        self.loaded = None
        self.enter(
            "failed",
            f"{error} That was {self.losses_in_a_row} times in a row, so it is not started again "
            f"by itself. {START_AGAIN}",
        )

    def went_well(self) -> None:
        """Reset the count of losses after a job that was done to its end, and do in idle time what
        it has asked for."""
        self.losses_in_a_row = 0
        self._remove_lost_notice()
        self.save_state()
        if self.loaded is not None and self.loaded.has_idle_work:
            self.needs_calibration = True

    def _remove_lost_notice(self) -> None:
        self.notices = tuple(one for one in self.notices if one != LOST_MEASURING)

    @property
    def num_slots(self) -> int:
        """How many replies can be written at the same time."""
        return 1 if self.loaded is None else self.loaded.num_slots

    def require(self) -> tuple[Backend, Description]:
        """What is loaded. Raises LocalspecError, with the reason, while nothing is."""
        if self.backend is None or self.loaded is None:
            lost_too_often = self.losses_in_a_row >= MOST_LOSSES
            raise LocalspecError(NOT_RUNNING if lost_too_often else self.phrase)
        return self.backend, self.loaded

    # what it learns

    def calibrate(self) -> None:
        """Do what is to be done in idle time, such as measuring costs, until done or paused."""
        assert self.backend is not None
        self.enter("calibrating", "Measuring this machine")
        try:
            for phrase in self.backend.calibrate(self.pause):
                self.phrase = phrase
        except EngineLost:
            self.needs_calibration = False
            self.notices += (LOST_MEASURING,)
            raise
        except Exception as error:  # the chat works without measured costs
            log.exception("calibration failed")
            self.notices += (unexpected("Measuring this machine", error),)
            self.needs_calibration = False
        else:
            self.needs_calibration = self.pause.is_set()
            self._remove_lost_notice()
        self.save_state(at_most_every_s=0.0)
        self.enter("ready", "Ready")

    def review(self, request: Request) -> tuple[Hindsight, ...]:
        """What each drafter would have done in the newest reply, until done or paused."""
        assert self.backend is not None
        results = list[Hindsight]()
        try:
            results += self.backend.review(request, self.pause)
        except EngineLost:
            raise
        except Exception:  # nobody asked for it, and the chat works without
            log.exception("the drafters could not be judged by the reply")
        return tuple(results)

    def save_state(self, at_most_every_s: float = SAVE_STATE_S) -> None:
        """Update the description, and hand what was learnt to the log at most so often."""
        if self.backend is None:
            return
        now = time.monotonic()
        try:
            self.loaded = self.backend.describe()
            if self._saved_s is None or now - self._saved_s >= at_most_every_s:
                self._saved_s = now
                self._store_state(self.backend.snapshot())
        except EngineLost:
            log.warning("what the engine learnt since it was last saved is lost")
        except Exception:  # without it the next start measures again
            log.exception("the controller's state could not be saved")

    # when memory runs out and the backend can free nothing more

    def shorter(self, num_needed_tokens: int) -> LoadOptions | None:
        """The options with about half the context, but no less than needed; None where that would
        not be at least a quarter shorter."""
        context = None if self.loaded is None else self.loaded.context_length
        if self._opener_for is None or self.options is None or context is None:
            return None
        needed = -(-num_needed_tokens // CONTEXT_STEP) * CONTEXT_STEP
        wanted = max(context // 2, needed, SHORTEST_CONTEXT)
        return replace(self.options, context=wanted) if wanted <= 3 * context // 4 else None

    def offer_smaller(self) -> str:
        """Set `offer` where a smaller plan is known; the sentences to show."""
        if self._smaller is not None and self.options is not None and self.loaded is not None:
            self.offer = self._smaller(self.options, self.loaded)
        if self.offer is None:
            return f"{NOTHING_LEFT} Choose a smaller model, or start a new chat."
        return f"{NOTHING_LEFT} A smaller plan: {self.offer.text}"
