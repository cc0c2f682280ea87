"""A model with a chat format of its own for thoughts: the switch, the budget, and what goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from localspec.chat.local import Loaded, LocalBackend
from localspec.chat.reply_text import start_of
from localspec.chat.template import ChatTemplate
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.core.backend import Chunk, Description, DrafterStatus, Message, Request
from localspec.core.decoding import FORCED
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.engine import Engine
from tests.kit.tiny import scripted
from tests.kit.tiny_tokenizer import tiny_tokenizer

# As Qwen3's: an earlier reply is shown without its thought.
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# As DeepSeek-R1's: the prompt opens the thought. This one shows earlier thoughts.
R1 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
    "{# analysis #}"
)
# As Gemma 4's, but that it thinks unless it is told not to.
GEMMA4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking | default(true) %}<|channel>thought\n<channel|>{% endif %}"
    "{% endif %}"
)
ASKED = (Message("user", "Who are you?"),)
THOUGHT, ANSWER = "The café, it seems.", "A tiny one."


def template_of(source: str) -> ChatTemplate:
    tokenizer = tiny_tokenizer()
    if source == CHANNELS:
        names = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]
        tokenizer.add_special_tokens({"additional_special_tokens": names})
    elif source == GEMMA4:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    else:
        tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def backend_of(template: ChatTemplate, reply: str, thinks: bool | None = None) -> LocalBackend:
    """A model that says this."""
    start = len(template.render(ASKED, thinks=thinks))
    script = [*template.encode_text(reply), sorted(template.end_ids)[0]]
    drafters: dict[str, Any] = {"ngram": NgramDrafter()}
    statuses = (DrafterStatus("ngram", True, ""),)
    return LocalBackend(
        Loaded(
            engine=Engine(scripted(script, start, 700), drafters),
            controller=Controller(drafters, Costs(), Acceptance()),
            template=template,
            description=Description("t", None, "cpu", "float32", 256, statuses),
            identity="t",
        )
    )


def said(chunks: list[Chunk]) -> tuple[str, str]:
    return "".join(c.thinking for c in chunks), "".join(c.text for c in chunks)


def ask(backend: LocalBackend, **wanted: Any) -> list[Chunk]:
    request = Request(**{"messages": ASKED, "max_tokens": 100, **wanted})
    return list(backend.generate(request, threading.Event()))


RAW = {
    QWEN3: f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}",
    R1: f"{THOUGHT}\n</think>\n\n{ANSWER}",
    CHANNELS: f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
    f"<|message|>{ANSWER}",
    GEMMA4: f"<|channel>thought\n{THOUGHT}\n<channel|>{ANSWER}",
}
NAMES = ("qwen3", "r1", "channels", "gemma4")


@pytest.mark.parametrize("source", RAW, ids=NAMES)
def test_thought_and_answer_are_apart_whatever_marks_the_model_has(source: str) -> None:
    template = template_of(source)
    chunks = ask(backend_of(template, RAW[source]), stop=("caf",))  # ends no thought
    assert said(chunks) == (THOUGHT, ANSWER)
    whole = "".join(chunk.thinking + chunk.text for chunk in chunks)
    assert sum(sum(chunk.lengths) for chunk in chunks) == len(whole), "each token has its letters"
    stats = chunks[-1].stats
    assert len(template.encode_text(THOUGHT)) <= stats.num_thinking_tokens + 1 < 25
    assert 0 < stats.thinking_ms < stats.decode_ms


def test_a_call_behind_a_thought_is_no_part_of_it() -> None:
    called = "<|channel|>commentary to=functions.f json<|message|>{}"
    template = template_of(CHANNELS)
    reply = f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant{called}"
    assert said(ask(backend_of(template, reply))) == (THOUGHT, called)


@pytest.mark.parametrize("source", RAW, ids=NAMES)
def test_a_budget_ends_a_thought_without_a_stray_token(source: str) -> None:
    template = template_of(source)
    backend = backend_of(template, RAW[source].replace(THOUGHT, 9 * THOUGHT))
    chunks = ask(backend, thinking_budget=4, max_tokens=6, drafter="ngram")
    tokens = [token for chunk in chunks for token in chunk.tokens]
    names = [name for chunk in chunks for name in chunk.provenance]
    forced = [token for token, name in zip(tokens, names, strict=True) if name == FORCED]
    limit = template.thought_limit
    assert limit is not None and forced == list(limit.closing)
    assert chunks[-1].stats.num_thinking_tokens == 4
    assert len(tokens) - names.index(FORCED) - len(forced) == 6
    raw = template.spelled(forced)
    assert template.marks is not None and raw == template.marks.closing


@pytest.mark.parametrize("source", RAW, ids=NAMES)
def test_a_model_told_not_to_think_does_not(source: str) -> None:
    template = template_of(source)
    chunks = ask(backend_of(template, RAW[source]), thinks=False)
    if source == QWEN3:  # it was told in its own words, but this one does not listen
        assert template.decode(template.render(ASKED, thinks=False)).endswith("</think>\n\n")
    if source == R1:  # there is no switch: the prompt ends the thought
        assert chunks[0].stats.num_prompt_tokens > len(template.render(ASKED))
    else:
        assert chunks[-1].stats.num_thinking_tokens == 0


@pytest.mark.parametrize(("source", "is_shown"), [(QWEN3, False), (R1, True)])
def test_the_template_says_whether_an_earlier_thought_is_shown(source: str, is_shown: bool) -> None:
    template = template_of(source)
    history = (*ASKED, Message("assistant", ANSWER, thinking=THOUGHT), *ASKED)
    text = template.spelled(template.render(history))
    assert ANSWER in text and (THOUGHT in text) is is_shown


@pytest.mark.slow
@pytest.mark.parametrize("source", RAW, ids=NAMES)
def test_a_reply_cut_anywhere_goes_on_in_its_thought_or_answer(source: str) -> None:
    template = template_of(source)
    backend = backend_of(template, RAW[source])
    whole = ask(backend)
    tokens = [token for chunk in whole for token in chunk.tokens]
    for cut in range(2, len(tokens) - 1):
        first = ask(backend, max_tokens=cut)
        thinking, text = (part.rstrip("\ufffd") for part in said(first))
        if not thinking + text:
            continue
        begun = tuple(token for chunk in first for token in chunk.tokens)
        messages = (*ASKED, Message("assistant", text, thinking=thinking))
        more = ask(backend, messages=messages, continues=True, begun_tokens=begun)
        again = [token for chunk in more for token in chunk.tokens]
        assert [*begun, *again] == tokens, f"cut after {cut}"
        late, rest = said(more)
        assert ((thinking + late).strip("\n"), text + rest) == (THOUGHT, ANSWER), cut
        # After a crash: from its text.
        start = start_of(template, Request(messages, continues=True), 256)
        assert start.source == "text" and template.spelled(start.begun).endswith(text or thinking)


@pytest.mark.parametrize("source", RAW, ids=NAMES)
def test_a_budget_of_nothing_leaves_no_token_of_a_thought(source: str) -> None:
    """Also where the prompt opens it."""
    chunks = ask(backend_of(template_of(source), RAW[source]), thinking_budget=0)
    assert chunks[-1].stats.num_thinking_tokens == 0


def test_a_budget_gives_way_where_the_context_has_no_room() -> None:
    template = template_of(QWEN3)
    backend = backend_of(template, RAW[QWEN3].replace(THOUGHT, 40 * THOUGHT))
    stats = ask(backend, thinking_budget=10_000, max_tokens=20)[-1].stats
    assert stats.num_prompt_tokens + stats.num_output_tokens <= 256
    assert stats.num_thinking_tokens > 150


def test_what_a_thought_leaves_of_a_ceiling_is_the_answers() -> None:
    """As Anthropic's clients ask for it: a budget of nearly all that the reply may have."""
    backend = backend_of(template_of(QWEN3), RAW[QWEN3])
    chunks = ask(backend, thinking_budget=31_999, max_tokens=32_000, is_ceiling=True)
    assert said(chunks) == (THOUGHT, ANSWER) and chunks[-1].finish_reason == "eos"
    chunks = ask(backend, thinking_budget=4, max_tokens=20, is_ceiling=True)
    stats = chunks[-1].stats
    assert (stats.num_thinking_tokens, stats.num_output_tokens) == (4, 20)
