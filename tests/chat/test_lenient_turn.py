"""A lenient turn from the request to the log: settled with the message, counted to the token."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from localspec.chat.local import LocalBackend
from localspec.chat.service import ChatService, ReplySettings
from localspec.core.backend import Chunk, Request
from localspec.core.decoding import DraftPlan, Proposal, SamplingParams, Sequence, chain
from localspec.core.errors import RequestError
from localspec.core.leniency import Threshold
from localspec.core.turn_stats import TurnStats
from localspec.core.workloads import load_workloads
from tests.kit.fakes import FakeBackend
from tests.kit.local_backend import PIECES, SAY, Knowing, ask, backend_of
from tests.kit.tiny import scripted
from tests.kit.waiting import WAIT_S

CODE = "write a function that adds"


def turn_of(service: ChatService, text: str, settings: ReplySettings) -> dict[str, object]:
    reply = service.submit(None, text, settings)
    assert reply is not None and reply.done.wait(WAIT_S)
    assert service.journal.flush()
    return service.store.turn_rows()[-1]


def asked_of(service: ChatService) -> Request:
    backend = service.lifecycle.backend
    assert isinstance(backend, FakeBackend)
    return backend.requests[-1]


def test_the_kind_is_recognised_logged_and_sets_the_first_length_only(service: ChatService) -> None:
    row = turn_of(service, CODE, ReplySettings())
    assert (row["workload"], row["exact"], row["leniency"]) == ("code", True, None)
    assert row["num_lenient_tokens"] == 0
    asked = asked_of(service)
    assert asked.sampling.leniency is None
    assert asked.first_num_draft_tokens == service.workloads["code"].first_num_draft_tokens


def test_a_named_kind_overrides_what_the_message_looks_like(service: ChatService) -> None:
    row = turn_of(service, CODE, ReplySettings(workload="story"))
    assert (row["workload"], row["exact"]) == ("story", True)


def test_a_lenient_turn_is_logged_with_its_rule_and_count(service: ChatService) -> None:
    row = turn_of(service, CODE, ReplySettings(checking="threshold"))
    assert json.loads(str(row["leniency"])) == {"rule": "threshold", "threshold": 0.75}
    steps = service.store.step_rows(int(str(row["turn_id"])))
    counted = sum(step["num_lenient_tokens"] for step in steps)
    assert (row["exact"], row["num_lenient_tokens"]) == (False, counted) and counted > 0
    assert asked_of(service).sampling.leniency == Threshold(0.75)
    # The next one says nothing of leniency, and is exact again.
    assert turn_of(service, CODE, ReplySettings())["exact"] is True


def test_regenerate_settles_by_the_message_it_answers(service: ChatService) -> None:
    reply = service.submit(None, CODE, ReplySettings())
    assert reply is not None and reply.done.wait(WAIT_S) and service.journal.flush()
    again = service.regenerate(reply.handle, ReplySettings(checking="threshold"))
    assert again is not None and again.done.wait(WAIT_S) and service.journal.flush()
    first, second = service.store.turn_rows()
    assert (first["workload"], second["workload"]) == ("code", "code")
    assert (first["exact"], second["exact"]) == (True, False)


def test_a_profile_of_ones_own_makes_its_kind_lenient_and_no_other(service: ChatService) -> None:
    kinds = load_workloads()
    service.workloads = {**kinds, "code": replace(kinds["code"], lenient=True)}
    assert turn_of(service, CODE, ReplySettings())["exact"] is False
    assert turn_of(service, CODE, ReplySettings(checking="exact"))["exact"] is True
    assert turn_of(service, "hello", ReplySettings())["exact"] is True


@pytest.mark.parametrize(("workload", "checking"), [("poems", "as set"), ("code", "very")])
def test_an_unknown_choice_stores_nothing(
    service: ChatService, workload: str, checking: str
) -> None:
    with pytest.raises(RequestError):
        service.submit(None, CODE, ReplySettings(workload=workload, checking=checking))
    assert service.conversations() == []


# -- over the engine itself: the model writes "abab…", the drafter is sure of "xyxy…" -------------

SURE = SamplingParams(leniency=Threshold(0.5))


class Sure(Knowing):
    """Says its script whatever the model says, and says how sure it is."""

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        found = super().propose(sequence, plan)
        return chain(found.tokens, (0.9,) * len(found.tokens))


def unlike_its_drafter(*said: str) -> LocalBackend:
    """A model that answers HELLO with a's and b's, beside a drafter that would say `said`."""
    target = scripted([SAY[piece] for piece in "abababababab"], 3, len(PIECES))
    return backend_of(target, {"knowing": Sure([SAY[piece] for piece in said], 3)})


def stats_of(chunks: list[Chunk]) -> TurnStats:
    steps = [chunk.step for chunk in chunks if chunk.step is not None]
    stats = chunks[-1].stats
    assert stats.num_lenient_tokens == sum(step.num_lenient_tokens for step in steps)
    assert stats.num_lenient_tokens <= stats.num_accepted_tokens
    return stats


def test_every_token_taken_against_the_model_is_counted() -> None:
    backend = unlike_its_drafter("y", "a", "y", "y", "y", "y")  # the model says a, then b
    chunks = ask(backend, drafter="knowing", num_draft_tokens=2, max_tokens=3, sampling=SURE)
    assert "".join(chunk.text for chunk in chunks) == "yaa"  # the last by the model
    stats = stats_of(chunks)
    assert (stats.exact, stats.num_lenient_tokens, stats.num_output_tokens) == (False, 2, 3)


def test_the_same_request_without_leniency_is_exact() -> None:
    backend = unlike_its_drafter("y", "a", "y", "y", "y", "y")
    chunks = ask(backend, drafter="knowing", num_draft_tokens=2, max_tokens=3)
    assert "".join(chunk.text for chunk in chunks) == "aba"
    assert (stats_of(chunks).exact, stats_of(chunks).num_lenient_tokens) == (True, 0)


def test_a_token_that_the_model_agrees_with_is_not_counted() -> None:
    backend = unlike_its_drafter("a", "b", "y", "b")
    chunks = ask(backend, drafter="knowing", num_draft_tokens=4, max_tokens=5, sampling=SURE)
    assert stats_of(chunks).num_lenient_tokens == 1


@pytest.mark.parametrize(("stop", "num_lenient"), [("x", 2), ("yy", 2), ("yyy", 3)])
def test_what_a_stop_string_cuts_off_is_not_counted(stop: str, num_lenient: int) -> None:
    said = ("y", " x") if stop == "x" else ("y",) * 5
    backend = unlike_its_drafter(*said, "y", "y", "y")
    chunks = ask(backend, drafter="knowing", num_draft_tokens=4, sampling=SURE, stop=(stop,))
    assert chunks[-1].finish_reason == "stop"
    assert stats_of(chunks).num_lenient_tokens == num_lenient


def test_an_end_of_text_taken_unchecked_ends_the_reply_and_is_no_token_of_it() -> None:
    backend = unlike_its_drafter("y", "", "y", "y", "y")
    chunks = ask(backend, drafter="knowing", num_draft_tokens=4, sampling=SURE)
    assert chunks[-1].finish_reason == "eos"
    stats = stats_of(chunks)
    assert (stats.num_output_tokens, stats.num_lenient_tokens) == (1, 1)
