"""Trains a draft model for any target: a few Llama-shaped layers between the target's embedding and
its output head, or an existing draft that is trained further.

Contract: `DraftRecipe` is a Recipe whose module is a transformers model over the target's tokens;
`save` writes a folder that loads as any model does, with the target's tokenizer. A fresh draft of
the target's width starts from its embedding and head; where these are large they are frozen. A
narrower one starts from the principal directions of the embedding. options: layers and hidden_size
of a fresh draft; without them one layer of the target's width.
Source: distillation on the target's own text, DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from localspec.core.errors import ConfigError, DraftMismatch
from localspec.formats.folder_files import check_folder
from localspec.forward.by_transformers import load_module
from localspec.forward.features import LAST
from localspec.machine.compatibility import read_token_map
from localspec.training.recipe import acceptance_by_position
from localspec.training.target import Target, TaughtBatch, Teacher

NUM_POSITIONS = 8  # draft positions in the held-out acceptance
FROZEN_FROM = 50_000_000  # weights of an embedding; smaller ones are trained too
HEAD_SIZES = (128, 64, 32, 16, 8, 4, 2)
MAX_LAYERS = 8  # more would cost more than they save
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
                   "chat_template.json", "tokenizer.model")  # fmt: skip


class DraftRecipe:
    """A draft while it is trained. Raises DraftMismatch for one that could not help."""

    layers: tuple[int, ...] = ()

    def __init__(self, module: Any, target: Target) -> None:
        _require_smaller(_num_weights(module), target)
        _require_same_tokens(module, target)
        self.module: nn.Module = module
        self._target_folder = target.folder

    def loss(self, teacher: Teacher, batch: TaughtBatch) -> Tensor:
        return divergence(*self._both(teacher, batch), batch.weights)

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, batch: TaughtBatch) -> list[tuple[float, float]]:
        draft, target = self._both(teacher, batch)
        choice = target.argmax(-1)  # [B, n]
        hits = draft.argmax(-1) == choice
        num_positions = min(NUM_POSITIONS, hits.shape[1])
        follows = batch.tokens[:, 1:] == choice
        return acceptance_by_position([hits] * num_positions, follows, batch.weights)

    def save(self, folder: Path) -> None:
        """A model folder in bf16, with the target's tokenizer and ends of text."""
        module: Any = self.module
        folder.mkdir(parents=True, exist_ok=True)
        kept = module.config.dtype
        module.config.dtype = torch.bfloat16
        weights = {
            name: t.detach().to("cpu", torch.bfloat16) for name, t in module.state_dict().items()
        }
        module.save_pretrained(folder, state_dict=weights)
        module.config.dtype = kept
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (self._target_folder / name).is_file():
                shutil.copyfile(self._target_folder / name, folder / name)
        check_folder(folder)

    def _both(self, teacher: Teacher, batch: TaughtBatch) -> tuple[Tensor, Tensor]:
        """Logits of draft and target over the tokens both have, [B, n, V]."""
        with torch.no_grad():
            target = teacher.head(batch.features[LAST])
        draft = self.module(input_ids=batch.tokens[:, :-1], use_cache=False).logits.float()
        shared = min(draft.shape[-1], target.shape[-1])
        return draft[..., :shared], target[..., :shared]


def divergence(draft: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Half of KL(p || q) plus the total variation distance, which is what is not accepted: the mean
    by weight. draft, target: logits [..., V] fp32, of q and p. weights: [...]."""
    target_log = functional.log_softmax(target, dim=-1)
    draft_log = functional.log_softmax(draft, dim=-1)
    p = target_log.exp()
    kl = (p * (target_log - draft_log)).sum(-1)
    distance = 0.5 * (p - draft_log.exp()).abs().sum(-1)
    return ((0.5 * kl + distance) * weights).sum() / weights.sum().clamp_min(1e-6)


def draft_config(target: Any, options: Mapping[str, int]) -> LlamaConfig:
    """Of a fresh draft. target: the target's text config. Raises ConfigError for a shape that
    cannot be."""
    width = target.hidden_size
    num_layers, hidden = options.get("layers", 1), options.get("hidden_size", width)
    if not 1 <= num_layers <= MAX_LAYERS or not 4 <= hidden <= width or hidden % 4:
        raise ConfigError(
            f"A draft of {num_layers} layers of {hidden} was asked for. Choose 1 to {MAX_LAYERS} "
            f"--layers, and a --hidden-size that is a multiple of 4 and at most the target's "
            f"{width}."
        )
    num_heads = hidden // next(size for size in HEAD_SIZES if hidden % size == 0 and size < hidden)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=-(-4 * hidden // 64) * 64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=hidden < width or bool(target.tie_word_embeddings),
        rms_norm_eps=1e-5,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )


def num_layer_weights(target: Any, options: Mapping[str, int]) -> int:
    """Weights of a fresh draft without its embedding and its head, which may be frozen. Raises
    ConfigError as `draft_config`."""
    with torch.device("meta"):
        module: Any = LlamaForCausalLM(draft_config(target, options))
    return _num_weights(module.model.layers)


def fresh_draft(target: Target, options: Mapping[str, int], seed: int) -> Any:
    """A new draft for a target. Raises ConfigError, and DraftMismatch before it takes memory."""
    config = draft_config(target.config, options)
    config.vocab_size = target.sizes.vocab_size
    with torch.device("meta"):
        _require_smaller(_num_weights(LlamaForCausalLM(config)), target)
    torch.manual_seed(seed)
    module = LlamaForCausalLM(config).float().to(target.device)
    _start_from_target(module, target)
    return module


def load_draft(folder: Path, target: Target) -> Any:
    """An existing draft that is trained further, in fp32. Raises ModelError."""
    module = load_module(folder, torch.float32, target.device)
    module.requires_grad_(True)
    for table in {module.get_input_embeddings().weight, module.get_output_embeddings().weight}:
        table.requires_grad_(table.numel() < FROZEN_FROM)
    return module


@torch.no_grad()
def _start_from_target(module: Any, target: Target) -> None:
    table = target.module.get_input_embeddings().weight.float()
    own = module.get_input_embeddings().weight
    if own.shape[1] < table.shape[1]:
        directions = torch.linalg.eigh(table.T @ table).eigenvectors  # [d, d], ascending
        own.copy_(table @ directions[:, -own.shape[1] :])
        return
    own.copy_(table)
    own.requires_grad_(own.numel() < FROZEN_FROM)
    if not module.config.tie_word_embeddings:
        head = module.get_output_embeddings().weight
        head.copy_(target.module.get_output_embeddings().weight.float())
        head.requires_grad_(head.numel() < FROZEN_FROM)


def _require_smaller(num_weights: int, target: Target) -> None:
    if num_weights >= (theirs := target.num_parameters):
        raise DraftMismatch(
            f"The draft would have {num_weights / 1e6:.1f} M weights and its target has "
            f"{theirs / 1e6:.1f} M, so it could never be faster. Give fewer --layers or a "
            "smaller --hidden-size, or choose a smaller draft."
        )


def _require_same_tokens(module: Any, target: Target) -> None:
    """Rows beyond the tokens are padding, whose number differs within one family."""
    own = module.get_output_embeddings().weight.shape[0]
    if own < target.sizes.vocab_size and own <= max(read_token_map(target.folder).values()):
        raise DraftMismatch(
            f"The draft knows {own} tokens, and its target more. Choose a draft of the same family."
        )


def _num_weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
