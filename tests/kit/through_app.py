"""Replies of `python app.py`, from its flags to the text, with the engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import app
from localspec.chat.local import LocalBackend
from localspec.chat.service import ChatService, ReplySettings
from localspec.core.decoding import OFF, SamplingParams
from localspec.forward.features import Features
from localspec.remote.wire import Opening
from tests.kit.services import ended
from tests.kit.waiting import until

Plant = Callable[[pytest.MonkeyPatch, LocalBackend], None]


@dataclass(frozen=True)
class RunningApp:
    """The service that `app.py` has put together, with its model loaded."""

    service: ChatService

    @property
    def backend(self) -> LocalBackend:
        assert isinstance(self.service.lifecycle.backend, LocalBackend)
        return self.service.lifecycle.backend

    def replies(
        self,
        questions: Sequence[str],
        drafter: str,
        sampling: SamplingParams = SamplingParams(),
        plant: Plant | None = None,
    ) -> tuple[list[str], float]:
        """Each the reply of a new chat, and the share of the draft tokens that were accepted.
        plant: what is wrong meanwhile."""
        settings = ReplySettings(sampling, 48, drafter, None if drafter == OFF else 3)
        with pytest.MonkeyPatch.context() as patch:
            if plant is not None:
                plant(patch, self.backend)
            found = [
                ended(self.service, self.service.submit(None, question, settings)).view
                for question in questions
            ]
        assert [view.error for view in found] == [None] * len(questions)
        stats = [view.stats for view in found if view.stats is not None]
        drafted = sum(one.num_draft_tokens for one in stats)
        accepted = sum(one.num_accepted_tokens for one in stats)
        return [view.text for view in found], accepted / max(1, drafted)


def states_one_off(patch: pytest.MonkeyPatch, backend: LocalBackend) -> None:
    """A head reads the target's state of the token before."""
    rows = Features.rows

    def earlier(self: Features, layer: int, start: int, end: int) -> Any:
        return rows(self, layer, max(0, start - 1), end - 1 if start else end)

    patch.setattr(Features, "rows", earlier)


def check_head(
    running: RunningApp, name: str, questions: Sequence[str], wrong: Sequence[Plant], margin: float
) -> tuple[list[str], float]:
    """A head is loaded and drafts; no variant changes a reply, and of each wrong one a share of the
    draft tokens is accepted that is smaller by `margin`. Returns the replies and the share."""
    described = running.backend.describe()
    assert not [notice for notice in described.notices if "asked for" in notice]
    (status,) = (each for each in described.drafters if each.name == name)
    assert status.is_available and status.memory_bytes, status.reason
    plain, _ = running.replies(questions, OFF)
    texts, right = running.replies(questions, name)
    assert texts == plain
    for plant in wrong:
        same, share = running.replies(questions, name, plant=plant)
        assert same == plain and share <= right - margin, (plant.__name__, share, right)
    return texts, right


@contextmanager
def _in_this_process(serve: Callable[..., None]) -> Iterator[None]:
    def open_here(opening: Opening, report: Callable[[str], None]) -> Any:
        module, _, name = opening.function.partition(":")
        return getattr(import_module(module), name)(**opening.keywords, report=report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("localspec.web.server.serve", serve)
        patch.setattr("localspec.remote.child.ChildBackend.open", open_here)
        patch.setattr(LocalBackend, "calibrate", lambda self, cancel: iter(()))
        yield


def through_app(home: Path, flags: Sequence[str], use: Callable[[RunningApp], None]) -> None:
    """Run `app.py` with these flags as far as the page, and use what it would serve."""
    was_used = False

    def serve(service: ChatService, *_: Any) -> None:
        nonlocal was_used
        service.start()
        try:
            until(lambda: service.status().phase in ("ready", "failed"))
            assert service.status().phase == "ready", service.status().phrase
            use(RunningApp(service))
            was_used = True
        finally:
            service.close()

    with _in_this_process(serve):
        flags = [*flags, "--home", str(home), "--port", "0", "--no-browser"]
        app.start(app.parse_arguments(flags))
    assert was_used
