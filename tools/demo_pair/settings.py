"""The settings of a training run: files, budgets, sizes, device.

Contract: `PairSettings` is complete when constructed and read by every stage; defaults make the
demo pair on a CPU. Larger pairs on a GPU are the same fields with other numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

from localspec.core.errors import ConfigError
from tools.demo_pair.decoder import llama_config

BUDGETS = ("target_minutes", "sample_minutes", "draft_minutes", "target_rate", "draft_rate")
# The largest there may be of each: more than anybody trains, so that it is a typing error; of the
# vocabulary, what the 16 bits of a pack can name.
MOST = {
    "target_layers": 256, "draft_layers": 256, "hidden_size": 1 << 16, "num_heads": 1 << 10,
    "target_ffn_size": 1 << 20, "draft_ffn_size": 1 << 20, "vocabulary_size": 1 << 16,
    "context_length": 1 << 24, "num_short_tokens": 1 << 40, "num_long_tokens": 1 << 40,
    "tokens_per_batch": 1 << 30,
}  # fmt: skip


@dataclass(frozen=True)
class PairSettings:
    """Everything a run needs. Minutes are budgets per stage; sizes are those of the demo pair.

    corpus_files, held_out_files: .jsonl.xz rows with `messages` or `text`, `source` and `license`.
    num_short_tokens, num_long_tokens: tokens packed in rows of 256, and of 1024 and 2304.
    start_from: folder of an exported target to go on from, made wider where target_ffn_size is
    larger; its tokenizer is kept. patience: judgements without a better held-out loss before the
    target's training goes over to its end, None: never.
    """

    corpus_files: tuple[Path, ...]
    held_out_files: tuple[Path, ...]
    out_dir: Path
    work_dir: Path
    target_minutes: float = 60.0
    sample_minutes: float = 4.0
    draft_minutes: float = 8.0
    vocabulary_size: int = 6144
    target_layers: int = 12
    hidden_size: int = 256
    target_ffn_size: int = 832
    draft_layers: int = 2
    draft_ffn_size: int = 832
    num_heads: int = 4
    context_length: int = 4096
    num_short_tokens: int = 11_500_000
    num_long_tokens: int = 2_000_000
    tokens_per_batch: int = 5120
    target_rate: float = 4e-3
    draft_rate: float = 4e-3
    num_judged_prompts: int = 60
    seed: int = 1
    device: str = "cpu"
    is_compiled: bool = True
    start_from: Path | None = None
    patience: int | None = 5

    def __post_init__(self) -> None:
        self._require_numbers()
        _require_device(self.device)
        if self.hidden_size % (2 * self.num_heads):  # positions turn pairs of a head's numbers
            raise ConfigError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_heads} heads of an "
                f"even width. Choose a multiple of {2 * self.num_heads}."
            )

    def _require_numbers(self) -> None:
        """A budget that is no number would end at once, or never."""
        for name in BUDGETS:
            if not 0.0 < (value := vars(self)[name]) < math.inf:
                raise ConfigError(f"{_words(name)} is {value}, but must be more than 0.")
        for name, most in MOST.items():
            if not 1 <= (value := vars(self)[name]) <= most:
                raise ConfigError(f"{_words(name)} is {value}, but must lie between 1 and {most}.")

    def target_config(self) -> LlamaConfig:
        return self._config(self.target_layers, self.target_ffn_size)

    def draft_config(self) -> LlamaConfig:
        """The sizes of the draft: few layers, because a draft costs its layers; two,
        because one cannot find what followed a word before."""
        return self._config(self.draft_layers, self.draft_ffn_size)

    def _config(self, num_layers: int, ffn_size: int) -> LlamaConfig:
        return llama_config(
            self.vocabulary_size,
            num_layers,
            self.hidden_size,
            ffn_size,
            self.num_heads,
            self.context_length,
        )


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _require_device(name: str) -> None:
    """Raises ConfigError for one that torch does not know or does not find here."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.mps.is_available()}
    if not there.get(name.partition(":")[0], False):
        found = ", ".join(device for device, is_there in there.items() if is_there)
        raise ConfigError(f"The device {name!r} is not here. Choose one of: {found}.")
