"""Trains a draft model for any target: a few Llama-shaped layers between the target's embedding and
its output head, or an existing draft that is trained further.

Contract: `DraftRecipe` is a Recipe whose module is a transformers model over the target's tokens;
`save` writes a folder that loads as any model does, with the target's tokenizer. A fresh draft of
the target's width starts from its embedding and head; where these are large they are frozen. A
narrower one starts from the principal directions of the embedding.
Source: distillation on the target's own text, DistillSpec (arXiv 2310.08461).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.errors import ConfigError, DraftMismatch
from localspec.forward.features import LAST
from localspec.forward.weights import check_folder, load_module
from localspec.training.head_recipe import acceptance_by_position
from localspec.training.target import Lesson, Target, Teacher

NUM_POSITIONS = 8  # draft positions in the held-out acceptance
FROZEN_FROM = 50_000_000  # weights of an embedding; smaller ones are trained too
HEAD_SIZES = (128, 64, 32, 16, 8, 4, 2)
FFN_RATIO = 4
MAX_LAYERS = 8  # more would cost more than they save
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
                   "chat_template.json", "tokenizer.model")  # fmt: skip


@dataclass(frozen=True)
class DraftShape:
    """Of a fresh draft. hidden_size: None takes the target's."""

    num_layers: int = 1
    hidden_size: int | None = None


class DraftRecipe:
    """A draft while it is trained."""

    kind = "draft"
    layers: tuple[int, ...] = ()

    def __init__(self, module: Any, target: Target) -> None:
        require_smaller(_num_weights(module), target)
        if (own := module.get_output_embeddings().weight.shape[0]) < target.sizes.vocab_size:
            # Rows beyond the tokens are padding, whose number differs within one family.
            named = max(_token_ids(target.folder), default=target.sizes.vocab_size - 1)
            if own <= named:
                raise DraftMismatch(
                    f"The draft knows {own} tokens and its target {named + 1}. Choose a draft of "
                    "the same family."
                )
        self.module: nn.Module = module
        self._target_folder = target.folder

    def loss(self, teacher: Teacher, lesson: Lesson) -> Tensor:
        """Half the divergence KL(p || q) plus the total variation distance, by weight."""
        draft, target = self._both(teacher, lesson)
        target_log = functional.log_softmax(target, dim=-1)
        draft_log = functional.log_softmax(draft, dim=-1)  # [B, n, V]
        p = target_log.exp()
        divergence = (p * (target_log - draft_log)).sum(-1)
        distance = 0.5 * (p - draft_log.exp()).abs().sum(-1)
        weights = lesson.weights
        return ((0.5 * divergence + distance) * weights).sum() / weights.sum().clamp_min(1e-6)

    @torch.no_grad()
    def acceptance(self, teacher: Teacher, lesson: Lesson) -> list[tuple[float, float]]:
        draft, target = self._both(teacher, lesson)
        choice = target.argmax(-1)  # [B, n]
        hits = draft.argmax(-1) == choice
        num_positions = min(NUM_POSITIONS, hits.shape[1])
        follows = lesson.tokens[:, 1:] == choice
        return acceptance_by_position([hits] * num_positions, follows, lesson.weights)

    def save(self, folder: Path) -> None:
        write_draft(self.module, self._target_folder, folder)

    def _both(self, teacher: Teacher, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Logits of draft and target over the tokens both have, [B, n, V]."""
        with torch.no_grad():
            target = teacher.head(lesson.features[LAST])
        draft = self.module(input_ids=lesson.tokens[:, :-1], use_cache=False).logits.float()
        shared = min(draft.shape[-1], target.shape[-1])
        return draft[..., :shared], target[..., :shared]


def hidden_size_of(shape: DraftShape, width: int) -> int:
    """Of a fresh draft for a target of this width. Raises ConfigError for a shape that cannot
    be."""
    hidden = width if shape.hidden_size is None else shape.hidden_size
    if not 1 <= shape.num_layers <= MAX_LAYERS or not 4 <= hidden <= width or hidden % 4:
        raise ConfigError(
            f"A draft of {shape.num_layers} layers of {hidden} was asked for. Choose 1 to "
            f"{MAX_LAYERS} --layers, and a --hidden-size that is a multiple of 4 and at most the "
            f"target's {width}."
        )
    return hidden


def num_layer_weights(shape: DraftShape, width: int) -> int:
    """Weights of a fresh draft without its embedding and its head. Raises ConfigError."""
    hidden = hidden_size_of(shape, width)
    return shape.num_layers * (4 * hidden**2 + 3 * hidden * _ffn_size(hidden) + 2 * hidden) + hidden


def num_draft_weights(shape: DraftShape, target: Target) -> int:
    """All weights of a fresh draft. Raises ConfigError."""
    width = target.sizes.hidden_size
    hidden = hidden_size_of(shape, width)
    tables = 1 if hidden < width or _is_tied(target) else 2
    return num_layer_weights(shape, width) + tables * target.sizes.vocab_size * hidden


def require_smaller(num_weights: int, target: Target) -> None:
    """Raise DraftMismatch for a draft with as many weights as its target, or more."""
    if num_weights >= (theirs := target.num_parameters):
        raise DraftMismatch(
            f"The draft would have {num_weights / 1e6:.1f} M weights and its target has "
            f"{theirs / 1e6:.1f} M, so it could never be faster. Give fewer --layers or a "
            "smaller --hidden-size, or choose a smaller draft."
        )


def fresh_draft(target: Target, shape: DraftShape, seed: int) -> Any:
    """A new draft for a target. Raises ConfigError for a shape that cannot be."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width = target.sizes.hidden_size
    hidden = hidden_size_of(shape, width)
    source = target.module.config.get_text_config()
    num_heads = hidden // next(size for size in HEAD_SIZES if hidden % size == 0 and size < hidden)
    is_narrow = hidden < width
    is_tied = is_narrow or _is_tied(target)
    config = LlamaConfig(
        vocab_size=target.sizes.vocab_size,
        hidden_size=hidden,
        intermediate_size=_ffn_size(hidden),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=target.context_length,
        tie_word_embeddings=is_tied,
        rms_norm_eps=1e-5,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    torch.manual_seed(seed)
    module = LlamaForCausalLM(config).float().to(target.device)
    _start_from_target(module, target, is_narrow, is_tied)
    return module


def load_draft(folder: Path, target: Target) -> Any:
    """An existing draft that is trained further, in fp32. Raises ModelError."""
    module = load_module(folder, torch.float32, target.device)
    module.requires_grad_(True)
    for table in {module.get_input_embeddings().weight, module.get_output_embeddings().weight}:
        table.requires_grad_(table.numel() < FROZEN_FROM)
    return module


def write_draft(module: Any, target_folder: Path, folder: Path) -> None:
    """A model folder in bf16, with the target's tokenizer and ends of text."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = module.config.dtype
    module.config.dtype = torch.bfloat16
    weights = {
        name: t.detach().to("cpu", torch.bfloat16) for name, t in module.state_dict().items()
    }
    module.save_pretrained(folder, state_dict=weights)
    module.config.dtype = kept
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (target_folder / name).is_file():
            shutil.copyfile(target_folder / name, folder / name)
    check_folder(folder)


def _is_tied(target: Target) -> bool:
    return bool(target.module.config.get_text_config().tie_word_embeddings)


def _ffn_size(hidden_size: int) -> int:
    return -(-FFN_RATIO * hidden_size // 64) * 64


@torch.no_grad()
def _start_from_target(module: Any, target: Target, is_narrow: bool, is_tied: bool) -> None:
    table = target.module.get_input_embeddings().weight.float()
    own = module.get_input_embeddings().weight
    if is_narrow:
        own.copy_(_principal_directions(table, own.shape[1]))
        return
    own.copy_(table)
    own.requires_grad_(own.numel() < FROZEN_FROM)
    if not is_tied:
        head = module.get_output_embeddings().weight
        head.copy_(target.module.get_output_embeddings().weight.float())
        head.requires_grad_(head.numel() < FROZEN_FROM)


def _principal_directions(table: Tensor, width: int) -> Tensor:
    """The rows of a table projected on its principal directions, [V, width]."""
    directions = torch.linalg.eigh(table.T @ table).eigenvectors  # [d, d], ascending
    narrow: Tensor = table @ directions[:, -width:]
    return narrow


def _num_weights(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _token_ids(folder: Path) -> list[int]:
    """Ids that the tokenizer names; none where it cannot be read."""
    try:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = [int(one["id"]) for one in data.get("added_tokens", [])]
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return [*map(int, ids), *added]
    except (OSError, ValueError, KeyError, TypeError):
        return []
