"""Keeps typed control-token text ordinary text while a chat template runs and its text is encoded.

`Shield` puts a private character in the place of typed control text, and `AliasedEncoder` encodes
the rendered text with names for control tokens that nobody can type.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localspec.core.errors import RequestError
from localspec.formats.encoding import encoded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PRIVATE_USE = range(0xE000, 0xF900)


class Shield:
    """Private characters that stand for typed control-token text while the template runs."""

    def __init__(self, contents: Sequence[str], source: str) -> None:
        for content in contents:
            _refuse_half_characters(content)
        used = set(source).union(*contents)
        self._free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
        self.texts: dict[str, str] = {}

    def hide(self, text: str) -> str:
        for character, hidden in self.texts.items():
            if hidden == text:
                return character
        character = next(self._free, "")
        if not character:
            raise RequestError("The conversation uses every private character. Start a new chat.")
        self.texts[character] = text
        return character

    def reveal(self, text: str) -> str:
        return "".join(self.texts.get(character, character) for character in text)


class AliasedEncoder:
    """A copy of a tokenizer whose control tokens have names that nobody can type."""

    def __init__(self, encoder: Tokenizer, controls: Mapping[int, str]) -> None:
        from tokenizers import Tokenizer  # heavy: only needed when control text was typed

        nonce = secrets.token_hex(8)  # drawn in each run, so that it is not known
        self.alias = {token: f"<{nonce}:{token}>" for token in controls}
        self._controls = controls
        plain = dict.fromkeys(("single_word", "normalized"), False)
        state = json.loads(encoder.to_str())
        for added in state["added_tokens"]:
            if added["id"] in self.alias:
                added |= {"content": self.alias[added["id"]], "special": True, **plain}
        self._encoder: Tokenizer = Tokenizer.from_str(json.dumps(state))
        # The copy numbers its added tokens differently: translate back by name.
        self._original: dict[int | None, int] = {
            self._encoder.token_to_id(added["content"]): added["id"]
            for added in state["added_tokens"]
        }

    def encode(self, text: str, unknown_id: int | None) -> list[int]:
        tokens = []
        for token in encoded(self._encoder, text).ids:
            original = self._original.get(token)
            if original is None and token in self._controls and token != unknown_id:
                raise RequestError(
                    f'This model\'s tokenizer reads the text "{self._controls[token]}" only as a '
                    "control token. Write it differently, for example with a space in it."
                )
            tokens.append(token if original is None else original)
        return tokens


def _refuse_half_characters(content: str) -> None:
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"Character {error.start + 1} of a message is half of a character pair and stands "
            "for nothing. Delete it and send again."
        ) from error
