"""Messages to token ids, and token ids back to text.

`ChatTemplate` wraps the tokenizer of one model folder: the model's own chat template, the ids that
end a reply, and a `Detokenizer` that never shows half a character.

Contract: a conversation without control-token text renders to exactly the ids of transformers'
`apply_chat_template`. Typed control-token text ("<|im_end|>") reaches the model as ordinary text:
it can neither end a message nor begin another. A control token is one that the tokenizer marks
special, or one that the chat template itself writes (Qwen's "<tool_call>"). Code of a model's
repository is never run.

Not here: sampling, stop strings (reply_text), the end of a reply (engine).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.chat.detokenizer import STAND_INS, Detokenizer, byte_tokens
from localspec.chat.shield import AliasedEncoder, Shield
from localspec.chat.template_process import template_process
from localspec.chat.template_reading import PLAIN_READING, reading_of
from localspec.chat.thinking import SWITCHES, THINK, marks_in, turn_of
from localspec.chat.tool_formats import call_format_of, with_fitting_ids
from localspec.core.backend import Message
from localspec.core.errors import ModelError, RequestError, first_line
from localspec.core.files import read_json
from localspec.core.thought import ThoughtLimit
from localspec.formats.byte_alphabet import bytes_of_piece
from localspec.formats.encoding import check_growth, encoded
from localspec.formats.folder_files import require_tokenizer, template_of_processor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROBE = "localspec"
LAST = 16  # tokens of a prompt that show whether it opens a thought
NONE_SWITCHED: Mapping[str, bool] = {}
# Of a text that goes on as it stands: what a base model was trained to do.
CONTINUED = "{% for message in messages %}{{ message.content }}{% endfor %}"


class ChatTemplate:
    """The chat format of one model.

    tokenizer: a transformers tokenizer of the `tokenizers` library. end_ids: the end-of-text ids of
    the model's files; the token that the template writes after a reply and the tokenizer's own end
    of text are added. is_raw: the messages are one text, which the model continues; so too where
    the model has no chat template. Raises ModelError without a tokenizer.json.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = (), is_raw: bool = False) -> None:
        if not tokenizer.is_fast:
            raise ModelError(
                "This model's tokenizer has no tokenizer.json, so special tokens cannot be told "
                "from text. Choose a model folder that contains tokenizer.json."
            )
        self._tokenizer = tokenizer
        self._encoder: Tokenizer = tokenizer.backend_tokenizer
        check_growth(self._encoder)
        # A tokenizer.json may have a length limit of its training, which would cut silently.
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.longest_token = max(map(len, self._encoder.get_vocab()), default=1)  # characters
        self.is_raw = is_raw or not tokenizer.chat_template
        if self.is_raw:
            begins = tokenizer.bos_token_id in self.encode_prompt("")
            tokenizer.chat_template = f"{'{{ bos_token }}' * begins}{CONTINUED}"
        try:
            sources = tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])
        except ValueError as error:  # several, and none is the usual one
            raise ModelError(
                "This model has several chat templates, and none of them is called default. Choose "
                "another copy of it."
            ) from error
        self._source = "\n".join(dict.fromkeys(sources))  # some models have a second one for tools
        added = self._encoder.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._controls = self._special | {
            i: token.content
            for i, token in added.items()
            if token.content.strip() and token.content in self._source
        }
        self._bytes_of = byte_tokens(self._encoder)
        self._aliased: AliasedEncoder | None = None
        known = None if self.is_raw else marks_in(self._source, (t.content for t in added.values()))
        self.thinks = known is not None
        self.marks = None if self.is_raw else known or THINK
        self.reading = PLAIN_READING if self.is_raw else reading_of(self._apply)
        names = (token.content for token in added.values())
        # None: one that is not read.
        self.call_format = call_format_of(self._source, names, self._apply)
        marks = self.marks.all if self.marks else ""
        marks += " ".join(self.call_format.marks) if self.call_format else ""
        self._spelled = {i: text for i, text in self._special.items() if text in marks}
        self._switch = self._found_switch()
        # How thoughts are told by tokens; None where a mark is no token of its own.
        self.thought_limit = self._found_limit()
        self.end_ids: frozenset[int] = frozenset(end_ids) | self._ends_of_the_template()

    @classmethod
    def load(cls, folder: Path, is_raw: bool = False) -> ChatTemplate:
        """Read the tokenizer of a model folder. Raises ModelError."""
        import transformers  # heavy: seconds, and it brings torch

        # By the family AutoTokenizer would build a class that splits text in its own way, whatever
        # tokenizer.json says; and it imports the list of all families, which takes half a second.
        require_tokenizer(folder)
        is_whole = (folder / "tokenizer.json").is_file()
        reader = "PreTrainedTokenizerFast" if is_whole else "AutoTokenizer"
        try:
            tokenizer: Any = getattr(transformers, reader).from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library raises many types for a damaged folder
            raise ModelError(
                f"The tokenizer in {folder} cannot be read ({first_line(error)}). "
                "The folder needs tokenizer.json and tokenizer_config.json as published."
            ) from error
        tokenizer.chat_template = tokenizer.chat_template or template_of_processor(folder)
        return cls(tokenizer, end_ids_of_folder(folder), is_raw)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        thinks: bool | None = None,
    ) -> list[int]:
        """Ids of the conversation and the beginning of the reply. thinks: what the template is
        told, where it has a switch. Raises RequestError where the template refuses the
        conversation, knows no tools or writes nothing, or a text cannot be encoded."""
        if "tools" not in self._source and (tools or any(one.role == "tool" for one in messages)):
            raise RequestError(
                "This model's chat format knows no tools. Load a model that was trained to call "
                "them, or ask without."
            )
        messages = messages if self.is_raw else self.reading.joined(messages)
        texts = [message.content for message in messages]
        texts += [call.arguments for message in messages for call in message.tool_calls]
        texts += [message.thinking for message in messages]
        shield = Shield([*texts, json.dumps(tools, ensure_ascii=False)], self._source)
        shielded = [self._shield(message, shield) for message in messages]
        text = self._apply(
            shielded,
            add_generation_prompt=True,
            tools=[self._shielded_data(tool, shield) for tool in tools],
            switched={} if thinks is None or self._switch is None else {self._switch: thinks},
        )
        if tokens := self._encode_shielded(text, shield):
            return tokens
        raise RequestError("No text comes of this chat format. Write more, or load another model.")

    def encode_reply(self, text: str, thinking: str = "", has_begun: bool = False) -> list[int]:
        """Ids of a reply as it follows `render`; typed control tokens stay text. thinking: what was
        thought before it, which goes on where there is no text. has_begun: the prompt opens it."""
        shield = Shield([text, thinking], self._source)
        reply = self._shield(Message("assistant", text, thinking=thinking), shield)
        if not thinking or self.marks is None:
            return self._encode_shielded(reply.content, shield)
        opened = "" if has_begun else f"{self.marks.open}\n"
        closed = f"{self.marks.closing}{reply.content}" if text else ""
        return self._encode_shielded(f"{opened}{reply.thinking}{closed}", shield)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text without template; control-token text becomes control tokens."""
        return list(encoded(self._encoder, text).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode_text`, after what the tokenizer begins every text with."""
        return list(encoded(self._encoder, text, add_special_tokens=True).ids)

    def encoded_texts(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the ids of each text; none of a text that cannot be encoded."""
        encoded_texts = list[list[int]]()
        for text in texts:
            with suppress(RequestError):
                encoded_texts.append(self.encode_text(text))
        return encoded_texts

    @property
    def added_ids(self) -> frozenset[int]:
        """The tokens that no text is cut into: control tokens, marks of thoughts and of calls."""
        return frozenset(self._encoder.get_added_tokens_decoder()) | self.end_ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of all tokens, without control tokens."""
        return Detokenizer(self._encoder, bytes_of=self._bytes_of).whole(tokens)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token that is only a part of a character, None where its
        vocabulary is not made of bytes."""
        if (byte := self._bytes_of.get(token)) is not None:
            return bytes([byte])
        return bytes_of_piece(self._encoder.id_to_token(token) or "")

    @property
    def vocab_size(self) -> int:
        return int(self._encoder.get_vocab_size(with_added_tokens=True))

    def tokenizer_json(self) -> str:
        return str(self._encoder.to_str())

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._encoder, self._spelled, self._bytes_of)

    def detokenizer_for(self, stops: Sequence[str]) -> tuple[Detokenizer, tuple[str, ...]]:
        """Return what turns a reply into text, and its stop strings as they read in that text.

        A control token that a stop string names has no text. A character of STAND_INS stands for
        it, in the text and in one more form of the stop string."""
        spelled, forms = dict(self._spelled), list(stops)
        characters = map(chr, STAND_INS)
        for token, name in sorted(self._special.items(), key=lambda item: -len(item[1])):
            if token not in spelled and any(name in stop for stop in stops):
                spelled[token] = next(characters)
                forms = [form.replace(name, spelled[token]) for form in forms]
        forms = list(dict.fromkeys((*stops, *forms)))
        return Detokenizer(self._encoder, spelled, self._bytes_of), tuple(forms)

    def spelled(self, tokens: Sequence[int]) -> str:
        """As `decode`, with the marks of thoughts."""
        return self.detokenizer().whole(tokens)

    def has_begun_thought(self, prompt: Sequence[int]) -> bool:
        """Whether this prompt, of `render`, opens a thought that the reply goes on with."""
        if self.marks is None:
            return False
        end = str(self._encoder.decode(list(prompt[-LAST:]), skip_special_tokens=False))
        return end.rstrip().endswith(self.marks.open)

    @property
    def num_mark_tokens(self) -> int:
        """Tokens around a thought that is ended early."""
        limit = self.thought_limit
        return 0 if limit is None else len(limit.opening) + len(limit.closing)

    def _found_limit(self) -> ThoughtLimit | None:
        added = self._encoder.get_added_tokens_decoder()
        if self.marks is None:
            return None
        opening, close = map(self.encode_text, (self.marks.open, self.marks.close))
        if opening[0] not in added or close[0] not in added:
            return None
        return ThoughtLimit(tuple(opening), close[0], self._after_a_word(self.marks.closing))

    def _after_a_word(self, text: str) -> tuple[int, ...]:
        """Ids of a text within another one; at the beginning some tokenizers put a space."""
        before, both = self.encode_text(PROBE), self.encode_text(f"{PROBE}{text}")
        return tuple(both[len(before) :])

    def _found_switch(self) -> str | None:
        """The name by which the template is told whether to think; None where it has none."""
        asked = (Message("user", "Hello."),)
        for name in SWITCHES:
            if name not in self._source:
                continue
            try:
                shown = {self._apply(asked, True, switched={name: on}) for on in (True, False)}
                if len(shown) == 2:
                    return name
            except RequestError:  # it refuses so short a conversation
                continue
        return None

    def _apply(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] = (),
        switched: Mapping[str, bool] = NONE_SWITCHED,
        has_parts: bool | None = None,
    ) -> str:
        """As transformers' apply_chat_template; answers of tools want the template of tools."""
        has_parts = self.reading.has_parts if has_parts is None else has_parts
        names_tools = tools or any(message.role == "tool" for message in messages)
        template = self._tokenizer.get_chat_template(tools=[{}] if names_tools else None)
        asked = {
            "conversations": [[turn_of(message, has_parts) for message in messages]],
            "tools": list(tools) or None,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        words = self._tokenizer.special_tokens_map
        return template_process().render({**words, **asked, **switched})

    def _shield(self, message: Message, shield: Shield) -> Message:
        """Replace each typed control token by a private character."""
        # A reply keeps its "<think>", which the template looks for.
        controls = self._special if message.role == "assistant" else self._controls
        calls = tuple(
            replace(call, arguments=self._hidden(call.arguments, self._controls, shield))
            for call in message.tool_calls
        )
        content = self._hidden(message.content, controls, shield)
        thinking = self._hidden(message.thinking, self._controls, shield)
        message = with_fitting_ids(replace(message, tool_calls=calls), self.call_format)
        return replace(message, content=content, thinking=thinking)

    def _hidden(self, text: str, controls: Mapping[int, str], shield: Shield) -> str:
        while spans := list(self._find(text, controls)):
            for start, end, _ in reversed(spans):
                text = text[:start] + shield.hide(text[start:end]) + text[end:]
        return text

    def _shielded_data(self, data: Any, shield: Shield) -> Any:
        """JSON data with every text shielded."""
        if isinstance(data, str):
            return self._hidden(data, self._controls, shield)
        if isinstance(data, Mapping):
            return {name: self._shielded_data(value, shield) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return [self._shielded_data(value, shield) for value in data]
        return data

    def _find(self, text: str, controls: Mapping[int, str]) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of every control token that the tokenizer finds in `text`."""
        encoding = encoded(self._encoder, text)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token not in controls:
                continue
            found = text[start:end]
            # Unknown characters also encode to a special id, but are no control text.
            if controls[token] == self._tokenizer.unk_token and found.strip() != controls[token]:
                continue
            yield start + len(found) - len(found.lstrip()), start + len(found.rstrip()), token

    def _encode_shielded(self, text: str, shield: Shield) -> list[int]:
        """Encode the template's control tokens as control tokens and typed ones as text.

        In one call, so that merges and leading spaces are the usual ones."""
        if not shield.texts:
            return self.encode_text(text)
        if self._aliased is None:
            self._aliased = AliasedEncoder(self._encoder, self._controls)
        pieces: list[str] = []
        done = 0
        for start, end, token in self._find(text, self._controls):
            pieces += [shield.reveal(text[done:start]), self._aliased.alias[token]]
            done = end
        pieces.append(shield.reveal(text[done:]))
        return self._aliased.encode("".join(pieces), self._tokenizer.unk_token_id)

    def _ends_of_the_template(self) -> frozenset[int]:
        """The tokenizer's end of text, and the control token that the template writes right after a
        reply."""
        ends = {self._tokenizer.eos_token_id} - {None}
        ends.update(
            token for _, _, token in list(self._find(self.reading.tail, self._controls))[:1]
        )
        return frozenset(ends)


def end_ids_of_folder(folder: Path) -> frozenset[int]:
    """End-of-text ids of generation_config.json and config.json; none if absent."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            named = read_json(path).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path} is not a JSON object. Download it again.") from error
        listed = named if isinstance(named, list) else [named]
        ends.update(end for end in listed if isinstance(end, int))
    return frozenset(ends)
