"""Turns rows of text and generated dialogues into token arrays on disk.

Contract: rows come from .jsonl.xz files (`messages` or `text`, with `source` and `license`);
shares say which part of the tokens each source gets; `pack` writes `tokens.npy` [rows, length + 1]
uint16 and `weights.npy` (loss weight in percent, uint8). A row begins at the start of a document;
documents follow one another, and the last one is cut. A source that runs out starts again.
"""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from localspec.core.errors import LocalspecError
from tools.demo_pair import dialogues
from tools.demo_pair.tokenizer import END_OF_TEXT_ID, PAD_ID, encode_chat, encode_text

GENERATED = "generated"
HUMAN_CHATS = ("self_dialogue", "topicalchat", "synthpersona")
PASSAGE_SOURCES = (
    "fairytale_stories",
    "pd_folktales",
    "asp_stories",
    "pb_stories",
    "standardebooks_children",
)
FRIEND_SYSTEMS = (
    "You are chatting with a friend.",
    "You are a friend in a casual chat.",
    "Chat like a person.",
)
ASSISTANT_WEIGHTS = {"assistant": 1.0, "user": 0.2, "system": 0.1}
HUMAN_WEIGHTS = {"assistant": 0.7, "user": 0.3, "system": 0.0}

SHORT_SHARES: dict[str, float] = {
    GENERATED: 48, "self_dialogue": 7, "topicalchat": 2, "synthpersona": 4, "opendatasets": 0.5,
    "chatterbot": 1, "tldr": 6, "wordnet_defs": 7, "factbook": 3, "asp_stories": 1.2,
    "pb_stories": 2, "fairytale_stories": 3, "pd_folktales": 3, "fairytale_qa": 5,
    "gsm8k_train": 4, "mbpp_train": 1, "thealgorithms_fn": 1.5,
}  # fmt: skip
CLOSING_SHARES: dict[str, float] = {
    GENERATED: 60, "self_dialogue": 4, "topicalchat": 1, "synthpersona": 4, "opendatasets": 0.5,
    "chatterbot": 1, "tldr": 5, "wordnet_defs": 6, "factbook": 2, "asp_stories": 1,
    "pb_stories": 1.5, "fairytale_stories": 2, "pd_folktales": 1, "fairytale_qa": 6,
    "gsm8k_train": 3, "mbpp_train": 1, "thealgorithms_fn": 1,
}  # fmt: skip
LONG_SHARES: dict[str, float] = {
    GENERATED: 60, "fairytale_qa": 15, "fairytale_stories": 7, "pd_folktales": 7,
    "self_dialogue": 3, "synthpersona": 2, "wordnet_defs": 3, "gsm8k_train": 3,
}  # fmt: skip

Row = dict[str, Any]
Document = tuple[list[int], list[float]]


class CorpusError(LocalspecError):
    """The corpus cannot be read or does not hold what the mix needs."""


@dataclass(frozen=True)
class PackPlan:
    """What one pack holds. passage_chars: range of the length of passages in reading tasks."""

    length: int
    num_tokens: int
    shares: Mapping[str, float]
    passage_share: float
    passage_chars: tuple[int, int]
    seed: int


def read_rows(files: Sequence[Path]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = defaultdict(list)
    for file in files:
        if not file.exists():
            raise CorpusError(
                f"The corpus file {file.name} does not exist. Pass --corpus with a .jsonl.xz file."
            )
        try:
            with lzma.open(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    row = _row(file, number, line)
                    rows[row["source"]].append(row)
        except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
            raise CorpusError(
                f"The corpus file {file.name} cannot be read ({error}). It must be JSON lines "
                "packed by xz: xz FILE.jsonl makes such a file."
            ) from error
    return dict(rows)


def require_known(rows: Mapping[str, Sequence[Row]], flag: str) -> None:
    """Raises CorpusError where no row is of a source that the mix takes anything from."""
    known = sorted({*SHORT_SHARES} - {GENERATED})
    if not any(rows.get(source) for source in known):
        raise CorpusError(
            f"The files of {flag} hold no row of a source that the mix knows. Give each row one "
            f"of these as its source: {', '.join(known)}."
        )


def _row(file: Path, number: int, line: str) -> Row:
    try:
        row: Row = json.loads(line)
        told = (
            [row["text"]]
            if "text" in row
            else [
                part
                for message in row["messages"]
                for part in (message["role"], message["content"])
            ]
        )
        if not all(isinstance(part, str) for part in (row["source"], *told)):
            raise TypeError("something else than text")
    except (ValueError, LookupError, TypeError) as error:
        raise CorpusError(
            f"Line {number} of {file.name} is no row of a corpus. Each is one JSON object with "
            '"source", and "text" or "messages" of "role" and "content".'
        ) from error
    return row


def row_text(row: Row) -> str:
    """Return the text of a row, roles included, for training the tokenizer and for passages."""
    if "text" in row:
        return str(row["text"])
    return "\n".join(f"{message['role']}\n{message['content']}" for message in row["messages"])


def sample_texts(rows: Mapping[str, Sequence[Row]], num_chars: int, seed: int) -> Iterator[str]:
    """Yield about `num_chars` of text in the shares of the short pack, for the tokenizer."""
    total = sum(SHORT_SHARES.values())
    for source, share in SHORT_SHARES.items():
        rng = Random(f"{seed}/tokenizer/{source}")
        pool = list(rows.get(source, ()))
        rng.shuffle(pool)
        left = num_chars * share / total
        while left > 0 and (pool or source == GENERATED):
            row = (
                {"messages": dialogues.generate(rng).messages()}
                if source == GENERATED
                else pool.pop()
            )
            text = row_text(row)
            left -= len(text)
            yield text


def make_passages(
    rows: Mapping[str, Sequence[Row]], chars: tuple[int, int], count: int, rng: Random
) -> list[str]:
    """Cut passages of whole sentences out of stories. chars: shortest and longest length."""
    texts = [row_text(row) for source in PASSAGE_SOURCES for row in rows.get(source, ())]
    passages: list[str] = []
    while texts and len(passages) < count:
        text = rng.choice(texts)
        wanted = int(chars[0] * (chars[1] / chars[0]) ** rng.random())
        start = rng.randrange(max(1, len(text) - wanted // 2))
        begin = text.find(". ", start) + 2
        passage = text[begin : begin + wanted].strip()
        end = max(passage.rfind(". "), passage.rfind(".\n"))
        passages.append(passage[: end + 1] if end > chars[0] // 2 else passage)
    return [passage for passage in passages if len(passage) > chars[0] // 2]


def encode_row(tokenizer: Tokenizer, row: Row, rng: Random) -> Document:
    """Encode one corpus row; chats between people mostly get a system message that says so."""
    if "text" in row:
        ids = encode_text(tokenizer, row["text"])
        return [*ids, END_OF_TEXT_ID], [0.6] * (len(ids) + 1)
    messages = list(row["messages"])
    is_human = row["source"] in HUMAN_CHATS
    if is_human and rng.random() < 0.7:
        messages.insert(0, {"role": "system", "content": rng.choice(FRIEND_SYSTEMS)})
    ids, weights = encode_chat(
        tokenizer, messages, HUMAN_WEIGHTS if is_human else ASSISTANT_WEIGHTS
    )
    return [*ids, END_OF_TEXT_ID], [*weights, 0.1]


def documents(
    tokenizer: Tokenizer, rows: Mapping[str, Sequence[Row]], plan: PackPlan, source: str
) -> Iterator[Document]:
    """Yield the documents of one source without end."""
    rng = Random(f"{plan.seed}/{source}")
    if source == GENERATED:
        texts = make_passages(rows, plan.passage_chars, 4000, rng)
        while True:
            dialogue = dialogues.generate(rng, texts, plan.passage_share)
            ids, weights = encode_chat(tokenizer, dialogue.messages(), ASSISTANT_WEIGHTS)
            yield [*ids, END_OF_TEXT_ID], [*weights, 0.1]
    if not rows.get(source):
        raise CorpusError(
            f"The corpus has no rows of source '{source}'. Remove it from the shares or add rows."
        )
    while True:
        for row in rng.sample(list(rows[source]), len(rows[source])):
            yield encode_row(tokenizer, row, rng)


def split_long(document: Document, length: int) -> Iterator[Document]:
    """Cut a document that is longer than a row, so that its later parts are seen too."""
    ids, weights = document
    for start in range(0, len(ids), length):
        yield ids[start : start + length], weights[start : start + length]


def fill_rows(pieces: Iterator[Document], length: int) -> Iterator[tuple[list[int], list[float]]]:
    """Yield rows of `length` + 1 tokens; each begins with a fresh document."""
    ids: list[int] = []
    weights: list[float] = []
    for piece_ids, piece_weights in pieces:
        ids += piece_ids
        weights += piece_weights
        if len(ids) > length:
            yield ids[: length + 1], weights[: length + 1]
            ids, weights = [], []


def interleave(
    tokenizer: Tokenizer,
    rows: Mapping[str, Sequence[Row]],
    plan: PackPlan,
    shares: Mapping[str, float],
) -> Iterator[Document]:
    """Draw documents so that each source gets its share of the tokens."""
    streams = {source: documents(tokenizer, rows, plan, source) for source in shares}
    given = {source: 0.0 for source in shares}
    while True:
        # The source that is furthest behind its share comes next: exact shares without a schedule.
        source = min(given, key=lambda one: given[one] / shares[one])
        for piece in split_long(next(streams[source]), plan.length):
            given[source] += len(piece[0])
            yield piece


def pack(
    tokenizer: Tokenizer, rows: Mapping[str, Sequence[Row]], plan: PackPlan, folder: Path
) -> int:
    """Write one pack; return its number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    count = max(1, plan.num_tokens // plan.length)
    tokens = np.full((count, plan.length + 1), PAD_ID, dtype=np.uint16)
    weights = np.zeros((count, plan.length + 1), dtype=np.uint8)
    shares = {
        source: share
        for source, share in plan.shares.items()
        if source == GENERATED or rows.get(source)
    }
    filled = fill_rows(interleave(tokenizer, rows, plan, shares), plan.length)
    order = Random(plan.seed).sample(range(count), count)
    for place in order:
        ids, row_weights = next(filled)
        tokens[place] = ids
        weights[place] = np.rint(np.asarray(row_weights) * 100)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "weights.npy", weights)
    return count
