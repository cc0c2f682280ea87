"""Sizes that cannot be trained or read are refused from the target's config alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from localspec.errors import ConfigError
from localspec.forward.heads.files import TargetSizes
from localspec.training.draft import (
    DraftShape,
    fresh_draft,
    num_draft_weights,
    num_layer_weights,
)
from localspec.training.recipe import make_recipe, num_weights
from localspec.training.target import Target, sizes_of

SIZES = TargetSizes(256, 6144, 12)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("medusa", {"num_heads": 17}, "--num-heads is 17, but must lie between 1 and 16"),
        ("medusa", {"num_heads": 1_000_000_000}, "between 1 and 16"),
        ("medusa", {"num_layers": 9}, "--layers is 9, but must lie between 1 and 8"),
        ("eagle", {"num_heads": 3}, "would be 85 wide each, but that must be an even number"),
        ("mtp", {"num_heads": 3}, "the default is 4"),
        ("eagle", {"num_heads": 1000}, "--num-heads is 1000"),
        ("mtp", {"num_heads": 1000}, "--num-heads is 1000"),
        ("eagle", {"ffn_size": 100_000_000_000}, "--ffn-size is 100000000000"),
        ("mtp", {"num_steps": 1000}, "--steps is 1000"),
    ],
)
def test_a_head_that_cannot_be_names_its_flag(
    kind: str, options: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        num_weights(kind, SIZES, options)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "mtp"])
@pytest.mark.parametrize("options", [{}, {"num_heads": 2}])
def test_weights_are_counted_as_they_are_made(
    kind: str, options: dict[str, int], target: Target
) -> None:
    made = make_recipe(kind, target.teacher(), options, seed=1).module
    counted = num_weights(kind, target.sizes, options)
    assert counted == sum(weight.numel() for weight in made.parameters())


@pytest.mark.parametrize("shape", [DraftShape(1), DraftShape(2, 16)])
def test_a_draft_s_weights_are_counted_as_they_are_made(shape: DraftShape, target: Target) -> None:
    made = fresh_draft(target, shape, 1)
    weights = {name: math.prod(each.shape) for name, each in made.named_parameters()}
    assert num_draft_weights(shape, target) == sum(weights.values())


@pytest.mark.parametrize("shape", [(0, None), (9, None), (1, 0), (1, -4), (1, 6), (1, 260)])
def test_a_draft_that_cannot_be_is_refused(shape: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigError, match="1 to 8 --layers, and a --hidden-size"):
        num_layer_weights(DraftShape(*shape), SIZES.hidden_size)


def test_sizes_are_known_without_loading(target_folder: Path, target: Target) -> None:
    assert sizes_of(target_folder) == target.sizes
