"""Replies for other programs, which send a whole conversation each time.

Contract: `answer` queues a reply among those of the pages, with the same engine, settings and
exactness. At most `most_waiting` of all replies may wait. Each conversation is logged under the
source of programs and is in no page's list. `stop` ends a reply within one round.

Not here: the interfaces by which programs ask (api), what of a conversation is new to the log
(logged_history).
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

from localspec.backend import Description, Request
from localspec.chat.logged_history import asked_in, place
from localspec.chat.service import ChatService
from localspec.chat.turn import Reply, ReplySettings, decided, shared
from localspec.errors import EngineLost, QueueFull, RequestError
from localspec.record.rows import API
from localspec.workloads import AS_SET

MOST_WAITING = 32


class ProgramService:
    def __init__(self, service: ChatService, most_waiting: int = MOST_WAITING) -> None:
        self.service = service
        self._most_waiting = most_waiting
        self._asking = threading.Lock()

    @property
    def known(self) -> Description | None:
        """See BackendLifecycle."""
        return self.service.lifecycle.known

    def answer(self, request: Request, checking: str = AS_SET) -> Reply:
        """Queue the reply. request: its workload may be AUTO; a seed is drawn where it has none.
        checking: see workloads.decide.

        Raises QueueFull, and ContextOverflow or RequestError with nothing stored; while the model
        loads, or does not answer, the request is checked when its turn begins.
        """
        with self._asking:  # of two that ask at once, the first may take the last place
            num_waiting = self.service.worker.num_waiting
            if num_waiting >= self._most_waiting:
                raise QueueFull(num_waiting, self._usual_seconds())
            wanted = ReplySettings(
                **shared(request), system_prompt=request.system_prompt, checking=checking
            )
            settings = decided(wanted, self.service.workloads, asked_in(request.messages))
            request = replace(request, **shared(settings))
            with suppress(EngineLost):  # the next engine checks it
                self.service.check(request)
            self.service.flush()  # a reply that has just ended is found in the log
            reply = Reply(place(self.service.store, API, request), settings, request)
            self.service.journal.add(reply.pending)
            self.service.worker.queue(reply)
            return reply

    def count_tokens(self, request: Request) -> int:
        """Of its prompt. Raises LocalspecError, also while no model is loaded."""
        backend, _ = self.service.lifecycle.require()
        found = backend.count_tokens(request.messages, request.tools)
        if found is None:
            raise RequestError(
                "The server that answers here does not count tokens. Send the messages and read "
                "the usage of the reply."
            )
        return found

    def stop(self, reply: Reply) -> None:
        """End it within one round, or take it out of the queue."""
        self.service.stop(reply)

    def _usual_seconds(self) -> float:
        """How long a reply takes, by the one that ended last."""
        latest = self.service.latest
        return 1.0 if latest is None else latest.view.seconds
