"""What a trained head of any kind gets accepted, in the engine alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from localspec.core.decoding import SamplingParams
from localspec.drafters.parts import Parts
from localspec.drafters.registry import drafter_class
from localspec.engine.engine import Engine
from localspec.forward.load import load_model
from tests.kit.tiny import Plans, play

DRAFT_LENGTH = 4


def acceptance(kind: str, pair: tuple[Path, Path], prompt: Sequence[int]) -> float:
    """The share of the draft tokens that the target accepts. pair: the folders of target and
    head."""
    target = load_model(pair[0], torch.float32, torch.device("cpu"), 256).model
    drafter = drafter_class(kind).build(Parts(target, heads={kind: pair[1]}))
    policy = Plans((kind, DRAFT_LENGTH))
    play(Engine(target, {kind: drafter}), prompt, policy, 48, SamplingParams())
    drafted = sum(step.num_draft_tokens for step in policy.steps)
    return sum(step.num_accepted_tokens for step in policy.steps) / drafted
