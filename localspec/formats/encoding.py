"""Text to token ids by a tokenizer.json of strangers, within limits of time and output.

A tokenizer.json is a program of a kind: its regular expressions may take exponential time, and its
normalizers may multiply a text. `check_growth` refuses the second at load. `encoded` gives up a
text that takes too long and explains every fault as a sentence.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from localspec.core.errors import ModelError, RequestError, first_line

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

# Seconds for any text, and characters a second for a long one: a busy old processor does five times
# as many.
LIMIT_S, CHARACTERS_PER_S = 10.0, 20_000
# Texts of so many characters are encoded without a thread, which takes longer than they do: the
# library gives up an expression after about 0.2 seconds at one character, so these end by
# themselves in about LIMIT_S.
SHORT = 64
# Tokens per character, or characters that a replacement puts in the place of one. The sign that
# Unicode itself expands most has 18 characters of up to 3 bytes.
MOST_GROWTH = 64

_given_up: list[threading.Thread] = []


def encoded(encoder: Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """Return what `encoder.encode` does, which lets no other thread run meanwhile: of a long text
    for seconds. Raise RequestError for a text that it cannot encode within the limits."""

    def encode() -> Encoding:
        return encoder.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    encoding = _explained(encode if len(text) <= SHORT else lambda: _in_time(encode, len(text)))
    num_tokens = len(encoding.ids)
    if num_tokens > MOST_GROWTH * (len(text) + SHORT):
        raise _unusable(f"makes {num_tokens:,} tokens of {len(text):,} characters")
    return encoding


def check_growth(encoder: Tokenizer, name: str = "This model's tokenizer") -> None:
    """Raise ModelError if the parts that rewrite text multiply it, or read it by an expression
    where nothing limits their time."""
    growth = prod(_growths(_state(encoder.normalizer)))
    decoding = _state(encoder.decoder)
    growth = max(growth, prod(_growths(decoding)))
    if growth > MOST_GROWTH:
        fault = f"makes a text up to {growth:,.0f} times as long"
    elif any("Regex" in part["pattern"] for part in _replacements(decoding)):
        fault = "decodes by regular expressions"
    else:
        return
    raise ModelError(f"{name} {fault}, as no published one does. Choose another copy of the model.")


def _in_time(encode: Callable[[], Encoding], num_characters: int) -> Encoding:
    """Run in a thread, which is left alone after its time. While one still runs, none is begun."""
    _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
    if _given_up:
        raise _unusable("still works on an earlier text")
    results, errors = list[Any](), list[BaseException]()

    def run() -> None:
        try:
            results.append(encode())
        except BaseException as error:  # a panic of the library is no Exception
            errors.append(error)

    limit_s = LIMIT_S + num_characters / CHARACTERS_PER_S
    thread = threading.Thread(target=run, name="encode", daemon=True)
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        _given_up.append(thread)
        taken = f"takes more than {limit_s:.0f} seconds for {num_characters:,} characters"
        raise _unusable(taken)
    encoding: Encoding = results[0]
    return encoding


def _explained(encode: Callable[[], Encoding]) -> Encoding:
    try:
        return encode()
    except (RequestError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RequestError(
            f"This model's tokenizer fails at this text ({first_line(error)}). Write it "
            "differently, or choose another copy of the model."
        ) from None


def _unusable(fault: str) -> RequestError:
    return RequestError(
        f"This model's tokenizer {fault}, as no published one does. Load another copy of the model."
    )


def _state(part: Any) -> Any:
    """Return a part of a tokenizer as its JSON; None where the tokenizer has none."""
    return None if part is None else json.loads(part.__getstate__())


def _growths(state: Any) -> Iterator[float]:
    for part in _replacements(state):
        length = len(part["pattern"].get("String", ""))
        yield max(1.0, len(part["content"]) / length if length else len(part["content"]) + 1.0)
    for part in _parts(state):
        if part.get("type") == "Prepend":
            yield max(1.0, float(len(part["prepend"])))


def _replacements(state: Any) -> list[dict[str, Any]]:
    return [part for part in _parts(state) if part.get("type") == "Replace"]


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Yield all parts of a sequence, however deep."""
    if isinstance(state, dict):
        yield state
        state = [*state.values()]
    for inner in state if isinstance(state, list) else ():
        yield from _parts(inner)
