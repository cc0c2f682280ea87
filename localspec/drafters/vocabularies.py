"""Text and tokens of a tokenizer, byte for byte, and what two tokenizers have in common.

Contract: `load_vocabulary` reads the tokenizer of a model folder as a `Vocabulary` whose
`encode` keeps every byte: the bytes of the ids, joined, are the bytes of the text. It encodes a
piece *inside* a text, so what a tokenizer does to the start of a text (a space in front, a
beginning token) is switched off, and so is Unicode composition (NFC), which leaves nearly all text
as it is. Byte-level BPE is read (GPT-2, Qwen, SmolLM, Llama 3, ours), and BPE with "▁" for the
space that falls back to bytes (Llama 2, Mistral). Any other tokenizer that changes text is refused
with ModelError, as samples show. What no sample shows, such as a control character that SmolLM
has no byte for, or the character "▁" itself, costs a draft, never correctness: a vocabulary is for
guessing only, and the target's text is cut by the target's own tokenizer.

`SharedTokens`: two ids are one token when they stand for the same bytes, or are special tokens of
the same text. Where a vocabulary has several ids for the same bytes, the one that `encode` gives
counts. `translated` puts a draft's logits on the target's ids and minus infinity on all that the
draft does not have; a softmax then renormalises over the shared part. `mass` is the share of the
draft's probability on shared tokens.

Not here: drafting, text that goes from one vocabulary into the other (cross_tokenizer).
Source: the byte alphabet is that of GPT-2's byte-level BPE; byte fallback is SentencePiece's
(arXiv 1808.06226); token-level intersection, arXiv 2502.05202.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from localspec.core.errors import ModelError
from localspec.core.files import parsed
from localspec.formats.byte_alphabet import bytes_of_piece
from localspec.formats.encoding import check_growth
from localspec.formats.folder_files import name_of
from localspec.forward.model import LanguageModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Table = Sequence[bytes | None]  # of each id the bytes it stands for

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
# The bytes of written text. Some tokenizers lack control characters, or the lead bytes of planes
# that hold no characters yet, and drop them without an error.
ORDINARY = {9, 10, 13, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1), 0xF3}
SAMPLES = (
    "Hello, world! It's a test: don't you think?",
    " one space in front, one behind ",
    "  runs    of\t\ttabs \n\n\n and   lines\r\n\r\n   \n",
    "def f(x):\n    return {'a': [1, 22, 333], \"b\": x ** 2}  # 1234567890\n",
    "Grüße, déjà vu, naïve; Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "中文没有空格，日本語もそうです。한국어",
    "😀 👩‍👩‍👧‍👦🇩🇪👍🏽 ∑∞≠ \u00a0\u200d\u2003\ufeff",
    "CamelCase UPPER lower ﬁ ² ① Ａ",
    "<s></s><unk><0x41><|endoftext|><|im_start|>",
)


class Vocabulary:
    """A tokenizer of the `tokenizers` library.

    token_bytes: for each id the bytes it stands for inside a text, None for special and unused ids.
    specials: ids of special tokens by their text, such as "<|im_end|>". opening: special ids that
    the model expects before any text; often none."""

    def __init__(self, state: dict[str, Any], name: str) -> None:
        """state: the content of its tokenizer.json. name: of the model, for sentences. Raises
        ModelError for a tokenizer that does not keep bytes."""
        self._encoder = _inside_a_text(state, name)
        self.token_bytes = _byte_table(state, self._encoder, name)
        self.specials = {
            str(added["content"]): int(added["id"])
            for added in state.get("added_tokens") or ()
            if added["special"]
        }
        first = self._encoder.encode("a", add_special_tokens=True).ids
        self.opening = list(takewhile(set(self.specials.values()).__contains__, first))
        _require_exact(self, self._encoder, name)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added; what looks like one stays text."""
        return list(self._encoder.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class Foreign:
    """A draft model of another family. model: loaded. own, targets: both vocabularies."""

    model: LanguageModel
    own: Vocabulary
    targets: Vocabulary


def load_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a model folder. Raises ModelError with what is missing or unfit."""
    return Vocabulary(_state(folder), name_of(folder))


def foreign(target_folder: Path, draft_folder: Path, model: LanguageModel) -> Foreign:
    """A loaded draft `model` with other tokens, ready for Parts. Raises ModelError."""
    own = load_vocabulary(draft_folder)
    require_ids_within(own, model.vocab_size, name_of(draft_folder))
    return Foreign(model, own, load_vocabulary(target_folder))


def require_ids_within(own: Vocabulary, size: int, name: str) -> None:
    """Raise ModelError if encoding may give an id that the model has no row for."""
    used = (i for i, piece in enumerate(own.token_bytes) if piece is not None)
    largest = max((*used, *own.opening), default=-1)
    if largest >= size:
        raise ModelError(
            f"The tokenizer of {name} has tokens up to id {largest}, but the model knows {size} "
            "only, so its files do not belong together. Fetch the draft again, or choose another."
        )


def _state(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else _converted(folder)
        state = parsed(text)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}). Fetch it again.") from None
    if not isinstance(state, dict) or "model" not in state:
        raise ModelError(f"{path} is not laid out as a tokenizer. Fetch it again.")
    return state


def _converted(folder: Path) -> str:
    """The older files of a tokenizer as tokenizer.json, by transformers."""
    from transformers import AutoTokenizer  # heavy: seconds

    try:
        found: Any = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return str(found.backend_tokenizer.to_str())
    except Exception as error:  # the library raises many types for what it cannot read
        raise ModelError(
            f"{name_of(folder)} has no tokenizer.json, and its older tokenizer files cannot be "
            "converted. A draft with another vocabulary needs tokenizer.json in both folders; "
            "fetch it as published."
        ) from error


def _inside_a_text(state: dict[str, Any], name: str) -> Tokenizer:
    """The tokenizer without what it does to the start of a text, without NFC, cutting nothing."""
    from tokenizers import Tokenizer  # heavy: only when two vocabularies meet

    changed = state | {
        "truncation": None,
        "padding": None,
        "normalizer": _unprefixed(state.get("normalizer")),
        "pre_tokenizer": _unspaced(state.get("pre_tokenizer")),
    }
    try:
        encoder: Tokenizer = Tokenizer.from_str(json.dumps(changed))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"The tokenizer of {name} cannot be read ({error}). Fetch it again."
        ) from None
    check_growth(encoder, f"The tokenizer of {name}")
    encoder.encode_special_tokens = True  # what looks like a special token stays text
    return encoder


def _unprefixed(step: Any) -> Any:
    """A normalizer that puts nothing in front and does not compose characters."""
    if step is None or step["type"] in ("Prepend", "NFC"):
        return None
    if step["type"] != "Sequence":
        return step
    kept = [_unprefixed(each) for each in step["normalizers"]]
    return step | {"normalizers": [each for each in kept if each is not None]}


def _unspaced(step: Any) -> Any:
    """A pre-tokenizer that puts no space in front."""
    match step:
        case {"type": "Sequence"}:
            return step | {"pretokenizers": [_unspaced(each) for each in step["pretokenizers"]]}
        case {"type": "Metaspace"}:
            kept = {key: value for key, value in step.items() if key != "add_prefix_space"}
            return kept | {"prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return step | {"add_prefix_space": False}
    return step


def _byte_table(state: dict[str, Any], encoder: Tokenizer, name: str) -> list[bytes | None]:
    """For each id its bytes inside a text; None for special and unused ids."""
    steps = state.get("pre_tokenizer") or {}
    kinds = {each.get("type") for each in (steps, *steps.get("pretokenizers", ()))}
    read: Callable[[str], bytes | None]
    if state["model"].get("byte_fallback"):
        read = _read_piece
    elif "ByteLevel" in kinds:
        read = bytes_of_piece
    else:
        raise ModelError(
            f"The tokenizer of {name} is not made of bytes, so what it drafts cannot be told byte "
            "by byte. Choose a draft with byte-level BPE or with byte fallback, or go without one."
        )
    tokens, others = encoder.get_vocab(False), encoder.get_added_tokens_decoder()
    table: list[bytes | None] = [None] * (1 + max((*tokens.values(), *others), default=-1))
    for token, index in tokens.items():
        table[index] = read(token)
    for index, added in others.items():
        table[index] = None if added.special else added.content.encode()
    return table


def _read_piece(token: str) -> bytes:
    """A SentencePiece piece: "<0x0A>" is one byte, anything else text."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _require_exact(vocabulary: Vocabulary, encoder: Tokenizer, name: str) -> None:
    """Raise ModelError unless the bytes of text have tokens and samples come back unchanged."""
    table = vocabulary.token_bytes
    missing = {bytes([byte]) for byte in ORDINARY} - {*table}
    if missing:
        raise _inexact(name, f"it has no token for the byte 0x{min(missing).hex().upper()}")
    # Some added tokens that stand for text remove the spaces around them.
    added = (token for token in encoder.get_added_tokens_decoder().values() if not token.special)
    pieces = [token.content for token in added if token.content.strip()]
    for sample in (*SAMPLES, *(f"a {piece} b" for piece in pieces)):
        back = b"".join(table[i] or b"" for i in vocabulary.encode(sample))
        if back != sample.encode():
            given_back = back.decode(errors="replace")
            raise _inexact(name, f"it reads {sample!r} and gives back {given_back!r}")


def _inexact(name: str, how: str) -> ModelError:
    return ModelError(
        f"The tokenizer of {name} does not keep text byte for byte: {how}. Across vocabularies "
        "every byte must count. Choose a draft with byte-level BPE or with byte fallback."
    )


@dataclass(frozen=True)
class SharedTokens:
    """own_of: the draft's id of each of the target's ids that it has. specials: the special tokens
    among them. targets_size: V."""

    own_of: Mapping[int, int]
    specials: Mapping[int, int]
    targets_size: int
    own_ids: torch.Tensor  # [S]
    targets_ids: torch.Tensor  # [S]

    @classmethod
    def between(
        cls,
        own: Vocabulary,
        own_size: int,
        targets: Vocabulary,
        targets_size: int,
        device: torch.device,
    ) -> SharedTokens:
        """sizes: rows of both models' heads; ids beyond them are no tokens."""
        ours, theirs = _ids_of(own, own_size), _ids_of(targets, targets_size)
        own_of = {theirs[key]: ours[key] for key in theirs if key in ours}
        specials = {theirs[key]: ours[key] for key in theirs if key in ours and type(key) is str}
        own_ids = torch.tensor(list(own_of.values()), dtype=torch.long, device=device)
        targets_ids = torch.tensor(list(own_of), dtype=torch.long, device=device)
        return cls(own_of, specials, targets_size, own_ids, targets_ids)

    @property
    def held_bytes(self) -> int:
        return self.own_ids.nbytes + self.targets_ids.nbytes

    def translated(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the target's ids: [V_draft] -> [V]."""
        row = logits.new_full((self.targets_size,), float("-inf"))
        row[self.targets_ids] = logits[self.own_ids]
        return row

    def mass(self, logits: torch.Tensor, temperature: float) -> float:
        """Probability of the shared tokens in a row of the draft, [V_draft]. One host copy."""
        probs = torch.softmax((logits - logits.amax()) / temperature, dim=-1)
        return float(probs[self.own_ids].sum())


def _ids_of(vocabulary: Vocabulary, size: int) -> dict[bytes | str, int]:
    """One id below `size` for each token: by its bytes, a special token by its text. An added
    padding token often has an id beyond the model's rows."""
    found: dict[bytes | str, int] = {}
    for index, piece in enumerate(vocabulary.token_bytes[:size]):
        if piece and (piece not in found or _is_written(vocabulary, piece, index)):
            found[piece] = index
    return found | {text: index for text, index in vocabulary.specials.items() if index < size}


def _is_written(vocabulary: Vocabulary, piece: bytes, index: int) -> bool:
    """Whether encoding the text of `piece` gives this very id."""
    try:
        return vocabulary.encode(piece.decode()) == [index]
    except UnicodeDecodeError:
        return False


# -- where text may be cut ---------------------------------------------------------------------

LONGEST_TAIL = 64  # tokens since the last seam, after which text is cut by force
KEPT_TAIL = 16  # tokens after a forced seam
FIRST_OF_SCRIPTS_WITHOUT_SPACES = "\u2e80"  # Chinese, Japanese and after them emoji


def starts_of(ids: Sequence[int], table: Table) -> list[int] | None:
    """Where in the text each token begins, and the end of the last, [n + 1]; None when an id
    stands for no text."""
    starts = [0]
    for token in ids:
        piece = table[token] if 0 <= token < len(table) else None
        if piece is None:
            return None
        starts.append(starts[-1] + len(piece))
    return starts


def last_seam(raw: bytes, starts: Sequence[int]) -> int:
    """Index of the last token that begins at a seam; 0 if there is none.

    A seam is a space after a character that is none. Tokenizers of both kinds cut there whatever
    comes later, so text before it need not be encoded again. Text without spaces gets a seam by
    force; where the tokenizer would have cut otherwise, that costs a draft, never correctness.

    starts: [n + 1] of the tokens of `raw`, the first of which begins at a seam already."""
    for index in range(len(starts) - 2, 0, -1):
        at = starts[index]
        if raw[at] == 0x20 and not _is_space_before(raw, at):
            return index
    if len(starts) - 1 > LONGEST_TAIL:
        for index in range(len(starts) - 1 - KEPT_TAIL, 0, -1):
            if raw[starts[index]] & 0xC0 != 0x80:  # not inside a character
                return index
    return 0


def _is_space_before(raw: bytes, at: int) -> bool:
    """Whether the character before byte `at` is a space of any kind."""
    return raw[max(0, at - 4) : at].decode(errors="ignore")[-1:].isspace()


def last_word(text: str) -> int:
    """Where the last word of a text begins, in bytes: a run of letters and digits, or of neither,
    with the space before it. A character of a script that uses no spaces is a word."""
    place = len(text) - 1
    while place > 0 and not _is_word_start(text[place - 1], text[place]):
        place -= 1
    return len(text[: max(0, place)].encode())


def _is_word_start(before: str, character: str) -> bool:
    if before.isspace():  # a space belongs to the word after it
        return False
    changes = before.isalnum() != character.isalnum()
    return changes or character.isspace() or character >= FIRST_OF_SCRIPTS_WITHOUT_SPACES


def complete_text(raw: bytes) -> str:
    """The text up to the first byte that is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        return raw[: error.start].decode()
