"""Whether a draft may serve a target: their full token-to-id maps, compared entry by entry.

Contract: a draft is compatible when every token has the same id in both. Sizes prove nothing: two
vocabularies of the same size may differ in one id, and rows padded onto an embedding are no tokens.
Merges are not compared: only the target's tokenizer ever splits text. Whether a draft with other
tokens may draft by its text is only seen once both tokenizers are loaded (drafters.vocabularies).

No tokenizer is loaded: it reads `tokenizer.json`, or `vocab.json` with what the older files beside
it add.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.core.errors import DraftMismatch, ModelError
from localspec.formats.folder_files import name_of, read_object
from localspec.formats.gguf_file import read_header
from localspec.formats.gguf_tokenizer import tokenizer_of
from localspec.machine.gguf_models import gguf_of

TokenMap = Mapping[str, int]


@dataclass(frozen=True)
class Compatibility:
    """is_compatible None: not known, because a tokenizer is not on this machine yet."""

    is_compatible: bool | None
    reason: str


UNKNOWN = Compatibility(None, "its vocabulary is checked after download")


def read_token_map(folder: Path) -> dict[str, int]:
    """Every token of the tokenizer in `folder`, or in a GGUF file, with its id, added tokens
    included."""
    file = gguf_of(folder)
    if file is not None:
        return _from_tokenizer_json(tokenizer_of(read_header(file, with_vocabulary=True)), file)
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(read_object(folder / "tokenizer.json"), folder)
    if (folder / "vocab.json").is_file():
        return _from_vocab_json(folder)
    raise ModelError(
        f"{folder} has neither tokenizer.json nor vocab.json, so its tokens cannot be compared. "
        "Fetch the model's tokenizer files as well."
    )


def compare_token_maps(target: TokenMap, draft: TokenMap) -> Compatibility:
    """Equal maps are compatible; otherwise the reason names the first differing token."""
    moved = [token for token in target if token in draft and target[token] != draft[token]]
    missing = [token for token in target if token not in draft]
    extra = [token for token in draft if token not in target]
    if moved:
        token = min(moved, key=target.__getitem__)
        reason = (
            f"the token {token!r} has id {target[token]} in the target and {draft[token]} in the "
            f"draft; tokens with another id: {len(moved)} of {len(target)}"
        )
    elif missing:
        token = min(missing, key=target.__getitem__)
        reason = (
            f"the token {token!r} (id {target[token]} in the target) is unknown to the draft; "
            f"tokens it lacks: {len(missing)} of {len(target)}"
        )
    elif extra:
        token = min(extra, key=draft.__getitem__)
        reason = (
            f"the draft's token {token!r} (id {draft[token]}) is unknown to the target; "
            f"tokens it has beyond the target's: {len(extra)}"
        )
    else:
        return Compatibility(True, f"all {len(target)} tokens have the same id in both")
    return Compatibility(False, reason)


def compare_folders(target: Path, draft: Path) -> Compatibility:
    return compare_token_maps(read_token_map(target), read_token_map(draft))


def require_compatible(target: Path, draft: Path) -> None:
    """Raise DraftMismatch unless the draft in one folder may serve the target in the other."""
    found = compare_folders(target, draft)
    if found.is_compatible:
        return
    raise DraftMismatch(
        f"{name_of(draft)} cannot draft for {name_of(target)}: {found.reason}. By its text it may "
        "still, as cross_tokenizer. Choose a draft of the same family, or go without one."
    )


def size_warning(target: str, target_bytes: int, draft: str, draft_bytes: int) -> str | None:
    """What to say of a draft that is no smaller than its target; it works, but seldom pays."""
    if draft_bytes < target_bytes:
        return None
    return (
        f"{draft} is as large as {target} or larger, so a step of it saves no step of the target. "
        "It is kept, and used only if it pays; a smaller draft would."
    )


def _from_tokenizer_json(data: Any, folder: Path) -> dict[str, int]:
    try:
        vocabulary = data["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {str(token): int(index) for token, index in vocabulary.items()}
        else:  # Unigram: a list of (token, score), the id is the place in it
            tokens = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
        for added in data.get("added_tokens") or ():
            tokens[str(added["content"])] = int(added["id"])
    except (KeyError, TypeError, IndexError, ValueError):
        raise ModelError(
            f"{folder / 'tokenizer.json'} is not laid out as a tokenizer. Fetch it again."
        ) from None
    return tokens


def _from_vocab_json(folder: Path) -> dict[str, int]:
    tokens: dict[str, int] = dict(read_object(folder / "vocab.json"))
    if (folder / "added_tokens.json").is_file():
        tokens |= read_object(folder / "added_tokens.json")
    if (folder / "tokenizer_config.json").is_file():
        added = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
        tokens |= {entry["content"]: int(index) for index, entry in added.items()}
    return tokens
