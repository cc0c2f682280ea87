"""Sizes that cannot be trained or read are refused from the target's config alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.core.errors import ConfigError
from localspec.forward.heads.files import TargetSizes
from localspec.training.draft import fresh_draft, num_layer_weights
from localspec.training.recipe import head_plan, make_recipe
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
        head_plan(kind, SIZES, options)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "mtp"])
@pytest.mark.parametrize("options", [{}, {"num_heads": 2}])
def test_weights_are_counted_as_they_are_made(
    kind: str, options: dict[str, int], loaded_target: Target
) -> None:
    made = make_recipe(kind, loaded_target.teacher(), options, seed=1).module
    counted = head_plan(kind, loaded_target.sizes, options).num_weights
    assert counted == sum(weight.numel() for weight in made.parameters())


@pytest.mark.parametrize(
    "options",
    [{"layers": 0}, {"layers": 9}, {"hidden_size": 0}, {"hidden_size": -4}, {"hidden_size": 6},
     {"hidden_size": 260}],
)  # fmt: skip
def test_a_draft_that_cannot_be_is_refused(options: dict[str, int], loaded_target: Target) -> None:
    with pytest.raises(ConfigError, match="1 to 8 --layers, and a --hidden-size"):
        num_layer_weights(loaded_target.config, options)


def test_a_draft_s_layers_are_counted_as_they_are_made(loaded_target: Target) -> None:
    made = fresh_draft(loaded_target, {"layers": 2, "hidden_size": 16}, 1)
    weights = sum(weight.numel() for weight in made.model.layers.parameters())
    assert num_layer_weights(loaded_target.config, {"layers": 2, "hidden_size": 16}) == weights


def test_sizes_are_known_without_loading(target_folder: Path, loaded_target: Target) -> None:
    assert sizes_of(target_folder) == loaded_target.sizes
