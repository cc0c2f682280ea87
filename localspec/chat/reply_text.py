"""Between tokens and the text of a reply: where it starts, where a stop string ends it, and what
each token spells.

Contract:
- `start_of` continues a reply exactly. The prompt is the one that the reply was first generated
  after, followed by the reply's own ids where they are known and spell its text, including those
  of half a character at its end; where a stop string cut the text, as many ids as spell it. Only
  otherwise, after a crash or an import, the text is encoded again, which may divide it differently
  than the model did; `source` says which. Control tokens in that text stay text, but for those
  that the chat format lets the model generate.
- `StopStrings` takes text in pieces of any size and releases it as soon as it cannot become a stop
  string any more; neither a stop string nor what follows it is ever shown.
- `TokenTexts.of` is a token as it stands inside a text, remembered by id; a token that is only a
  part of a character is U+FFFD, a control token "". `pieces` is exact: joined, they are the text.

Not here: the chat format and incremental decoding (template), the engine's end of text (engine).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from localspec.backend import DraftedToken, DraftOutcome, Logprob, Message
from localspec.chat.template import REPLACEMENT, ChatTemplate, Detokenizer
from localspec.core import Round, TokenLogprob
from localspec.errors import RequestError

LEAD = 8  # tokens of the prompt before a predicted reply
MAX_CUT_TOKENS = 8  # of the known ids, how many may lie beyond the text


@dataclass(frozen=True)
class Start:
    """prompt: all ids before the first new one. begun: those of the reply among them, at its end,
    which spell `text` and at most half a character more. source: of begun; None for a reply from
    the start."""

    prompt: tuple[int, ...]
    begun: tuple[int, ...] = ()
    text: str = ""
    source: Literal["tokens", "text"] | None = None


def start_of(
    template: ChatTemplate,
    messages: tuple[Message, ...],
    continues: bool,
    begun_tokens: Sequence[int] = (),
    tools: Sequence[Mapping[str, Any]] = (),
) -> Start:
    """continues: the last message is a reply to be continued. Raises RequestError."""
    if not continues:
        return Start(tuple(template.render(messages, tools)))
    assert messages[-1].role == "assistant", "only a reply can be continued"
    text, prompt = messages[-1].content, tuple(template.render(messages[:-1], tools))
    known = _spelling(template, text, tuple(begun_tokens))
    if known is not None:
        return Start((*prompt, *known), known, text, "tokens")
    begun = tuple(template.encode_reply(text))
    return Start((*prompt, *begun), begun, text, "text")


def raw_start(template: ChatTemplate, text: str) -> Start:
    """A text to be continued as it stands. Raises RequestError where it is empty."""
    prompt = tuple(template.encode_prompt(text))
    if not prompt:
        raise RequestError("The prompt is empty, so there is nothing to continue. Write a text.")
    return Start(prompt)


def predicted(template: ChatTemplate, start: Start, text: str) -> tuple[int, ...]:
    """The ids of a predicted reply, after the end of the prompt, so that its first ones are found
    there; none where nothing is predicted."""
    return (*start.prompt[-LEAD:], *template.encode_reply(text)) if text else ()


def _spelling(template: ChatTemplate, text: str, tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    """The longest prefix of these ids that spells the text and at most half a character more; None
    where there is none."""
    for num in range(len(tokens), max(0, len(tokens) - MAX_CUT_TOKENS - 1), -1):
        spelled = template.decode(tokens[:num])
        if spelled.startswith(text) and not spelled[len(text) :].strip(REPLACEMENT):
            return tokens[:num]
    return None


class StopStrings:
    """Ends a reply at the first stop string to be completed, however the text is cut.

    begun: the text of the reply that this one continues; a stop string may have begun in it.
    Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], begun: str = "") -> None:
        if "" in stops:
            raise RequestError("A stop string is empty. Remove it, or enter a text.")
        self._stops = tuple(stops)
        self._held = begun[len(begun) - self._num_open(begun) :]
        self._num_shown = len(self._held)  # of the held text, how much the page has already

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string is complete). On a hit, the stop string
        and all after it are dropped."""
        text, shown = self._held + text, self._num_shown
        hits = [(start + len(s), start) for s in self._stops if (start := text.find(s)) >= 0]
        if hits:
            self._held, self._num_shown = "", 0
            return text[shown : min(hits)[1]], True
        end = len(text) - self._num_open(text)
        self._held, self._num_shown = text[end:], max(0, shown - end)
        return text[shown:end], False

    def flush(self) -> str:
        """The held text, once no more text comes."""
        held = self._held[self._num_shown :]
        self._held, self._num_shown = "", 0
        return held

    def _num_open(self, text: str) -> int:
        """Characters at the end that may become a stop string."""
        return max((num_begun(text, stop) for stop in self._stops), default=0)


def num_begun(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class ReplyText:
    """The text of one reply, cut at a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...], start: Start) -> None:
        detokenizer.begin(start.begun, start.text)
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, start.text)
        self.is_stopped = False

    def push(self, tokens: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """(text to show, characters of it by each token that belongs to the reply)."""
        shown, lengths = "", list[int]()
        for token in tokens:
            text, self.is_stopped = self._stops.push(self._detokenizer.push(token))
            shown += text
            lengths.append(len(text))
            if self.is_stopped:
                break
        return shown, tuple(lengths)

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        shown, self.is_stopped = self._stops.push(self._detokenizer.flush())
        return shown if self.is_stopped else shown + self._stops.flush()


class TokenTexts:
    """See the module."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._known: dict[int, str] = {}

    def of(self, token: int) -> str:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._found(token)
        return known

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """The text that each token completes, "" for one inside a character. The last one takes
        what is left."""
        detokenizer = self._template.detokenizer()
        found = [detokenizer.push(token) for token in tokens]
        if found:
            found[-1] += detokenizer.flush()
        return tuple(found)

    def logprobs(self, found: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
        return tuple(
            Logprob(self.of(one.token), one.logprob, tuple((self.of(t), lp) for t, lp in one.top))
            for one in found
        )

    def _found(self, token: int) -> str:
        # Decoded after itself: at the beginning of a text some tokenizers drop a leading space.
        alone = self._template.decode((token,))
        if REPLACEMENT in alone:
            return REPLACEMENT
        return self._template.decode((token, token))[len(alone) :]


def drafted_tokens(found: Round, texts: TokenTexts) -> tuple[DraftedToken, ...]:
    """What a round proposed. found: already cut to what belongs to the reply."""
    proposal, verdict = found.proposal, found.verdict
    if proposal is None or verdict is None or not proposal.tokens:
        return ()
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
    step = replace(
        found.step,
        num_output_tokens=count,
        num_accepted_tokens=min(found.step.num_accepted_tokens, count),
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
