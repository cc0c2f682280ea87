"""What a reply is held to: JSON, JSON of a schema, or the call of a tool.

Contract: `grammar_of` makes the text of a grammar that a `Request` carries, and refuses a schema
that cannot be held to, before any model is asked. A keyword of JSON Schema that the library does
not know is refused, never ignored; a word that is none constrains nothing, as the standard has it.
Separators are ", " and ": " and no other space stands between values, so that all but the values is
forced, and a model cannot write spaces without end. A call stands between "<tool_call>" and
"</tool_call>" or alone, as the model was trained to write it. Its arguments are those that the
schema names, unless it says that there are others.

`Grammars.of` makes the `core.Grammar` of one turn. The index of a vocabulary is built when the
first grammar is asked for, once a model. The matcher follows the text that it is asked about by
rolling back to what both begin with; a round asks about texts that differ at their ends only.

The library is llguidance (derivatives of regular expressions and an Earley parser, walked along a
trie of the vocabulary). It was chosen over xgrammar, whose masks take as long: with Qwen's 151,936
tokens a mask of a string, a name or a number took 8 to 30 µs (median 13, xgrammar 11), a
roll-back 3 µs in both, the index 1 s and 33 MB (xgrammar 2 s, 88 MB). It needs no other package;
xgrammar needs apache-tvm-ffi, transformers and triton.

Not here: the tokens' choice under the mask (engine.sampling), the fields of requests (api).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localspec.chat.schemas import MOST_PROPERTIES, closed, refuse_too_large
from localspec.chat.template import ChatTemplate
from localspec.core.errors import RequestError, first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of the parser, which needs four for each optional property that may come next. The library's own
# 2,000 would end a reply in its middle that has 500 to choose among.
MOST_ITEMS_IN_ROW = 5 * MOST_PROPERTIES
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def grammar_of(
    schema: Mapping[str, Any] | None = None, functions: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The grammar of JSON that is valid by the schema, or of a call of one of these functions, each
    with its name and the schema of its parameters. Raises RequestError."""
    from llguidance import LLMatcher  # 0.2 s, which a chat without grammars need not wait for

    parameters = [function.get("parameters") or {} for function in functions]
    refuse_too_large([*parameters, *([] if schema is None else [schema])])
    start, rules = list[str](), list[str]()
    if schema is not None:
        start.append("json")
        rules.append(f"json: {_json_rule(schema)}")
    if functions:
        start += ["call", '"<tool_call>\\n" call "\\n</tool_call>"']
        rules += _call_rules(functions)
    rules.insert(0, f"start: {' | '.join(start)}")
    grammar: str = LLMatcher.grammar_from_lark("\n".join(rules))
    is_unusable, faults = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_unusable:
        raise _refused(faults[0])
    return grammar


def _call_rules(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Models were trained to call the arguments by one of two names."""
    rules = [f"call: {' | '.join(f'call_{place}' for place in range(len(functions)))}"]
    for place, function in enumerate(functions):
        head = json.dumps('{"name": ' + json.dumps(function["name"]) + ', "')
        arguments = ANY_OBJECT | closed(function.get("parameters") or {})
        rules += [
            f'call_{place}: {head} ("arguments" | "parameters") "\\": " arguments_{place} "}}"',
            f"arguments_{place}: {_json_rule(arguments)}",
        ]
    return rules


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"


def _refused(fault: str) -> RequestError:
    """fault: of the library, which shows its grammar, line by line, behind the reason."""
    reason = re.split(r"\n +\d+ \| ", fault)[0].split("failed to compile JSON schema: ")[-1]
    return RequestError(
        f"localspec cannot hold a reply to this schema: {' '.join(reason.split())}. Change the "
        "schema, or ask for any JSON."
    )


class Grammars:
    """The grammars of one model's replies."""

    def __init__(self, template: ChatTemplate, vocab_size: int) -> None:
        """vocab_size: of the model's logits, which may have more rows than there are tokens."""
        self._template = template
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None

    def of(self, grammar: str, begun: Sequence[int] = ()) -> ReplyGrammar:
        """begun: tokens of the reply that stand before the first new one. Raises RequestError."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_items_in_row=MOST_ITEMS_IN_ROW)
        matcher = LLMatcher(self._indexed(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        if matcher.try_consume_tokens(list(begun)) < len(begun):
            raise RequestError(
                "The reply that is to be continued does not begin as its response format or tool "
                "asks. Leave it out, or ask for text."
            )
        found = ReplyGrammar(matcher)
        found.masks((), [()])  # a schema that ends nowhere is found out by its first mask
        return found

    def _indexed(self) -> LLTokenizer:
        if self._vocabulary is None:
            from llguidance import LLTokenizer

            template = self._template
            try:  # slices of the vocabulary made no mask faster, and take four times the memory
                self._vocabulary = LLTokenizer(
                    template.tokenizer_json(),
                    n_vocab=max(self._vocab_size, template.vocab_size),
                    eos_token=sorted(template.end_ids),
                    slices=[],
                )
            except Exception as error:  # the library raises what it likes
                raise RequestError(
                    "Replies of this model cannot be held to a format, because its tokenizer is of "
                    f"a kind that grammars cannot read ({first_line(error)}). Ask for text."
                ) from error
        return self._vocabulary


class ReplyGrammar:
    """core.Grammar of one reply."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._path = list[int]()  # what the matcher has read

    def masks(self, reply: Sequence[int], texts: Sequence[Sequence[int]]) -> list[bytes]:
        """See core.Grammar. Raises RequestError where a state is too complex to go on from."""
        return [self._mask([*reply, *text]) for text in texts]

    def forced(self, text: Sequence[int]) -> tuple[int, ...]:
        """See core.Grammar."""
        return tuple(self._matcher.compute_ff_tokens()) if self._go_to([*text]) else ()

    def _mask(self, text: list[int]) -> bytes:
        is_reached = self._go_to(text)
        found: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(
                "The format that the reply is held to became too complex to go on "
                f"({first_line(ValueError(self._matcher.get_error()))}). Simplify its schema."
            )
        return found if is_reached else b"\xff" * len(found)

    def _go_to(self, text: list[int]) -> bool:
        """Read this text from where it differs from what was read; whether it may be."""
        kept = min(len(self._path), len(text))
        while self._path[:kept] != text[:kept]:  # at the end of a draft: a few steps
            kept -= 1
        self._matcher.rollback(len(self._path) - kept)
        kept += self._matcher.try_consume_tokens(text[kept:])
        self._path = text[:kept]
        return kept == len(text)
