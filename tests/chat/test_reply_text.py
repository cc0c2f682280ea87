"""Stop strings end a reply however its text is cut, and each token is named as it stands there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from localspec.chat.reply_text import ReplyText, Start, TokenTexts, drafted_tokens, start_of
from localspec.chat.template import ChatTemplate
from localspec.core.backend import BYTES_AS_TEXT, Message, Request
from localspec.core.decoding import (
    OFF,
    TARGET,
    DraftPlan,
    Proposal,
    Round,
    Step,
    TokenLogprob,
    Verdict,
    chain,
)
from tests.kit.fakes import Verbatim
from tests.kit.tiny_tokenizer import tiny_tokenizer

BYTES = {1: b" the", 2: b" cat", 3: b"\xf0\x9f", 4: b"\x90\x88", 5: b"", 6: b"\n", 7: b" sat"}


class Finder:
    """A reply whose tokens are pieces of any size."""

    def __init__(self, stops: Sequence[str], begun: str = "") -> None:
        start, verbatim = Start((), spelled=begun), Verbatim()
        self._reply: Any = ReplyText(verbatim, tuple(stops), start, None)  # type: ignore[arg-type]

    def push(self, text: str) -> tuple[str, bool]:
        return self._reply.push([text]).text, self._reply.is_stopped

    def flush(self) -> str:
        return str(self._reply.flush().text)


def test_stop_strings_are_found_across_any_cut() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        lengths = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
        stops = ["".join(rng.choices("ab\n", k=length)) for length in lengths]
        text = "".join(rng.choices("ab\n", k=rng.randrange(14)))
        finder, shown, hit, position = Finder(stops), "", False, 0
        while position < len(text) and not hit:
            size = rng.randint(1, 4)
            safe, hit = finder.push(text[position : position + size])
            shown, position = shown + safe, position + size
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        assert hit == bool(ends)
        if hit:
            first_end = min(ends)
            longest = max(len(s) for s in stops if text[:first_end].endswith(s))
            assert shown == text[: first_end - longest]
        else:
            assert shown + finder.flush() == text


def test_only_a_possible_stop_is_held_back() -> None:
    finder = Finder(["\nUser:"])
    assert finder.push("Hello\nUs") == ("Hello", False)
    assert finder.push("e it") == ("\nUse it", False)
    assert finder.push("\nUser: x") == ("", True)


@pytest.mark.parametrize(
    ("begun", "pieces", "shown", "is_hit"),
    [
        ("a\nUs", ("er", ":x"), "", True),
        ("a\nUs", ("e it",), "e it", False),
        ("a\nUs", ("\nUser: x",), "", True),
        ("a\nUser:", ("b",), "b", False),  # it was complete, and the person went on all the same
        ("a", ("\nUs", "er"), "", False),
    ],
)
def test_a_stop_string_may_have_begun_before_the_reply_goes_on(
    begun: str, pieces: tuple[str, ...], shown: str, is_hit: bool
) -> None:
    finder = Finder(["\nUser:"], begun)
    found = [finder.push(piece) for piece in pieces]
    assert "".join(text for text, _ in found) == shown
    assert any(hit for _, hit in found) is is_hit


def test_what_is_shown_and_held_is_not_shown_again() -> None:
    finder = Finder(["STOP"], "a ST")
    assert finder.push("O") == ("", False)
    assert finder.flush() == "O"


class Spelling:
    """A tokenizer of the kind that drops a space at the beginning of a text."""

    num_calls = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_calls += 1
        text = b"".join(BYTES[token] for token in tokens).decode(errors="replace")
        return text.removeprefix(" ")


def made(proposal: Proposal, verdict: Verdict, num_accepted: int) -> Round:
    step = Step("draft_model", len(proposal.tokens), num_accepted, num_accepted + 1, 1.0, 1.0, 3)
    tokens = (0,) * (num_accepted + 1)
    sources = ("draft_model",) * num_accepted + (TARGET,)
    return Round(tokens, sources, step, DraftPlan(OFF, 0), (), proposal, verdict)


def test_a_token_keeps_its_space_and_a_part_of_a_character_is_marked() -> None:
    texts = TokenTexts(Spelling())
    assert [texts.of(token) for token in (1, 6, 3, 5)] == [" the", "\n", "\ufffd", ""]


def test_a_token_is_spelt_once() -> None:
    spelling = Spelling()
    texts = TokenTexts(spelling)
    texts.of(1)
    known = spelling.num_calls
    assert texts.of(1) == " the" and spelling.num_calls == known


def byte_fallback_template() -> ChatTemplate:
    """A tokenizer of Llama 2's kind, which writes what it has no word for as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *bytes_of, "\u2581", "o", "k", "\u2581o", "\u2581ok"]
    vocabulary = {word: place for place, word in enumerate(words)}
    merges = [("\u2581", "o"), ("\u2581o", "k")]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>")
    core = Tokenizer(model)
    prepended = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    core.normalizer = normalizers.Sequence(prepended)
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n\n{% endfor %}"
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize(
    "text", ["ok \U0001fae0\U0001f9a4 ok", "\U0001fae0\U0001f9a4\U0001fabf\u00e9 ok"]
)
def test_a_run_of_byte_tokens_may_be_cut_and_continued_anywhere(text: str) -> None:
    template = byte_fallback_template()
    tokens = template.encode_reply(text)
    for num in range(len(tokens) + 1):
        detokenizer = template.detokenizer()
        streamed = "".join([*map(detokenizer.push, tokens[:num]), detokenizer.flush()])
        shown = streamed.rstrip("\ufffd")
        assert streamed == template.decode(tokens[:num]), "one sign stands for half a character"
        assert streamed in (shown, f"{shown}\ufffd") and text.startswith(shown)
        begun = (Message("user", "ok"), Message("assistant", shown))
        request = Request(begun, continues=True, begun_tokens=tuple(tokens[:num]))
        start = start_of(template, request, 512)
        assert not shown or start.begun == tuple(tokens[:num]), "with the ids of its own"
        reply = ReplyText(template.detokenizer(), (), start, None)
        rest = reply.push(tokens[len(start.begun) :]).text + reply.flush().text
        assert shown + rest == text


def test_bytes_that_are_no_character_are_one_sign_each_and_end_no_run() -> None:
    template = byte_fallback_template()
    place = {byte: 1 + byte for byte in range(256)}
    tokens = [place[byte] for byte in (0xFF, 0x41, 0xC3, *"\u00e9".encode())]
    detokenizer = template.detokenizer()
    pieces = [*map(detokenizer.push, tokens), detokenizer.flush()]
    assert "".join(pieces) == template.decode(tokens) == "\ufffdA\ufffd\u00e9"


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_a_part_of_a_character_has_its_bytes_beside_its_probability(kind: str) -> None:
    is_fallback = kind == "byte fallback"
    template = byte_fallback_template() if is_fallback else ChatTemplate(tiny_tokenizer())
    texts = TokenTexts(template)
    tokens = [t for t in template.encode_text("\N{TIGER FACE}") if texts.of(t) == "\ufffd"]
    found = texts.logprobs([TokenLogprob(token, -0.5, ((token, -0.5),)) for token in tokens])
    assert len(found) > 1
    spelled = [one.text.encode("utf-8", BYTES_AS_TEXT) for one in found]
    assert b"".join(spelled).decode() == "\N{TIGER FACE}"
    assert [one.top[0][0] for one in found] == [one.text for one in found]


def test_a_text_that_goes_on_keeps_the_space_before_its_first_new_word() -> None:
    """Tokenizers of Llama 2's kind decode a word alone without its space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "\u2581Once": 1, "\u2581upon": 2, "\u2581a": 3}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    template = ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))
    asked = (Message("user", "Once"),)
    for is_raw in (True, False):  # a model without a chat format goes on with its conversation too
        start = start_of(template, Request(asked, is_raw=is_raw), 512)
        assert (start.prompt, template.decode((2, 3))) == ((1,), "upon a")
        text = ReplyText(template.detokenizer(), (), start, None)
        assert (text.push((2,)).text, text.push((3,)).text) == (" upon", " a")
    begun = (*asked, Message("assistant", " upon"))
    start = start_of(template, Request(begun, continues=True, begun_tokens=(2,)), 512)
    assert (start.prompt, start.source) == ((1, 2), "tokens")
    assert ReplyText(template.detokenizer(), (), start, None).push((3,)).text == " a"


def test_a_chain_is_accepted_then_rejected_then_not_reached() -> None:
    verdict = Verdict((0,), 9)
    found = drafted_tokens(
        made(chain((1, 2, 7), (0.9, 0.8, 0.7)), verdict, 1), TokenTexts(Spelling())
    )
    assert [one.outcome for one in found] == ["accepted", "rejected", "not_reached"]
    assert [(one.text, one.confidence) for one in found[:2]] == [(" the", 0.9), (" cat", 0.8)]


def test_in_a_tree_what_stands_after_the_last_accepted_token_is_rejected() -> None:
    proposal = Proposal((1, 2, 7, 6), (-1, -1, 0, 1))
    verdict = Verdict((1,), 9)
    found = drafted_tokens(made(proposal, verdict, 1), TokenTexts(Spelling()))
    assert [one.outcome for one in found] == ["not_reached", "accepted", "not_reached", "rejected"]


@pytest.mark.parametrize("num_kept", [0, 1])
def test_what_stands_beyond_the_end_of_the_reply_counts_as_not_reached(num_kept: int) -> None:
    verdict = Verdict((0, 1), 9)
    found = drafted_tokens(made(chain((1, 2, 7)), verdict, num_kept), TokenTexts(Spelling()))
    assert sum(one.outcome == "accepted" for one in found) == num_kept
    assert not any(one.outcome == "rejected" for one in found)


def test_a_round_without_a_draft_names_nothing() -> None:
    texts = TokenTexts(Spelling())
    assert drafted_tokens(made(Proposal(), Verdict((), 1), 0), texts) == ()
