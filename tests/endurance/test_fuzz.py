"""Mutated files and requests: each is read or refused by a sentence, in bounded time and memory.

The cases run in a forked process whose memory and processor time are limited; one that hangs, dies
or raises anything but an error of ours is a loss, and the next process goes on after it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.importing import read_conversations
from localspec.chat.service import ChatService, ReplySettings
from localspec.chat.template import ChatTemplate
from localspec.core.backend import Message
from localspec.core.decoding import SamplingParams
from localspec.core.options import LoadOptions
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.profiles import load_profile
from localspec.record.export import Scope, export
from localspec.record.store import Store
from tests.endurance.fuzzing import WAIT_S, WILD, copied, fuzz, load_and_answer, mutated, twisted
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.own_cookie import KEY, TOKEN, own_cookie
from tests.kit.samples import begin, finish, open_store
from tests.kit.tally import Tally
from tests.kit.waiting import until

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and memory limits")

HELLO = (Message("user", "hello"),)


@pytest.fixture
def model_copy(pair_options: LoadOptions, tmp_path: Path) -> Path:
    assert pair_options.model is not None
    return Path(shutil.copytree(pair_options.model, tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["anywhere", "header"])
def test_mutated_weights_are_loaded_or_refused(model_copy: Path, tally: Tally, place: str) -> None:
    def weights(rng: random.Random) -> None:
        copy = copied(model_copy, rng)
        file = copy / "model.safetensors"
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        if place == "anywhere":
            file.write_bytes(mutated(data, rng))
        elif rng.random() < 0.5:  # of the announced length
            header = json.dumps(twisted(json.loads(data[8 : 8 + size]), rng)).encode()
            file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
        else:
            header = mutated(data[8 : 8 + size], rng)
            file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
        try:
            load_and_answer(copy)
        finally:
            shutil.rmtree(copy)

    fuzz(tally, weights, quick=4, whole=400)


@pytest.mark.slow
def test_mutated_configs_are_loaded_or_refused(model_copy: Path, tally: Tally) -> None:
    def configs(rng: random.Random) -> None:
        copy = copied(model_copy, rng)
        name = rng.choice(("config.json", "config.json", "generation_config.json"))
        file = copy / name
        data = file.read_bytes() if file.is_file() else b'{"eos_token_id": 1}'
        if rng.random() < 0.8:
            file.write_text(json.dumps(twisted(json.loads(data), rng)))
        else:
            file.write_bytes(mutated(data, rng))
        try:
            shape_from_folder(copy)
            load_and_answer(copy)
            ChatTemplate.load(copy)
        finally:
            shutil.rmtree(copy)

    fuzz(tally, configs, quick=4, whole=500)


TEMPLATE_PARTS = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.role }}", "{{ m['content'] }}", "{{", "}}",
    "{% if m.role == 'user' %}", "{% endif %}", "{% include 'x' %}", "{{ raise_exception('no') }}",
    "{{ messages[0].content * 1000 }}", "{{ 'a' | center(10**9) }}", "{% set x = namespace(a=1) %}",
    "{{ messages | tojson }}", "{% macro f() %}x{% endmacro %}{{ f() }}", "{{ x.a.b.c }}",
    "{{ range(10**9) | list }}", "{{ ''.__class__ }}", "{% generation %}", "<|im_end|>", "\ud800",
    "{{ messages[-1]['content'][0] }}", "{% extends m %}", "{{ 10 ** 8 }}", "text", "\n",
)  # fmt: skip


@pytest.mark.slow
def test_mutated_templates_answer_or_refuse(model_copy: Path, tally: Tally) -> None:
    file = model_copy / "chat_template.jinja"
    source = file.read_text()

    def templates(rng: random.Random) -> None:
        if rng.random() < 0.5:
            text = "".join(rng.choices(TEMPLATE_PARTS, k=rng.randrange(1, 8)))
        else:
            text = mutated(source.encode(), rng).decode("utf-8", "replace")
        copy = copied(model_copy, rng)
        (copy / file.name).write_text(text, "utf-8", "replace")
        try:
            ChatTemplate.load(copy).render(HELLO)
        finally:
            shutil.rmtree(copy)

    fuzz(tally, templates, quick=4, whole=300)


@pytest.mark.slow
def test_mutated_tokenizers_are_loaded_or_refused(model_copy: Path, tally: Tally) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")

    def tokenizers(rng: random.Random) -> None:
        copy = copied(model_copy, rng)
        file = copy / rng.choice(names)
        file.write_text(json.dumps(twisted(json.loads(file.read_bytes()), rng)))
        try:
            template = ChatTemplate.load(copy)
            template.decode(template.render(HELLO))
        finally:
            shutil.rmtree(copy)

    fuzz(tally, tokenizers, quick=4, whole=400)


def test_mutated_profiles_are_read_or_refused(root: Path, tmp_path: Path, tally: Tally) -> None:
    shipped = sorted((root / "profiles" / "models").glob("*.toml"))

    def profiles(rng: random.Random) -> None:
        file = tmp_path / "mine.toml"
        file.write_bytes(mutated(rng.choice(shipped).read_bytes(), rng))
        load_profile(file)

    fuzz(tally, profiles, quick=20, whole=3000)


@pytest.mark.slow
def test_mutated_imports_come_in_or_are_refused(tmp_path: Path, tally: Tally) -> None:
    with closing(open_store(tmp_path)) as store:
        for text in ("first", "second"):
            finish(store, begin(store, text), f"{text}, answered")
        export(store, Scope(), "jsonl", tmp_path / "out.jsonl")
    exported = (tmp_path / "out.jsonl").read_bytes()
    lines = [json.loads(line) for line in exported.splitlines()]

    def imports(rng: random.Random) -> None:
        data = mutated(exported, rng)
        if rng.random() < 0.5:
            data = "\n".join(json.dumps(twisted(line, rng)) for line in lines).encode()
        found = read_conversations(data)
        with closing(Store.open(Path("/dev/null/none"))) as memory:
            for number in memory.conversation_list.add_imported(found):
                for message in memory.messages(number):
                    memory.branch(message.id)
            memory.conversation_list.rows("answered")

    fuzz(tally, imports, quick=20, whole=3000)


@pytest.mark.slow
def test_any_settings_are_answered_or_refused(tally: Tally) -> None:
    def settings(rng: random.Random) -> None:
        whole = [one for one in WILD if isinstance(one, int)]
        numbers = (*whole, 3.5, float("nan"), float("inf"), 0.7, -0.0)

        words = ("", "auto", "off", "x" * 5000, "\ud800", "draft_model", "\0")
        store = Store.open(Path("/dev/null/none"))
        script = Script("a b c", round_s=0.0, prefill_s=0.0)
        service = ChatService(store, session_info, lambda report: FakeBackend(script))
        service.start()
        try:
            until(lambda: service.status().phase == "ready")
            sampling = SamplingParams(
                temperature=rng.choice(numbers),
                top_k=rng.choice(whole),
                top_p=rng.choice(numbers),
                min_p=rng.choice(numbers),
                repetition_penalty=rng.choice(numbers),
                seed=rng.choice(whole),
            )
            wanted = ReplySettings(
                sampling if rng.random() < 0.5 else SamplingParams(),
                max_tokens=rng.choice(whole),
                drafter=rng.choice(words),
                num_draft_tokens=rng.choice((None, *whole)),
                system_prompt=rng.choice(words),
                workload=rng.choice(words),
                num_left_out=rng.choice((0, 1, 7)),
            )
            reply = service.submit(None, rng.choice((*words, "hello")), wanted)
            if reply is not None:
                assert reply.done.wait(WAIT_S)
                assert "unexpected fault" not in (reply.view.error or ""), reply.view.error
        finally:
            service.close()
            store.close()

    fuzz(tally, settings, quick=20, whole=1000)


PATHS = (
    "/live",
    "/tokens",
    "/audit",
    "/export",
    "/report",
    "/import",
    "/models",
    "/localspec/x.js",
)
QUERIES = ("message", "format", "scope", "conversation", "drafter", "rounds_from", "session", "x")
VALUES = (
    "1", "-1", "0", "x", "", "9" * 400, "csv", "jsonl", "all", "session", "off", "%00", "ngram",
    "1e999", "null", "../../etc/passwd", "\u2028", "conversation", "markdown",
)  # fmt: skip
ACTS = ("download", "pause", "folder", "use", "delete", "cancel", "load", "unload", "", "x")


@pytest.mark.slow
def test_any_request_is_answered(tmp_path: Path, tally: Tally) -> None:
    """Of our own routes; the guard is passed, as the page passes it."""
    from starlette.testclient import TestClient

    from localspec.web.server import make_app

    def requests(rng: random.Random) -> None:
        query = {rng.choice(QUERIES): rng.choice(VALUES) for _ in range(rng.randrange(4))}
        body: Any = {rng.choice(("act", "id", "folder")): rng.choice((*ACTS, *VALUES, *WILD))}
        data = mutated(json.dumps(body).encode(), rng) if rng.random() < 0.5 else json.dumps(body)
        method = rng.choice(("GET", "POST", "DELETE", "PUT", "HEAD"))
        path = rng.choice(PATHS)
        client = TestClient(APP["app"], "http://127.0.0.1:7860", raise_server_exceptions=True)
        client.cookies.set(*own_cookie(7860).split("=", 1))
        same = {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin"}
        answer = client.request(method, path, params=query, content=data, headers=same)
        assert answer.status_code < 500, f"{method} {path} {query}: {answer.status_code}"

    def with_app(rng: random.Random) -> None:
        if not APP:  # made in the fork: its threads would not come along
            store = open_store(tmp_path)
            finish(store, begin(store))
            service = ChatService(store, session_info, lambda report: FakeBackend())
            service.start()
            until(lambda: service.status().phase == "ready")
            APP["app"] = make_app(service, "127.0.0.1", 7860, TOKEN, key=KEY)
        requests(rng)

    APP: dict[str, Any] = {}
    fuzz(tally, with_app, quick=5, whole=1500)
