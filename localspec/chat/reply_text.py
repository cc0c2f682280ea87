"""Between tokens and the text of a reply: where it starts, where a stop string ends it, and what
each token spells.

Contract:
- `start_of` continues a reply exactly. The prompt is the one that the reply was first generated
  after, followed by the reply's own ids where they are known and spell its text, including those
  of half a character at its end; where a stop string cut the text, as many ids as spell it. Only
  otherwise, after a crash or an import, the text is encoded again, which may divide it differently
  than the model did; `source` says which. Control tokens in that text stay text, but for those
  that the chat format lets the model generate.
- `ReplyText` gives text as soon as it cannot become a mark or a stop string any more; neither a
  stop string nor what follows it is ever shown.
- `TokenTexts.of` is a token as it stands inside a text, remembered by id; a token that is only a
  part of a character is U+FFFD, a control token "".

Not here: the chat format and incremental decoding (template), the engine's end of text (engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Literal, NamedTuple

from localspec.chat.context_room import max_tokens_of
from localspec.chat.detokenizer import REPLACEMENT, Detokenizer, without_stand_ins
from localspec.chat.template import ChatTemplate
from localspec.chat.thinking import Marks, divided, num_begun
from localspec.core.backend import (
    BYTES_AS_TEXT,
    Backend,
    DraftedToken,
    DraftOutcome,
    Logprob,
    Message,
    Request,
)
from localspec.core.decoding import Round, Step, TokenLogprob
from localspec.core.errors import ContextOverflow, RequestError
from localspec.core.speculation import num_checked
from localspec.core.thought import ThoughtLimit
from localspec.core.turn_stats import TurnStats

LEAD = 8  # tokens of the prompt before a reply
MAX_CUT_TOKENS = 8  # of the known ids, how many may lie beyond the text


@dataclass(frozen=True)
class Start:
    """prompt: all ids before the first new one. begun: those of the reply among them, at its end,
    which spell its text and at most half a character more. source: of begun; None for a reply from
    the start. spelled: the thought and the text of begun with their marks. has_thought: the prompt
    before begun opens a thought. lead: of a text that goes on as it stands, its last ids: whether a
    space stands before the next one depends on them."""

    prompt: tuple[int, ...]
    begun: tuple[int, ...] = ()
    source: Literal["tokens", "text"] | None = None
    spelled: str = ""
    has_thought: bool = False
    lead: tuple[int, ...] = ()


def start_of(template: ChatTemplate, request: Request, context_length: int) -> Start:
    """A thought that the prompt opens is ended there where none is wanted. Raises RequestError, and
    ContextOverflow for a text that is not worth the time to encode it."""
    lengths = [len(one.content.strip()) for one in request.messages]
    if template.is_raw:  # nothing stands between the texts
        lengths = [sum(lengths)]
    fewest_tokens = sum(ceil(length / template.longest_token) for length in lengths)
    if fewest_tokens > context_length:
        raise ContextOverflow(fewest_tokens, 0, context_length, are_fewest=True)
    if request.is_raw:
        return _raw_start(template, request.messages[0].content)
    asked = request.messages[:-1] if request.continues else request.messages
    prompt = tuple(template.render(asked, request.tools, request.thinks))
    has_thought, limit = template.has_begun_thought(prompt), template.thought_limit
    if request.continues:
        return _continued(template, request, prompt, has_thought)
    if template.is_raw:
        return _going_on(template, prompt)
    if has_thought and request.thinks is False and limit is not None:
        return Start((*prompt, *limit.closing))
    return Start(prompt, has_thought=has_thought)


def _raw_start(template: ChatTemplate, text: str) -> Start:
    prompt = tuple(template.encode_prompt(text))
    if not prompt:
        raise RequestError("The prompt is empty, so there is nothing to continue. Write a text.")
    return _going_on(template, prompt)


def _going_on(template: ChatTemplate, prompt: tuple[int, ...]) -> Start:
    lead = prompt[-LEAD:]
    return Start(prompt, spelled=template.spelled(lead), lead=lead)


def _continued(
    template: ChatTemplate, request: Request, prompt: tuple[int, ...], has_thought: bool
) -> Start:
    reply = request.messages[-1]
    assert reply.role == "assistant", "only a reply can be continued"
    lead = prompt[-LEAD:] if template.is_raw else ()
    found = _spelling(template, reply, request.begun_tokens, has_thought, lead)
    source: Literal["tokens", "text"] = "tokens"
    if found is None:
        begun = tuple(template.encode_reply(reply.content, reply.thinking, has_thought))
        found, source = (begun, template.spelled(begun)), "text"
    begun, spelled = found
    if lead:
        lead, spelled = (*lead, *begun), template.spelled(lead) + spelled
    return Start((*prompt, *begun), begun, source, spelled, has_thought, lead)


def predicted(
    template: ChatTemplate, start: Start, text: str, context_length: int
) -> tuple[int, ...]:
    """The ids of a predicted reply, after the end of the prompt, so that its first ones are found
    there; none where nothing is predicted. No more than a reply can have: to index a megabyte of
    text takes seconds, in which nobody is answered."""
    if not text:
        return ()
    found = template.encode_reply(text[: context_length * template.longest_token])
    return (*start.prompt[-LEAD:], *found[:context_length])


def _spelling(
    template: ChatTemplate,
    reply: Message,
    tokens: tuple[int, ...],
    has_thought: bool,
    lead: tuple[int, ...],
) -> tuple[tuple[int, ...], str] | None:
    """The longest prefix of these ids that spells the reply and at most half a character more, and
    what it spells without that; None where there is none."""
    wanted = reply.thinking + reply.content
    for num in range(len(tokens), max(0, len(tokens) - MAX_CUT_TOKENS - 1), -1):
        spelled = template.spelled((*lead, *tokens[:num]))[len(template.spelled(lead)) :]
        thought, answer, _ = divided(spelled, template.marks, has_thought, has_ended=True)
        whole = thought + answer
        if not whole.startswith(wanted) or whole[len(wanted) :].strip(REPLACEMENT):
            continue
        if thought.startswith(reply.thinking):
            return tokens[:num], spelled[: len(spelled) - len(whole) + len(wanted)]
    return None


def until_stop(
    text: str, stops: Sequence[str], start: int = 0, has_ended: bool = False
) -> tuple[int, bool]:
    """How much of a text that grows may be shown, and whether a stop string ends it there: the
    first one to be completed, however the text is cut. start: no stop string begins before it."""
    hits = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    if hits:
        return min(hits)[1], True
    num_open = 0 if has_ended else max((num_begun(text, stop) for stop in stops), default=0)
    return len(text) - num_open, False


class Said(NamedTuple):
    """New characters of a reply. lengths: of thinking and text, by each token that belongs to the
    reply. num_thinking_tokens: of them."""

    thinking: str
    text: str
    lengths: tuple[int, ...] = ()
    num_thinking_tokens: int = 0


class ReplyText:
    """What one reply thinks and says. A stop string ends the reply, but no thought. marks: None
    where all of it is text."""

    def __init__(
        self, detokenizer: Detokenizer, stops: tuple[str, ...], start: Start, marks: Marks | None
    ) -> None:
        detokenizer.begin(start.lead or start.begun, start.spelled)
        self._detokenizer = detokenizer
        self._marks, self._has_thought, self._stops = marks, start.has_thought, stops
        self._text = start.spelled
        shown = divided(start.spelled, marks, start.has_thought, has_ended=True)
        self._num_thought, self._num_answer = len(shown.thought), len(shown.answer)
        self._stop_from, _ = until_stop(shown.answer, stops, len(shown.answer))
        self._is_open = divided(start.spelled, marks, start.has_thought).is_open
        self.is_stopped = False

    @property
    def is_thinking(self) -> bool:
        return self._is_open is True

    @property
    def may_think(self) -> bool:
        return self._is_open is not False

    def push(self, tokens: Sequence[int], num_forced: int = 0) -> Said:
        """num_forced: of the tokens, those at the end that are not the model's."""
        found = [Said("", "")]
        for token in tokens:
            found.append(self._said(self._detokenizer.push(token)))
            if self.is_stopped:
                break
        lengths = tuple(len(one.thinking) + len(one.text) for one in found[1:])
        return Said(
            "".join(one.thinking for one in found),
            "".join(one.text for one in found),
            lengths,
            sum(one.num_thinking_tokens for one in found[: len(tokens) - num_forced + 1]),
        )

    def flush(self) -> Said:
        """What was held, once no more tokens come."""
        if self.is_stopped:
            return Said("", "")
        return self._said(self._detokenizer.flush(), has_ended=True)

    def _said(self, characters: str, has_ended: bool = False) -> Said:
        """Of one token."""
        was_thinking = self.is_thinking
        self._text += characters
        thought, answer, self._is_open = divided(
            self._text, self._marks, self._has_thought, has_ended
        )
        if answer and not self.may_think:  # the thought is settled
            self._text, self._marks = answer, None
        self._stop_from, self.is_stopped = until_stop(
            answer, self._stops, self._stop_from, has_ended
        )
        new = thought[self._num_thought :], answer[self._num_answer : self._stop_from]
        self._num_thought += len(new[0])
        self._num_answer += len(new[1])
        num_thinking_tokens = int(was_thinking and self.is_thinking)
        return Said(without_stand_ins(new[0]), without_stand_ins(new[1]), (), num_thinking_tokens)


class TokenTexts:
    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.of = cache(self._found)
        self._with_bytes = cache(self._spelled_by_bytes)

    def logprobs(self, found: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
        return tuple(
            Logprob(
                self._with_bytes(one.token),
                one.logprob,
                tuple((self._with_bytes(token), logprob) for token, logprob in one.top),
            )
            for one in found
        )

    def _spelled_by_bytes(self, token: int) -> str:
        """Return the text of a token, of a part of a character its bytes (backend.Logprob)."""
        text = self.of(token)
        found = self._template.bytes_of(token) if text == REPLACEMENT else None
        return text if found is None else found.decode("utf-8", BYTES_AS_TEXT)

    def _found(self, token: int) -> str:
        # Decoded after itself: at the beginning of a text some tokenizers drop a leading space.
        alone = self._template.decode((token,))
        if REPLACEMENT in alone:
            return REPLACEMENT
        return self._template.decode((token, token))[len(alone) :]


def drafted_tokens(found: Round, texts: TokenTexts) -> tuple[DraftedToken, ...]:
    """What a round proposed. found: already cut to what belongs to the reply."""
    proposal, verdict = found.proposal, found.verdict
    path = verdict.path[: found.step.num_accepted_tokens]
    has_ended = len(path) < len(verdict.path)  # the rest was accepted, but the reply had ended
    end = path[-1] if path else -1
    confidences = proposal.confidences or (None,) * len(proposal.tokens)
    drafted = []
    for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        outcome: DraftOutcome = "not_reached"
        if node in path:
            outcome = "accepted"
        elif parent == end and not has_ended:
            outcome = "rejected"
        # Most of a tree is never reached, and the text of a new token takes a tokenizer call.
        text = "" if outcome == "not_reached" else texts.of(token)
        drafted.append(DraftedToken(token, text, parent, confidences[node], outcome))
    return tuple(drafted)


def shortened(found: Round, count: int) -> Round:
    """The round as if it had ended after `count` output tokens."""
    if count == len(found.tokens):
        return found
    lenient = tuple(place for place in found.lenient if place < count)
    num_accepted = min(found.step.num_accepted_tokens, count)
    step = replace(
        found.step,
        num_output_tokens=count,
        num_accepted_tokens=num_accepted,
        num_checked_tokens=num_checked(found.proposal.parents, found.verdict.path, num_accepted),
        num_lenient_tokens=len(lenient),
    )
    return replace(
        found,
        tokens=found.tokens[:count],
        provenance=found.provenance[:count],
        step=step,
        lenient=lenient,
        logprobs=found.logprobs[:count],
    )


def thought_limit_of(
    template: ChatTemplate, request: Request, start: Start, text: ReplyText
) -> ThoughtLimit | None:
    """None where no thought can come, or is known by its text alone."""
    limit = template.thought_limit
    if limit is None or not text.may_think:
        return None
    limit = replace(limit, budget=request.thinking_budget, shares_max_tokens=request.is_ceiling)
    if not text.is_thinking:
        return limit
    num_marks = 0 if start.has_thought else len(limit.opening)
    return replace(limit, num_begun=max(0, len(start.begun) - num_marks))


def with_thought(stats: TurnStats, said: Said, step: Step) -> TurnStats:
    if not said.num_thinking_tokens:
        return stats
    return replace(
        stats,
        num_thinking_tokens=stats.num_thinking_tokens + said.num_thinking_tokens,
        thinking_ms=stats.thinking_ms + step.round_ms,
    )


def limited(
    backend: Backend,
    template: ChatTemplate,
    request: Request,
    start: Start,
    text: ReplyText,
    context_length: int,
) -> Request:
    """The request with limits that the context has room for. Raises ContextOverflow."""
    max_tokens = max_tokens_of(backend, request, len(start.prompt), context_length)
    budget = 0 if request.thinks is False else request.thinking_budget
    if budget is None or not text.may_think:
        return replace(request, max_tokens=max_tokens, thinking_budget=None)
    if request.is_ceiling:
        most = max(0, max_tokens - template.num_mark_tokens - 1)  # the answer has a token at least
        return replace(request, max_tokens=max_tokens, thinking_budget=min(budget, most))
    num_before = len(start.prompt) + template.num_mark_tokens
    room = context_length - num_before
    if room < 1:
        raise ContextOverflow(num_before, 1, context_length)
    wanted = room - budget if request.max_tokens is None else max_tokens
    answer = max(1, min(wanted, room))
    budget = min(budget, room - answer)
    is_known_by_text = template.thinks and template.thought_limit is None
    max_tokens = answer + budget if is_known_by_text else answer
    return replace(request, max_tokens=max_tokens, thinking_budget=budget)


def refuse_unknown_tokens(prompt: Sequence[int], num_known: int, template: ChatTemplate) -> None:
    """On a GPU a token without an embedding would end the process. Raises RequestError."""
    unknown = next((token for token in prompt if token >= num_known), None)
    if unknown is not None:
        raise RequestError(
            f"The model's tokenizer makes token {unknown} of this text, and the model has "
            f"embeddings for {num_known} tokens only: its files do not belong together. Leave out "
            f"{template.decode([unknown])!r}, or fetch the model again."
        )
