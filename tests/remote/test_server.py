"""A server of somebody's behind the seam: what is asked of it, what it tells, how it fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.service import ChatService, ReplySettings
from localspec.core.backend import Backend, Chunk, Message, Request
from localspec.core.config import with_server
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.errors import ConfigError, LocalspecError, NotCounted, RequestError
from localspec.core.leniency import Threshold
from localspec.core.options import LoadOptions, RemoteFlags, RemoteServer
from localspec.core.turn_stats import TurnStats
from localspec.record.store import Store
from localspec.remote.remote_turn import NOT_ALONE, TOLD_NOTHING
from localspec.remote.server import ServerBackend
from localspec.web.live import live_state
from localspec.web.talk.form import Form
from tests.kit.fakes import session_info
from tests.kit.stub_server import Stub
from tests.kit.waiting import WAIT_S, until

ASKED = (Message("system", "Be brief."), Message("user", "Rain?"))
NEVER = threading.Event()
SGLANG = {
    "sglext": {
        "spec_tokens_details": {
            "spec_verify_ct": 5, "spec_num_proposed_drafts": 20, "spec_num_correct_drafts": 7,
        }
    }
}  # fmt: skip


@pytest.fixture
def opened_backends() -> Iterator[list[ServerBackend]]:
    backends: list[ServerBackend] = []
    yield backends
    for backend in backends:
        backend.close()


@pytest.fixture
def open_it(opened_backends: list[ServerBackend]) -> Any:
    def open_backend(stub: Stub, **more: Any) -> ServerBackend:
        opened_backends.append(ServerBackend(RemoteServer(stub.url), **more))
        return opened_backends[-1]

    return open_backend


def chunks(backend: Backend, **more: Any) -> list[Chunk]:
    return list(backend.generate(Request(**{"messages": ASKED, **more}), NEVER))


def text_of(found: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in found)


def test_it_says_what_it_is_and_what_it_cannot_do(stub: Stub, open_it: Any) -> None:
    found = open_it(stub, num_slots=3)
    said = found.describe()
    assert (said.target, said.context_length, said.dtype) == ("stub-1b", 512, None)
    assert said.server.name == "vLLM 9.9"
    assert said.server.models == ("stub-1b",)
    assert "plain decoding" in said.server.limits[0]
    assert said.num_slots == 3
    assert said.drafters == ()
    assert found.count_tokens(ASKED) == 9
    assert found.snapshot() == {}, "it learns nothing"


def test_a_reply_is_asked_for_whole_and_streams(stub: Stub, open_it: Any) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, seed=11)
    found = chunks(open_it(stub), sampling=sampling, max_tokens=40, stop=("\n\n",))
    assert [chunk.phase for chunk in found] == ["prefill", "decode", "decode", "decode", "done"]
    assert text_of(found) == "Rain falls."
    assert found[-1].finish_reason == "eos"
    body = stub.bodies[-1]
    wanted = {
        "path": "/v1/chat/completions", "model": "stub-1b", "temperature": 0.7, "top_p": 0.9,
        "min_p": 0.05, "top_k": -1, "repetition_penalty": 1.0, "seed": 11, "max_tokens": 40,
        "stop": ["\n\n"], "stream": True,
    }  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
    ]


def test_a_ceiling_is_lowered_to_what_the_servers_context_leaves(stub: Stub, open_it: Any) -> None:
    chunks(open_it(stub), max_tokens=32_000, is_ceiling=True)
    assert stub.bodies[-1]["max_tokens"] == 512 - 9


@pytest.mark.slow
def test_what_was_accepted_is_the_difference_of_its_counters(stub: Stub, open_it: Any) -> None:
    backend = open_it(stub)
    chunks(backend)
    stats = chunks(backend)[-1].stats
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (9, 3)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 12, 6)
    assert stats.told("acceptance_rate") == 0.5
    assert stats.told("drafter") == "server"
    assert stats.told("exact") is None
    assert stats.told("speedup") is None
    assert stats.ttft_ms is not None


@pytest.mark.slow
def test_beside_others_its_counters_tell_nothing_of_one_reply(stub: Stub, open_it: Any) -> None:
    stub.others = 1
    stats = chunks(open_it(stub))[-1].stats
    assert stats.told("num_draft_tokens") is None
    assert stats.told("draft_share") is None
    assert stats.acceptance_rate is None
    assert stats.reason == NOT_ALONE


@pytest.mark.slow
def test_a_reply_that_still_counts_as_running_when_it_has_ended_is_waited_for(
    stub: Stub, open_it: Any
) -> None:
    """A stop text ends a reply in front of the engine, which hears of it later."""
    stub.runs_on_s = 0.1
    stats = chunks(open_it(stub), stop=("\n",))[-1].stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (12, 6)


def test_a_request_that_still_runs_counts_as_another(stub: Stub, open_it: Any) -> None:
    stub.counters["num_requests_running"] = 1
    stats = chunks(open_it(stub))[-1].stats
    assert stats.told("num_draft_tokens") is None


def test_sglang_tells_it_in_the_stream(stub: Stub, open_it: Any) -> None:
    stub.owned_by, stub.extra = "sglang", SGLANG
    found = chunks(open_it(stub))
    stats = found[-1].stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 20, 7)
    assert stub.bodies[-1]["return_spec_tokens_details"] is True


def test_a_server_of_unknown_kind_is_asked_for_openais_fields_only(
    stub: Stub, open_it: Any
) -> None:
    stub.owned_by, stub.context_length = "somebody", None
    backend = open_it(stub)
    stats = chunks(backend)[-1].stats
    assert stats.told("num_draft_tokens") is None
    assert stats.reason == TOLD_NOTHING
    with pytest.raises(NotCounted, match="This server does not count tokens"):
        backend.count_tokens(ASKED)
    assert backend.describe().context_length is None
    assert not {"top_k", "min_p", "repetition_penalty"} & stub.bodies[-1].keys()
    with pytest.raises(RequestError, match="top-k"):
        chunks(backend, sampling=SamplingParams(temperature=1.0, top_k=5))
    with pytest.raises(RequestError, match="cannot continue"):
        chunks(backend, messages=(*ASKED, Message("assistant", "Rain")), continues=True)


@pytest.mark.slow
def test_thoughts_and_probabilities_are_passed_on(stub: Stub, open_it: Any) -> None:
    stub.thinking = ("Hmm", ".")
    found = chunks(open_it(stub), num_logprobs=2, thinks=True)
    assert "".join(chunk.thinking for chunk in found) == "Hmm."
    assert text_of(found) == "Rain falls."
    probable = [one for chunk in found for one in chunk.logprobs]
    assert [one.text for one in probable] == ["Rain", " falls", "."]
    assert probable[0].top == (("Rain", -0.1), ("x", -3.0))
    assert stub.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": True}


def test_a_reply_is_continued_as_it_stands(stub: Stub, open_it: Any) -> None:
    begun = (*ASKED, Message("assistant", "Rain"))
    found = chunks(open_it(stub), messages=begun, continues=True)
    assert found[-1].stats.continued_from == "text"
    body = stub.bodies[-1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1] == {"role": "assistant", "content": "Rain"}


@pytest.mark.slow
def test_a_localspec_server_takes_the_drafter_from_the_request(stub: Stub, open_it: Any) -> None:
    stub.owned_by = "localspec"
    backend = open_it(stub)
    for more in ({}, {"drafter": OFF}, {"drafter": "ngram", "num_draft_tokens": 3}):
        chunks(backend, **more)
    told = [(body.get("drafter"), body.get("num_draft_tokens")) for body in stub.bodies]
    assert told == [(None, None), (OFF, None), ("ngram", 3)]
    assert "plain decoding" not in " ".join(backend.describe().server.limits)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"drafter": OFF}, "by itself"),
        ({"num_draft_tokens": 4}, "by itself"),
        ({"sampling": SamplingParams(leniency=Threshold(0.5))}, "lenient"),
        ({"tools": ({"type": "function"},)}, "plain text"),
        ({"grammar": "start: x"}, "plain text"),
        ({"is_raw": True, "num_logprobs": 1}, "probabilities"),
        ({"thinking_budget": 5}, "how long"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_is_asked(
    stub: Stub, open_it: Any, asked: dict[str, Any], word: str
) -> None:
    backend = open_it(stub)
    with pytest.raises(RequestError, match=word):
        chunks(backend, **asked)
    assert stub.bodies == []


@pytest.mark.slow
def test_a_cancel_reaches_a_server_that_says_nothing(stub: Stub, open_it: Any) -> None:
    stub.stands_after = 2
    cancel = threading.Event()
    found = open_it(stub).generate(Request(ASKED), cancel)
    assert [next(found).phase, next(found).text] == ["prefill", "Rain"]
    threading.Timer(0.05, cancel.set).start()
    assert [chunk.finish_reason for chunk in found] == ["cancelled"]
    assert stub.closed.wait(WAIT_S), "the server was told"


@pytest.mark.slow
def test_a_broken_connection_ends_the_turn_and_the_next_one_connects_again(
    stub: Stub, open_it: Any
) -> None:
    backend = open_it(stub)
    stub.breaks_after = 2
    last = chunks(backend)[-1]
    assert last.finish_reason == "error"
    assert "does not answer" in str(last.error)
    assert "Continue it" in str(last.error)
    stub.breaks_after, stub.model = None, "another-2b"  # it was started again with another model
    assert text_of(chunks(backend)) == "Rain falls."
    assert stub.bodies[-1]["model"] == "another-2b"
    assert backend.describe().target == "another-2b"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent",
    [
        "[1, 2]",
        '"words"',
        '{"choices": "words"}',
        '{"choices": [null]}',
        '{"choices": [{"delta": "words"}]}',
        '{"choices": [{"delta": {"content": 42}}]}',
        '{"choices": [{"delta": {"content": ["a", "b"]}}]}',
        '{"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{}]}}]}',
        '{"choices": [{"delta": {"con',
        "\udcff",
    ],
)
def test_an_event_that_is_none_of_openais_ends_the_turn_in_words(
    stub: Stub, open_it: Any, sent: str, recwarn: pytest.WarningsRecorder
) -> None:
    stub.sends_after = (2, sent)
    backend = open_it(stub)
    found = chunks(backend)
    assert text_of(found) == "Rain" and found[-1].finish_reason == "error"
    assert "vLLM sent what cannot be read (" in str(found[-1].error)
    assert "Continue it" in str(found[-1].error)
    assert [str(one.message) for one in recwarn] == []
    stub.sends_after = None
    assert text_of(chunks(backend)) == "Rain falls."


@pytest.mark.slow
@pytest.mark.parametrize("count", [-5, 10**30, True, 1.5, "many"])
def test_a_count_that_none_can_be_is_not_taken(stub: Stub, open_it: Any, count: Any) -> None:
    stub.extra = {"usage": {"prompt_tokens": count, "completion_tokens": 4}}
    stats = chunks(open_it(stub))[-1].stats
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, '{"error": {"message": "no template"}}'), "answered with 400: no template"),
        ((200, '{"count": "many"}'), "answered with 200"),
        ((200, "[" * 5000), "more than 64 lists"),
        ((500, "Oh no"), "answered with 500: Oh no"),
    ],
)
def test_why_a_prompt_is_not_counted_is_said(
    stub: Stub, open_it: Any, answer: tuple[int, str], words: str
) -> None:
    stub.tokenized = answer
    backend = open_it(stub)
    with pytest.raises(NotCounted, match=words):
        backend.count_tokens(ASKED)
    assert text_of(chunks(backend)) == "Rain falls.", "the server may answer all the same"


def test_of_a_reply_without_a_word_nothing_is_kept(stub: Stub, open_it: Any) -> None:
    stub.sends_after = (0, "[1]")
    last = chunks(open_it(stub))[-1]
    assert last.finish_reason == "error" and "kept" not in str(last.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ((400, "max_tokens is too large"), RequestError, "max_tokens is too large"),
        ((429, "too many"), LocalspecError, "busy"),
        ((500, "out of memory"), LocalspecError, "out of memory"),
    ],
)
def test_its_own_words_explain_a_fault(
    stub: Stub, open_it: Any, fault: tuple[int, str], kind: type[Exception], words: str
) -> None:
    backend = open_it(stub)
    stub.fault = fault
    with pytest.raises(kind, match=words):
        chunks(backend)
    stub.fault = None
    assert text_of(chunks(backend)) == "Rain falls."


def test_a_server_that_is_not_there_is_said_so(opened_backends: list[ServerBackend]) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        ServerBackend(RemoteServer("http://127.0.0.1:9"))
    for url in ("localhost:8000", "http://10.0.0..5:8000", "http://a\tb", f"http://{'a' * 64}"):
        with pytest.raises(ConfigError, match="Write it like"):
            ServerBackend(RemoteServer(url))


def test_a_model_that_it_has_not_is_named_with_those_it_has(stub: Stub) -> None:
    with pytest.raises(ConfigError, match="stub-1b"):
        ServerBackend(RemoteServer(stub.url, model="other"))


# the key


@pytest.mark.slow
def test_the_key_opens_the_server_and_is_in_no_sentence(
    stub: Stub, opened_backends: list[ServerBackend]
) -> None:
    stub.key = "sesame"
    with pytest.raises(ConfigError, match="refused the key") as refused:
        ServerBackend(RemoteServer(stub.url, key="wrong-word"))
    assert "wrong-word" not in str(refused.value)
    server = RemoteServer(stub.url, key="sesame")
    opened_backends.append(ServerBackend(server))
    assert text_of(chunks(opened_backends[-1])) == "Rain falls."
    assert "sesame" not in repr(server) + repr(opened_backends[-1].describe())
    stub.fault = (400, "bad request with sesame")
    with pytest.raises(RequestError) as said:
        chunks(opened_backends[-1])
    assert "sesame" not in str(said.value)


def test_a_key_goes_over_https_or_to_this_machine_only_unless_told() -> None:
    with pytest.raises(ConfigError, match="not encrypted"):
        RemoteServer("http://example.com:8000", key="sesame")
    told = RemoteServer("http://example.com:8000", key="sesame", sends_key_openly=True)
    assert told.address == "http://example.com:8000"
    assert RemoteServer("http://example.com:8000").address == "http://example.com:8000"
    assert RemoteServer("https://example.com/v1", key="k").address == "https://example.com"
    assert RemoteServer("http://localhost:1/v1/", key="k").address == "http://localhost:1"
    with pytest.raises(ConfigError, match="would be logged"):
        RemoteServer("https://me:word@example.com")


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    named = tmp_path / "key"
    named.write_text("of the file\n")
    environment = {"LOCALSPEC_REMOTE_KEY": "of the environment"}
    from_file = with_server(LoadOptions(), RemoteFlags("https://x", named), environment).remote
    from_environment = with_server(LoadOptions(), RemoteFlags("https://x"), environment).remote
    assert from_file is not None
    assert from_environment is not None
    assert (from_file.key, from_environment.key) == ("of the file", "of the environment")
    with pytest.raises(ConfigError, match="cannot be read"):
        with_server(LoadOptions(), RemoteFlags("https://x", tmp_path / "none"), environment)
    assert with_server(LoadOptions(), RemoteFlags(), environment).remote is None


# in the chat


@pytest.mark.slow
def test_a_turn_is_logged_with_null_for_what_is_not_known(stub: Stub, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "localspec.db")
    service = ChatService(store, session_info, lambda report: ServerBackend(RemoteServer(stub.url)))
    service.start()
    try:
        until(lambda: service.status().phase == "ready")
        as_on_the_page = replace(Form().settings(), max_tokens=40)
        assert as_on_the_page.thinking_budget is not None, "also where its field is hidden"
        told = service.submit(None, "Rain?", as_on_the_page)
        assert told is not None
        assert told.done.wait(WAIT_S)
        strip = live_state(service.status())
        stub.others = 1
        untold = service.submit(told.handle, "And snow?", ReplySettings(max_tokens=40))
        assert untold is not None
        assert untold.done.wait(WAIT_S)
        service.journal.flush()
        first, second = service.store.turn_rows()
    finally:
        service.close()
        store.close()
    assert (first["finish_reason"], first["thinking_budget"]) == ("eos", None)
    assert first["acceptance_rate"] == 0.5
    assert first["thinking_ms"] is None
    assert second["acceptance_rate"] is None
    assert second["num_draft_tokens"] is None
    assert [row["exact"] for row in (first, second)] == [None, None]
    assert (first["model"], first["device"]) == ("stub-1b", f"vLLM at {stub.url}")
    facts = dict(strip["facts"])
    assert strip["model"] == ["stub-1b", f"vLLM at {stub.url}"]
    assert strip["guesses"] == "50 % of all guesses right"
    assert facts["Guesses of the server"] == "6 of 12 right"
    assert "plain decoding" in facts["Limits"]


def test_what_is_untold_is_no_figure() -> None:
    stats = TurnStats(1, num_draft_tokens=3, untold=frozenset({"num_draft_tokens"}))
    assert stats.told("num_draft_tokens") is None
    assert stats.told("num_prompt_tokens") == 1
