"""All stages in order: tokenizer, packs, target, draft, export, figures, model card.

Contract: `train(settings, report)` leaves a pair in `out_dir` and everything it can resume from in
`work_dir`. A stage whose result is already in `work_dir` is not repeated. `open_pipeline` reads
the corpus and learns or loads the tokenizer; `build_packs` writes the packs that are missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from localspec.core.backend import Report
from localspec.training.train_loop import Schedule
from localspec.training.work_folder import LOCK, alone_in, require_writable
from tools.demo_pair import corpus
from tools.demo_pair.card import TrainReport, card
from tools.demo_pair.corpus import PackPlan, Row
from tools.demo_pair.decoder import new_decoder
from tools.demo_pair.distil import (
    LONG_PROMPTS,
    SHORT_PROMPTS,
    distil,
    new_draft,
    sample_answers,
    write_sample_pack,
)
from tools.demo_pair.evaluate import PairReport, evaluate_pair
from tools.demo_pair.export import export_model, load_exported, widened
from tools.demo_pair.packs import BatchStream, Pack, TextSource
from tools.demo_pair.pretrain import (
    ExitLayers,
    LossFunction,
    PretrainSettings,
    compiled,
    early_exit_loss,
    head_loss,
    held_out_loss,
    load_model,
    pretrain,
    weighted_loss,
)
from tools.demo_pair.prompts import PromptPlan, chat_prompts
from tools.demo_pair.settings import PairSettings
from tools.demo_pair.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

VALID_PACKS = ("corpus", "generated", "long")


def train(settings: PairSettings, report: Report) -> TrainReport:
    """Run all stages and return the figures. Raises CorpusError for a corpus that cannot be used,
    StoreError and ConfigError for folders that cannot."""
    require_writable(settings.out_dir, settings.out_dir / "README.md", "--out")
    require_writable(settings.work_dir, settings.work_dir / LOCK, "--work")
    with alone_in(settings.work_dir):
        return _trained(settings, report)


def _trained(settings: PairSettings, report: Report) -> TrainReport:
    pipeline = open_pipeline(settings, report)
    build_packs(pipeline)
    num_target_tokens = train_target(pipeline)
    num_draft_tokens = train_draft(pipeline, load_role(pipeline, "target"))
    # Loaded afresh: the stages compile their models, which pays only for batches of equal shape.
    target, draft = load_role(pipeline, "target"), load_role(pipeline, "draft")
    export_model(target, pipeline.tokenizer, settings.out_dir / "target")
    export_model(draft, pipeline.tokenizer, settings.out_dir / "draft")
    pair = measure(pipeline, target, draft)
    made = TrainReport(
        target.num_parameters(),
        draft.num_parameters(),
        num_target_tokens,
        num_draft_tokens,
        pair,
        settings.out_dir,
    )
    told = card(made, settings.context_length, licences(pipeline.rows), command_line(settings))
    (settings.out_dir / "README.md").write_text(told, encoding="utf-8")
    return made


@dataclass(frozen=True)
class Pipeline:
    """What all stages share."""

    settings: PairSettings
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


def open_pipeline(settings: PairSettings, report: Report) -> Pipeline:
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
    return Pipeline(settings, load_tokenizer(path), rows, held_out, report)


def pack_plans(settings: PairSettings) -> dict[str, tuple[PackPlan, bool]]:
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


def build_packs(pipeline: Pipeline) -> None:
    """Write the packs that are not there yet."""
    for name, (plan, is_held_out) in pack_plans(pipeline.settings).items():
        folder = pipeline.settings.work_dir / "packs" / name
        if not (folder / "weights.npy").exists():
            count = corpus.pack(
                pipeline.tokenizer,
                pipeline.held_out_rows if is_held_out else pipeline.rows,
                plan,
                folder,
            )
            pipeline.report(f"Packed {name}: {count} rows of {plan.length}.")


def load_role(pipeline: Pipeline, role: str) -> LlamaForCausalLM:
    """Load the target or the draft from its last checkpoint."""
    path = pipeline.settings.work_dir / role / "checkpoint.pt"
    return load_model(path, pipeline.device).eval()


def train_target(pipeline: Pipeline) -> int:
    """Pretrain the target; return the tokens it has seen."""
    settings = pipeline.settings
    torch.manual_seed(settings.seed)
    model = _first_target(settings).to(pipeline.device, torch.bfloat16)
    sources = (
        TextSource(pipeline.pack("short"), early=0.93, late=0.0),
        TextSource(pipeline.pack("mid"), early=0.07, late=0.0),
        TextSource(pipeline.pack("closing"), early=0.0, late=0.62),
        TextSource(pipeline.pack("long"), early=0.0, late=0.38),
    )
    stream = BatchStream(sources, settings.tokens_per_batch, settings.seed, pipeline.device)
    schedule = Schedule(settings.target_rate, minutes=settings.target_minutes)
    run_settings = PretrainSettings(
        schedule,
        settings.work_dir / "target",
        is_compiled=settings.is_compiled,
        patience=settings.patience,
    )
    held_out = pipeline.pack("valid_corpus")
    return pretrain(
        model,
        stream,
        run_settings,
        pipeline.report,
        _target_loss(settings),
        lambda judged: held_out_loss(judged, held_out),
    ).num_tokens


def _first_target(settings: PairSettings) -> LlamaForCausalLM:
    """Where training begins: small random weights, or an exported model made wider."""
    if settings.start_from is not None:
        return widened(load_exported(settings.start_from), settings.target_ffn_size, settings.seed)
    return new_decoder(settings.target_config(), settings.seed)


def _target_loss(settings: PairSettings) -> LossFunction:
    """With the loss of early exits where the target is deep enough to be left early."""
    plan, head = ExitLayers(), compiled(head_loss, settings.is_compiled)
    exits = tuple(each for each in plan.exits if each < settings.target_layers)
    if not exits:
        return partial(weighted_loss, head=head)
    return early_exit_loss(replace(plan, exits=exits), head)


def sample_own_text(pipeline: Pipeline, target: LlamaForCausalLM) -> None:
    """Let the target write the text that the draft learns from, short and long prompts apart."""
    settings = pipeline.settings
    rng = Random(settings.seed)
    for plan in (SHORT_PROMPTS, LONG_PROMPTS):
        folder = settings.work_dir / "packs" / plan.pack_name
        if (folder / "weights.npy").exists():
            continue
        prompts = list(chat_prompts(pipeline.tokenizer, pipeline.rows, plan, rng))
        samples = sample_answers(
            target, prompts, plan, settings.sample_minutes, settings.seed, pipeline.report
        )
        write_sample_pack(samples, plan.row_length, folder, rng)


def train_draft(pipeline: Pipeline, target: LlamaForCausalLM) -> int:
    """Distil the draft; return the tokens it has seen."""
    settings = pipeline.settings
    sample_own_text(pipeline, target)
    draft = new_draft(settings.draft_config(), target, settings.seed)
    sources = (
        TextSource(pipeline.pack("own_short"), 0.35, 0.4),
        TextSource(pipeline.pack("own_long"), 0.1, 0.1),
        TextSource(pipeline.pack("closing"), 0.47, 0.45),
        TextSource(pipeline.pack("long"), 0.08, 0.05),
    )
    stream = BatchStream(sources, settings.tokens_per_batch, settings.seed + 1, pipeline.device)
    schedule = Schedule(settings.draft_rate, minutes=settings.draft_minutes, decay_fraction=0.4)
    how = PretrainSettings(schedule, settings.work_dir / "draft", is_compiled=settings.is_compiled)
    return distil(draft, target, stream, how, pipeline.report)


def measure(pipeline: Pipeline, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> PairReport:
    losses = {
        f"{role} on {name}": held_out_loss(model, pipeline.pack(f"valid_{name}"), 2)
        for role, model in (("target", target), ("draft", draft))
        for name in VALID_PACKS
    }
    settings = pipeline.settings
    rng = Random(settings.seed + 99)
    plan = PromptPlan(settings.num_judged_prompts, 512, (250, 1500), passage_share=0.2)
    prompts = list(chat_prompts(pipeline.tokenizer, pipeline.held_out_rows, plan, rng))
    return evaluate_pair(target, draft, pipeline.tokenizer, prompts, losses)


def licences(rows: Mapping[str, Sequence[Row]]) -> dict[str, str]:
    """Of the sources that the mix knows."""
    known = {*corpus.SHORT_SHARES, *corpus.LONG_SHARES}
    return {
        source: str(each[0].get("license", "unknown"))
        for source, each in rows.items()
        if source in known
    }


def command_line(settings: PairSettings) -> str:
    files = " ".join(f"--corpus {file.name}" for file in settings.corpus_files)
    held_out = " ".join(f"--held-out {file.name}" for file in settings.held_out_files)
    return (
        f"python -m tools.demo_pair {files} {held_out} --out assets/demo --work work "
        f"--minutes {settings.target_minutes:.0f} --draft-minutes {settings.draft_minutes:.0f} "
        f"--seed {settings.seed} --device {settings.device}"
    )
