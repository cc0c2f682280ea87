"""A local backend over a tiny or scripted target, whose tokens are short texts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from localspec.chat.detokenizer import Detokenizer
from localspec.chat.local import Loaded, LocalBackend
from localspec.chat.tool_formats import FORMATS
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.core import decoding
from localspec.core.backend import Chunk, Description, DrafterStatus, Message, Request
from localspec.core.decoding import (
    DraftPlan,
    Outcome,
    Proposal,
    chain,
)
from localspec.engine.engine import Engine
from tests.kit.tiny import scripted

END = 0
PIECES = ["", "a", "b", "c", "ab", "bc", "STO", "P", "\n", "\n\n", " x", "y"]
SAY = {piece: token for token, piece in enumerate(PIECES)}
HELLO = (Message("user", "abc"),)


class _Encoder:
    """Decodes by joining pieces."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(PIECES[token] for token in tokens)


class _Template:
    """One token for each character; the end of text is token 0."""

    end_ids = frozenset({END})
    thinks = is_raw = False
    marks = None
    call_format = FORMATS["tool_call"]
    thought_limit = None
    num_mark_tokens = 0
    longest_token = 1

    def spelled(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def has_begun_thought(self, prompt: object) -> bool:
        return False

    def render(
        self, messages: tuple[Message, ...], tools: object = (), thinks: bool | None = None
    ) -> list[int]:
        return [SAY[c] for message in messages for c in message.content]

    def decode(self, tokens: Sequence[int]) -> str:
        return _Encoder().decode(tokens)

    def detokenizer_for(self, stops: tuple[str, ...]) -> tuple[Detokenizer, tuple[str, ...]]:
        encoder: Any = _Encoder()
        return Detokenizer(encoder), stops


class Knowing:
    """Proposes what the script says next, wrong from token `wrong_from` of each draft on."""

    name = "knowing"
    shapes_itself = False
    block_length = None
    memory_bytes = 0

    def __init__(self, script: Sequence[int], prompt_length: int, wrong_from: int = 99) -> None:
        self._script, self._start, self._wrong_from = script, prompt_length, wrong_from

    def signal(self, sequence: decoding.Sequence) -> str:
        return "script"

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        place = len(sequence.tokens) - self._start
        right = self._script[place : place + plan.num_draft_tokens]
        return chain(
            tuple(SAY["\n\n"] if i >= self._wrong_from else t for i, t in enumerate(right))
        )

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        pass


def backend_of(
    target: Any, drafters: dict[str, Any], context_length: int = 64, template: Any = None
) -> LocalBackend:
    """Return a backend of these parts. template: one token for each character by default."""
    statuses = (
        *(DrafterStatus(name, True, "ready") for name in drafters),
        DrafterStatus("absent", False, "no draft model was chosen."),
    )
    return LocalBackend(
        Loaded(
            engine=Engine(target, drafters),
            controller=Controller(drafters, Costs(), Acceptance()),
            template=template or _Template(),
            description=Description("tiny", None, "cpu", "float32", context_length, statuses),
            identity="tiny | cpu",
            return_memory=lambda: None,
        )
    )


def writing(*pieces: str, wrong_from: int = 99) -> LocalBackend:
    """A backend that answers HELLO with `pieces` and an end of text."""
    script = [SAY[piece] for piece in pieces] + [END]
    target = scripted(script, 3, len(PIECES))
    return backend_of(target, {"knowing": Knowing(script, 3, wrong_from)})


def ask(backend: LocalBackend, **wanted: Any) -> list[Chunk]:
    """Return the chunks of the reply to HELLO. wanted: fields of the request."""
    request = Request(HELLO, **{"max_tokens": 20, **wanted})
    return list(backend.generate(request, threading.Event()))


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)
