"""What all stages share, and the data they are built on: rows, tokenizer, packs.

Contract: `open_workshop` reads the corpus and learns or loads the tokenizer; `build_packs` writes
the packs that are not in the work folder yet. No model is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from localspec.training import corpus
from localspec.training.batches import Pack
from localspec.training.corpus import PackPlan, Row
from localspec.training.settings import TrainSettings
from localspec.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

Report = Callable[[str], None]


@dataclass(frozen=True)
class Workshop:
    """What all stages share."""

    settings: TrainSettings
    tokenizer: Tokenizer
    rows: dict[str, list[Row]]
    held_out_rows: dict[str, list[Row]]
    report: Report

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return torch.device(self.settings.device)

    def pack(self, name: str) -> Pack:
        """Open a pack by name."""
        return Pack(self.settings.work_dir / "packs" / name)


def open_workshop(settings: TrainSettings, report: Report) -> Workshop:
    """Read the corpus and learn or load the tokenizer. Raises CorpusError."""
    rows = corpus.read_rows(settings.corpus_files)
    held_out = corpus.read_rows(settings.held_out_files)
    corpus.require_known(rows, "--corpus")
    corpus.require_known(held_out, "--held-out")
    path = settings.work_dir / "tokenizer" / "tokenizer.json"
    if not path.exists() and settings.start_from is not None:
        kept = load_tokenizer(settings.start_from / "tokenizer.json")
        save_tokenizer(kept, path.parent, settings.context_length)
    if not path.exists():
        report("Learning the tokenizer.")
        texts = corpus.sample_texts(rows, 14_000_000, settings.seed)
        learnt = train_tokenizer(texts, settings.vocabulary_size)
        save_tokenizer(learnt, path.parent, settings.context_length)
    return Workshop(settings, load_tokenizer(path), rows, held_out, report)


def pack_plans(settings: TrainSettings) -> dict[str, tuple[PackPlan, bool]]:
    """Return the packs by name, and whether each is cut from held-out rows."""
    short, long = corpus.SHORT_SHARES, corpus.LONG_SHARES
    closing = corpus.CLOSING_SHARES
    seed = 10 * settings.seed
    few, some = settings.num_short_tokens, settings.num_long_tokens
    human = {source: share for source, share in short.items() if source != corpus.GENERATED}
    generated = {corpus.GENERATED: 1.0}
    return {
        "short": (PackPlan(256, few, short, 0.16, (250, 900), seed + 1), False),
        "closing": (PackPlan(256, few // 3, closing, 0.16, (250, 900), seed + 7), False),
        "mid": (PackPlan(1024, some, long, 0.5, (1200, 3800), seed + 2), False),
        "long": (PackPlan(2304, some, long, 0.7, (2000, 8500), seed + 3), False),
        "valid_corpus": (PackPlan(256, 60_000, human, 0.0, (250, 900), seed + 4), True),
        "valid_generated": (PackPlan(256, 40_000, generated, 0.1, (250, 900), seed + 5), True),
        "valid_long": (PackPlan(2304, 46_080, long, 0.7, (2000, 8500), seed + 6), True),
    }


def build_packs(shop: Workshop) -> None:
    """Write the packs that are not there yet."""
    for name, (plan, is_held_out) in pack_plans(shop.settings).items():
        folder = shop.settings.work_dir / "packs" / name
        if not (folder / "weights.npy").exists():
            count = corpus.pack(
                shop.tokenizer, shop.held_out_rows if is_held_out else shop.rows, plan, folder
            )
            shop.report(f"Packed {name}: {count} rows of {plan.length}.")
