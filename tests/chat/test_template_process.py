"""A chat template that runs for ever or makes too much is stopped, in words, and the next one runs;
published templates render as transformers renders them."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from localspec.chat import template_process as template_process_module
from localspec.chat.template import ChatTemplate
from localspec.chat.template_process import TemplateProcess, template_process
from localspec.core.backend import Message
from localspec.core.errors import ModelError, RequestError
from tests.kit.tiny_tokenizer import tiny_tokenizer

HELLO = {"role": "user", "content": "Hello."}
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DOUBLED = "{% set n = namespace(x=[1, 2]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
ROLES = ("system", "user", "assistant", "user")
TALK = tuple(Message(role, f"Text {place}.") for place, role in enumerate(ROLES))  # type: ignore[arg-type]


def rendered(template: str, process: TemplateProcess | None = None) -> str:
    asked = {"conversations": [[HELLO]], "chat_template": template}
    return (process or template_process()).render(asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        f"{DOUBLED}{{% endfor %}}{{{{ n.x | string }}}}",
    ],
)
def test_a_template_that_does_not_end_is_stopped_and_the_next_one_runs(template: str) -> None:
    process = TemplateProcess(limit_s=1.0)
    with pytest.raises(RequestError, match=r"it ran for more than 1 seconds|memory"):
        rendered(template, process)
    assert rendered(PLAIN, process) == "user: Hello.\n"
    assert template_process().limit_s == 5.0, "as long as a published template may take"


def child_of(process: TemplateProcess) -> psutil.Process:
    """The newest child of this process, which the other tests leave alone."""
    assert rendered(PLAIN, process) == "user: Hello.\n"
    children = psutil.Process().children()
    return max(children, key=lambda child: child.create_time())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process")
@pytest.mark.parametrize("sent", ["SIGSTOP", "SIGKILL"])
def test_a_process_that_is_stopped_or_killed_is_replaced_and_the_text_comes(sent: str) -> None:
    process = TemplateProcess(limit_s=0.5)
    child = child_of(process)
    child.send_signal(getattr(signal, sent))
    assert rendered(PLAIN, process) == "user: Hello.\n"
    assert not child.is_running(), "it was ended"


def test_a_process_that_never_answers_is_not_blamed_on_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_process_module, "MODULE", "tests.chat.no_child")
    with pytest.raises(RequestError, match="gave no answer, at a second try too: its process end"):
        rendered(PLAIN, TemplateProcess())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory|seconds"),  # on a busy machine its time is over first
        ("{{ 'a' | center(10 ** 7) }}", "a text of 10,000,000 characters"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"is damaged: .*recursion.*Fetch"),
        ("{% include 'other' %}", r"is damaged: no loader.*Fetch"),
        ("{{ messages | unheard_of }}", r"is damaged: No filter named 'unheard_of'\. Fetch"),
        ("{{ raise_exception('Only tools.') }}", "refuses the conversation: Only tools. If a"),
        ("{% for m in messages %}", "is damaged: Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", r"is damaged: .*unsafe\. Fetch"),
    ],
)
def test_what_a_template_may_not_do_is_said_and_the_next_one_runs(template: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        rendered(template)
    assert rendered(PLAIN) == "user: Hello.\n"


def test_several_templates_without_a_default_are_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"tool_use": PLAIN}
    with pytest.raises(ModelError, match="several chat templates, and none of them is called"):
        ChatTemplate(tokenizer)


def test_what_published_templates_use_is_there() -> None:
    used = "{% set n = namespace(a=1) %}{{ n.a }} {{ strftime_now('%Y') | length }} "
    assert rendered(f"{used}{{{{ {{'b': '<'}} | tojson }}}}") == '1 4 {"b": "<"}'


@pytest.mark.slow
def test_published_templates_render_as_transformers_renders_them(shared_data: Path) -> None:
    folder = shared_data / "tokenizers"
    untyped: Any = AutoTokenizer
    tokenizer = untyped.from_pretrained(str(folder / "smollm"), local_files_only=True)
    files = sorted((folder / "chat_templates/chat_templates").glob("*.jinja"))
    compared = 0
    for file in (*files, folder / "qwen3-4b-2507/chat_template.jinja"):
        tokenizer.chat_template = file.read_text("utf-8")
        template = ChatTemplate(tokenizer)
        for talk in (TALK, TALK[1:]):
            turns = [{"role": one.role, "content": one.content} for one in talk]
            try:
                wanted = tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, return_dict=False
                )
            except Exception:  # a role that it does not take
                with pytest.raises(RequestError):
                    template.render(talk)
            else:
                assert template.render(talk) == wanted, file.name
                compared += 1
    assert compared > len(files)
