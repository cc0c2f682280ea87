"""Tokens of a draft are named as they stand in a text, and their outcome is what the round kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from localspec.chat.template import Detokenizer
from localspec.chat.token_text import TokenTexts, drafted_tokens
from localspec.core import TARGET, Proposal, Round, Step, Verdict, chain

BYTES = {1: b" the", 2: b" cat", 3: b"\xf0\x9f", 4: b"\x90\x88", 5: b"", 6: b"\n", 7: b" sat"}


class Spelling:
    """A tokenizer of the kind that drops a space at the beginning of a text."""

    num_calls = 0

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.num_calls += 1
        text = b"".join(BYTES[token] for token in tokens).decode(errors="replace")
        return text.removeprefix(" ")

    def detokenizer(self) -> Detokenizer:
        encoder: Any = self
        return Detokenizer(encoder)


def made(proposal: Proposal, verdict: Verdict, num_accepted: int) -> Round:
    step = Step("draft_model", len(proposal.tokens), num_accepted, num_accepted + 1, 1.0, 1.0, 3)
    tokens = (0,) * (num_accepted + 1)
    sources = ("draft_model",) * num_accepted + (TARGET,)
    return Round(tokens, sources, step, "", (), proposal, verdict)


def test_a_token_keeps_its_space_and_a_part_of_a_character_is_marked() -> None:
    texts = TokenTexts(Spelling())
    assert [texts.of(token) for token in (1, 6, 3, 5)] == [" the", "\n", "\ufffd", ""]


def test_a_token_is_spelt_once() -> None:
    spelling = Spelling()
    texts = TokenTexts(spelling)
    texts.of(1)
    known = spelling.num_calls
    assert texts.of(1) == " the" and spelling.num_calls == known


def test_pieces_joined_are_the_text_though_a_character_spans_tokens() -> None:
    texts = TokenTexts(Spelling())
    assert texts.pieces((2, 3, 4, 6)) == ("cat", "", "\U0001f408", "\n")
    assert "".join(texts.pieces((2, 3))) == "cat\ufffd"
    assert texts.pieces(()) == ()


def test_a_chain_is_accepted_then_rejected_then_not_reached() -> None:
    verdict = Verdict((0,), 9, (), (1.0, 0.25, None))
    found = drafted_tokens(
        made(chain((1, 2, 7), None, (0.9, 0.8, 0.7)), verdict, 1), TokenTexts(Spelling())
    )
    assert [one.outcome for one in found] == ["accepted", "rejected", "not_reached"]
    assert [one.acceptance for one in found] == [1.0, 0.25, None]
    assert [(one.text, one.confidence) for one in found[:2]] == [(" the", 0.9), (" cat", 0.8)]


def test_in_a_tree_the_sibling_tried_first_is_rejected_and_the_rest_not_reached() -> None:
    proposal = Proposal((1, 2, 7, 6), (-1, -1, 0, 1))
    verdict = Verdict((1,), 9, (), (0.1, 0.5, None, 0.0))
    found = drafted_tokens(made(proposal, verdict, 1), TokenTexts(Spelling()))
    assert [one.outcome for one in found] == ["rejected", "accepted", "not_reached", "rejected"]


@pytest.mark.parametrize("num_kept", [0, 1])
def test_what_stands_beyond_the_end_of_the_reply_counts_as_not_reached(num_kept: int) -> None:
    verdict = Verdict((0, 1), 9, (), (1.0, 1.0, 0.3))
    found = drafted_tokens(made(chain((1, 2, 7)), verdict, num_kept), TokenTexts(Spelling()))
    assert sum(one.outcome == "accepted" for one in found) == num_kept
    assert not any(one.outcome == "rejected" for one in found)


def test_a_round_without_a_draft_names_nothing() -> None:
    texts = TokenTexts(Spelling())
    assert drafted_tokens(made(Proposal(), Verdict((), 1), 0), texts) == ()
    assert drafted_tokens(replace(made(chain((1,)), Verdict((), 1), 0), verdict=None), texts) == ()
