"""The whole recipe in order: tokenizer, packs, target, draft, export, figures, card.

Contract: `train(settings, report)` leaves a pair in `out_dir` and everything it can resume from in
`work_dir`; stages whose result is already in `work_dir` are not repeated. It is the one door of
this wing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch

from localspec.training import corpus
from localspec.training.batches import BatchStream, Source
from localspec.training.card import CardFacts, write_card
from localspec.training.distil import (
    DistilSettings,
    SampleSettings,
    distil,
    sample_answers,
    start_draft,
    write_sample_pack,
)
from localspec.training.early_exit import EarlyExit, early_exit_loss
from localspec.training.evaluate import PairReport, evaluate_pair
from localspec.training.export import export_model
from localspec.training.grow import load_exported, widened
from localspec.training.model import Decoder, num_parameters
from localspec.training.pipeline import Report, Workshop, build_packs, open_workshop
from localspec.training.places import LOCK, alone_in, require_writable
from localspec.training.pretrain import (
    HeadLoss,
    LossFunction,
    PretrainSettings,
    held_out_loss,
    load_model,
    plain_loss,
    pretrain,
)
from localspec.training.prompts import PromptPlan, chat_prompts
from localspec.training.schedule import Schedule
from localspec.training.settings import TrainSettings

__all__ = ["TrainReport", "TrainSettings", "train"]

VALID_PACKS = ("corpus", "generated", "long")


@dataclass(frozen=True)
class OwnTextPlan(PromptPlan):
    """Prompts for the target's own text, and how they are batched and packed."""

    pack_name: str = "own"
    row_length: int = 256
    batch_size: int = 64
    length_multiple: int = 16
    minutes_share: float = 1.0


SHORT_PROMPTS = OwnTextPlan(
    12_000, 200, (250, 700), 0.15, pack_name="own_short", minutes_share=0.75
)
LONG_PROMPTS = OwnTextPlan(
    600, 2176, (2000, 8000), 0.9, pack_name="own_long", row_length=2304, batch_size=8,
    length_multiple=128, minutes_share=0.25,
)  # fmt: skip


@dataclass(frozen=True)
class TrainReport:
    """What a run made: sizes, tokens seen and the figures of the pair."""

    num_target_parameters: int
    num_draft_parameters: int
    num_target_tokens: int
    num_draft_tokens: int
    pair: PairReport
    out_dir: Path


def train(settings: TrainSettings, report: Report) -> TrainReport:
    """Run all stages and return the figures. Raises CorpusError for a corpus that cannot be used,
    StoreError and ConfigError for folders that cannot."""
    require_writable(settings.out_dir, settings.out_dir / "README.md", "--out")
    require_writable(settings.work_dir, settings.work_dir / LOCK, "--work")
    with alone_in(settings.work_dir):
        return _trained(settings, report)


def _trained(settings: TrainSettings, report: Report) -> TrainReport:
    shop = open_workshop(settings, report)
    build_packs(shop)
    num_target_tokens = train_target(shop)
    num_draft_tokens = train_draft(shop, load_role(shop, "target"))
    # Loaded afresh: the stages compile their models, which pays only for batches of equal shape.
    target, draft = load_role(shop, "target"), load_role(shop, "draft")
    export_model(target, shop.tokenizer, settings.out_dir / "target")
    export_model(draft, shop.tokenizer, settings.out_dir / "draft")
    pair = measure(shop, target, draft)
    made = TrainReport(
        num_parameters(target),
        num_parameters(draft),
        num_target_tokens,
        num_draft_tokens,
        pair,
        settings.out_dir,
    )
    write_card(settings.out_dir / "README.md", card_facts(shop, made))
    return made


def load_role(shop: Workshop, role: str) -> Decoder:
    """Load the target or the draft from its last checkpoint."""
    path = shop.settings.work_dir / role / "checkpoint.pt"
    return load_model(path, shop.device, shop.settings.torch_dtype).eval()


def train_target(shop: Workshop) -> int:
    """Pretrain the target; return the tokens it has seen."""
    settings = shop.settings
    torch.manual_seed(settings.seed)
    model = _first_target(settings).to(shop.device, settings.torch_dtype)
    sources = (
        Source(shop.pack("short"), early=0.93, late=0.0),
        Source(shop.pack("mid"), early=0.07, late=0.0),
        Source(shop.pack("closing"), early=0.0, late=0.62),
        Source(shop.pack("long"), early=0.0, late=0.38),
    )
    stream = BatchStream(sources, settings.tokens_per_batch, settings.seed, shop.device)
    schedule = Schedule(settings.target_rate, minutes=settings.target_minutes)
    run_settings = PretrainSettings(
        schedule,
        settings.work_dir / "target",
        is_compiled=settings.is_compiled,
        patience=settings.patience,
    )
    held_out = shop.pack("valid_corpus")
    return pretrain(
        model,
        stream,
        run_settings,
        shop.report,
        _target_loss(settings),
        lambda judged: held_out_loss(judged, held_out),
    ).num_tokens


def _first_target(settings: TrainSettings) -> Decoder:
    """Where training begins: small random weights, or an exported model made wider."""
    if settings.start_from is not None:
        return widened(load_exported(settings.start_from), settings.target_ffn_size, settings.seed)
    model = Decoder(settings.target_shape())
    model.initialise(settings.seed)
    return model


def _target_loss(settings: TrainSettings) -> Callable[[HeadLoss], LossFunction]:
    """With the loss of early exits where the target is deep enough to be left early."""
    plan = EarlyExit()
    exits = tuple(each for each in plan.exits if each < settings.target_layers)
    if not exits:
        return plain_loss
    return partial(early_exit_loss, replace(plan, exits=exits))


def sample_own_text(shop: Workshop, target: Decoder) -> None:
    """Let the target write the text that the draft learns from, short and long prompts apart."""
    settings = shop.settings
    rng = Random(settings.seed)
    for plan in (SHORT_PROMPTS, LONG_PROMPTS):
        folder = settings.work_dir / "packs" / plan.pack_name
        if (folder / "weights.npy").exists():
            continue
        prompts = list(chat_prompts(shop.tokenizer, shop.rows, plan, rng))
        sampling = SampleSettings(
            batch_size=plan.batch_size,
            length_multiple=plan.length_multiple,
            minutes=settings.sample_minutes * plan.minutes_share,
            seed=settings.seed,
        )
        samples = sample_answers(target, prompts, sampling, shop.report)
        write_sample_pack(samples, plan.row_length, folder, rng)


def train_draft(shop: Workshop, target: Decoder) -> int:
    """Distil the draft; return the tokens it has seen."""
    settings = shop.settings
    sample_own_text(shop, target)
    draft = Decoder(settings.draft_shape()).to(shop.device, settings.torch_dtype)
    start_draft(draft, target, settings.seed)
    sources = (
        Source(shop.pack("own_short"), 0.35, 0.4),
        Source(shop.pack("own_long"), 0.1, 0.1),
        Source(shop.pack("closing"), 0.47, 0.45),
        Source(shop.pack("long"), 0.08, 0.05),
    )
    stream = BatchStream(sources, settings.tokens_per_batch, settings.seed + 1, shop.device)
    schedule = Schedule(settings.draft_rate, minutes=settings.draft_minutes, decay_fraction=0.4)
    return distil(
        draft,
        target,
        stream,
        DistilSettings(schedule, settings.work_dir / "draft", settings.is_compiled),
        shop.report,
    )


def measure(shop: Workshop, target: Decoder, draft: Decoder) -> PairReport:
    """Measure the pair on held-out text and held-out prompts."""
    losses = {
        f"{role} on {name}": held_out_loss(model, shop.pack(f"valid_{name}"), 2)
        for role, model in (("target", target), ("draft", draft))
        for name in VALID_PACKS
    }
    settings = shop.settings
    rng = Random(settings.seed + 99)
    plan = PromptPlan(settings.num_judged_prompts, 512, (250, 1500), passage_share=0.2)
    prompts = list(chat_prompts(shop.tokenizer, shop.held_out_rows, plan, rng))
    return evaluate_pair(target, draft, shop.tokenizer, prompts, losses)


def card_facts(shop: Workshop, made: TrainReport) -> CardFacts:
    """Collect what the model card states."""
    licences = {
        source: str(rows[0].get("license", "unknown"))
        for source, rows in shop.rows.items()
        if source in corpus.SHORT_SHARES or source in corpus.LONG_SHARES
    }
    return CardFacts(
        made.num_target_parameters,
        made.num_draft_parameters,
        made.num_target_tokens,
        made.num_draft_tokens,
        shop.settings.context_length,
        licences,
        made.pair,
        command_line(shop.settings),
    )


def command_line(settings: TrainSettings) -> str:
    """Write the command that makes such a pair, with file names only."""
    files = " ".join(f"--corpus {file.name}" for file in settings.corpus_files)
    held_out = " ".join(f"--held-out {file.name}" for file in settings.held_out_files)
    return (
        f"python -m localspec train pair {files} {held_out} --out assets/demo --work work "
        f"--minutes {settings.target_minutes:.0f} --draft-minutes {settings.draft_minutes:.0f} "
        f"--seed {settings.seed} --device {settings.device}"
    )
