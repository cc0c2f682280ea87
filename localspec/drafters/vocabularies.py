"""Text and tokens of one tokenizer, byte for byte, and what two tokenizers have in common.

Contract: `load_vocabulary` reads the tokenizer of a model folder as a parts.Vocabulary whose
`encode` gives back the bytes it was given: the bytes of its ids, put together, are the text's own.
It encodes a piece *inside* a text, so what a tokenizer does to the start of a text (a space put in
front, a beginning token) is switched off, and so is Unicode composition (NFC), which leaves nearly
all text as it is. Understood are byte-level BPE (GPT-2, Qwen, SmolLM, Llama 3, ours) and BPE with
"▁" for the space that falls back to bytes (Llama 2, Mistral). Whatever else changes text is refused
with ModelError, after a look at what samples come back as. What no sample shows, a control
character that SmolLM has no byte for or the character "▁" itself, which comes back as a space from
the second kind, costs a draft, never correctness.

A vocabulary is for guessing only: what the target reads and writes is cut by its own tokenizer.

Source: the byte alphabet is that of GPT-2's byte-level BPE; byte fallback is SentencePiece's
(arXiv 1808.06226).

`SharedTokens`: two ids are one token when they stand for the same bytes, or are special tokens of
the same text. Where a vocabulary has several ids for the same bytes, the one it writes itself
counts. `translated` puts a draft's logits on the target's ids and minus infinity on all that the
draft cannot say; a softmax then renormalises over the shared part. `mass` is how much of what the
draft wants to say it can say there. Source: token-level intersection, arXiv 2502.05202.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.drafters.parts import Foreign, Vocabulary
from localspec.errors import ModelError
from localspec.forward.model import LanguageModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer
from dataclasses import dataclass

import torch

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
# Bytes that written text is made of. Some tokenizers lack control characters, or the lead bytes of
# planes that hold no characters yet; they drop them without a word.
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


class TokenizerVocabulary:
    """A tokenizer of the `tokenizers` library as a parts.Vocabulary.

    state: the content of its tokenizer.json. name: of the model, for sentences. Raises ModelError
    for a tokenizer that does not keep bytes."""

    def __init__(self, state: dict[str, Any], name: str) -> None:
        self._encoder = _inside_a_text(state, name)
        self._special = {
            str(added["content"]): int(added["id"])
            for added in state.get("added_tokens") or ()
            if added["special"]
        }
        self._bytes = _byte_table(state, self._encoder, name)
        _require_exact(self, name)

    def encode(self, text: str) -> list[int]:
        return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._bytes[i] or b"" for i in ids).decode(errors="replace")

    def token_bytes(self) -> list[bytes | None]:
        return self._bytes

    def markup(self) -> Mapping[str, int]:
        return self._special

    def opening(self) -> list[int]:
        whole = self._encoder.encode("a", add_special_tokens=True).ids
        special = set(self._special.values())
        length = next((i for i, token in enumerate(whole) if token not in special), 0)
        return list(whole[:length])


def load_vocabulary(folder: Path) -> TokenizerVocabulary:
    """The vocabulary of a model folder. Raises ModelError with what is missing or unfit."""
    return TokenizerVocabulary(_state(folder), folder.name)


def foreign(target_folder: Path, draft_folder: Path, model: LanguageModel) -> Foreign:
    """A loaded draft `model` with other tokens, ready for Parts. Raises ModelError."""
    own = load_vocabulary(draft_folder)
    require_ids_within(own, model.vocab_size, draft_folder.name)
    return Foreign(model, own, load_vocabulary(target_folder))


def require_ids_within(own: Vocabulary, size: int, name: str) -> None:
    """Raise ModelError if encoding may give an id that the model has no row for."""
    used = (i for i, piece in enumerate(own.token_bytes()) if piece is not None)
    largest = max((*used, *own.opening()), default=-1)
    if largest >= size:
        raise ModelError(
            f"The tokenizer of {name} has tokens up to id {largest}, but the model knows {size} "
            "only, so its files do not belong together. Fetch the draft again, or choose another."
        )


def _state(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else _converted(folder)
        state = json.loads(text)
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
            f"{folder.name} has no tokenizer.json, and its older tokenizer files cannot be "
            "converted. A draft with another vocabulary needs tokenizer.json in both folders; "
            "fetch it as published."
        ) from error


def _inside_a_text(state: dict[str, Any], name: str) -> Tokenizer:
    """The tokenizer without what it does to the start of a text, without NFC, cutting nothing."""
    from tokenizers import Tokenizer  # heavy: only when two vocabularies meet

    changed = state | {
        "truncation": None,
        "padding": None,
        "normalizer": _without(state.get("normalizer"), {"Prepend", "NFC"}, "normalizers"),
        "pre_tokenizer": _without_prefix(state.get("pre_tokenizer")),
    }
    try:
        encoder: Tokenizer = Tokenizer.from_str(json.dumps(changed))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"The tokenizer of {name} cannot be read ({error}). Fetch it again."
        ) from None
    encoder.encode_special_tokens = True  # what looks like a special token stays text
    return encoder


def _without(step: Any, kinds: set[str], key: str) -> Any:
    """A normalizer less the steps of some kinds."""
    if step is None or step["type"] in kinds:
        return None
    if step["type"] != "Sequence":
        return step
    kept = [_without(each, kinds, key) for each in step[key]]
    return step | {key: [each for each in kept if each is not None]}


def _without_prefix(step: Any) -> Any:
    """A pre-tokenizer that puts no space in front."""
    if step is None:
        return None
    if step["type"] == "Sequence":
        return step | {"pretokenizers": [_without_prefix(each) for each in step["pretokenizers"]]}
    if step["type"] == "Metaspace":
        kept = {key: value for key, value in step.items() if key != "add_prefix_space"}
        return kept | {"prepend_scheme": "never"}
    return step | {"add_prefix_space": False} if step["type"] == "ByteLevel" else step


def _byte_table(state: dict[str, Any], encoder: Tokenizer, name: str) -> list[bytes | None]:
    """For each id its bytes inside a text; None for special and unused ids."""
    read: Callable[[str], bytes | None]
    if state["model"].get("byte_fallback"):
        read = _read_piece
    elif _has_step(state, "ByteLevel"):
        read = _ByteAlphabet().read
    else:
        raise ModelError(
            f"The tokenizer of {name} is not made of bytes, so what it drafts cannot be told byte "
            "by byte. Choose a draft with byte-level BPE or with byte fallback, or go without one."
        )
    tokens = encoder.get_vocab(with_added_tokens=False)
    table: list[bytes | None] = [None] * (1 + max(encoder.get_vocab().values(), default=-1))
    for token, index in tokens.items():
        table[index] = read(token)
    for index, added in encoder.get_added_tokens_decoder().items():
        table[index] = None if added.special else added.content.encode()
    return table


def _has_step(state: dict[str, Any], kind: str) -> bool:
    step = state.get("pre_tokenizer") or {}
    return kind in {each.get("type") for each in (step, *step.get("pretokenizers", ()))}


def _read_piece(token: str) -> bytes:
    """A SentencePiece piece: "<0x0A>" is one byte, anything else text."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


class _ByteAlphabet:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on, in order."""

    def __init__(self) -> None:
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = (byte for byte in range(0x100) if byte not in printable)
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(0x100 + place): byte for place, byte in enumerate(others)}

    def read(self, token: str) -> bytes | None:
        """None for a token that is not written in it."""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:
            return None


def _require_exact(vocabulary: TokenizerVocabulary, name: str) -> None:
    """Raise ModelError unless the bytes of text have tokens and samples come back unchanged."""
    table = vocabulary.token_bytes()
    missing = {bytes([byte]) for byte in ORDINARY} - {*table}
    if missing:
        raise _inexact(name, f"it has no token for the byte 0x{min(missing).hex().upper()}")
    plain = [piece for piece in _added_text(vocabulary) if piece.strip()]
    for sample in (*SAMPLES, *(f"a {piece} b" for piece in plain)):
        back = b"".join(table[i] or b"" for i in vocabulary.encode(sample))
        if back != sample.encode():
            before, after = _difference(sample, back.decode(errors="replace"))
            raise _inexact(name, f"it reads {before!r} and gives back {after!r}")


def _added_text(vocabulary: TokenizerVocabulary) -> Iterable[str]:
    """Added tokens that stand for text; some take the spaces around them away."""
    added = vocabulary._encoder.get_added_tokens_decoder().values()
    return [token.content for token in added if not token.special]


def _inexact(name: str, how: str) -> ModelError:
    return ModelError(
        f"The tokenizer of {name} does not keep text byte for byte: {how}. Across vocabularies "
        "every byte must count. Choose a draft with byte-level BPE or with byte fallback."
    )


def _difference(left: str, right: str) -> tuple[str, str]:
    """The two texts from a little before where they part."""
    pairs = enumerate(zip(left, right, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    start = max(0, place - 3)
    return left[start : place + 8], right[start : place + 8]


def starts_of(ids: Sequence[int], table: Sequence[bytes | None]) -> list[int] | None:
    """Where in the text each token begins, and the end of the last, [n + 1]; None when an id
    stands for no text."""
    starts = [0]
    for token in ids:
        piece = table[token] if 0 <= token < len(table) else None
        if piece is None:
            return None
        starts.append(starts[-1] + len(piece))
    return starts


@dataclass(frozen=True)
class SharedTokens:
    """own_of: the draft's id of each of the target's ids that it has. targets_size: V."""

    own_of: Mapping[int, int]
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
        pairs = [(theirs[key], ours[key]) for key in theirs if key in ours]
        columns = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).to(device)  # [S, 2]
        own_ids, targets_ids = columns[:, 1].contiguous(), columns[:, 0].contiguous()
        return cls(dict(pairs), targets_size, own_ids, targets_ids)

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


def special_pairs(
    own: Vocabulary, own_size: int, targets: Vocabulary, targets_size: int
) -> dict[int, int]:
    """The draft's special id for each special id of the target with the same text."""
    ours, theirs = _specials_of(own, own_size), _specials_of(targets, targets_size)
    return {theirs[text]: ours[text] for text in theirs if text in ours}


def _specials_of(vocabulary: Vocabulary, size: int) -> dict[str, int]:
    """Special tokens that the model has a row for; one added for padding often has none."""
    return {text: index for text, index in vocabulary.markup().items() if index < size}


def _ids_of(vocabulary: Vocabulary, size: int) -> dict[bytes | str, int]:
    """One id for each token: bytes for text, its name for a special one."""
    found: dict[bytes | str, int] = {}
    for index, piece in enumerate(vocabulary.token_bytes()[:size]):
        if piece and (piece not in found or _is_written(vocabulary, piece, index)):
            found[piece] = index
    return found | _specials_of(vocabulary, size)


def _is_written(vocabulary: Vocabulary, piece: bytes, index: int) -> bool:
    """Whether encoding the text of `piece` gives this very id."""
    try:
        return vocabulary.encode(piece.decode()) == [index]
    except UnicodeDecodeError:
        return False
