"""Folders of heads of every kind: what does not fit the target is refused, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.core.errors import ModelError
from localspec.formats.head_folder import head_kind
from localspec.forward.heads.eagle_files import read_eagle
from localspec.forward.heads.files import WEIGHTS
from localspec.forward.heads.medusa import read_medusa
from localspec.forward.heads.mtp_files import read_mtp
from localspec.training.recipe import make_recipe
from tests.kit.heads import change_config, teacher_of
from tests.kit.tiny import tiny_llama, with_cache

READERS: dict[str, Callable[..., Any]] = {
    "eagle": read_eagle,
    "mtp": read_mtp,
    "medusa": read_medusa,
}
each_kind = pytest.mark.parametrize("kind", READERS)
Change = Callable[[dict[str, torch.Tensor], str], Any]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind, by its name."""
    folder = tmp_path_factory.mktemp("heads")
    for kind in READERS:
        make_recipe(kind, teacher_of(with_cache(tiny_llama())), {}).save(folder / kind)
    return folder


@pytest.fixture
def heads_folder(heads: Path, kind: str, tmp_path: Path) -> Path:
    return shutil.copytree(heads / kind, tmp_path / kind)


@each_kind
def test_a_folder_says_what_it_holds_and_is_read(heads_folder: Path, kind: str) -> None:
    assert head_kind(heads_folder) == kind
    READERS[kind](heads_folder, with_cache(tiny_llama()))


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, name: t.pop(name), "lacks {name}"),
        (lambda t, name: t.update(more=torch.zeros(1)), "holds more, which no head here has"),
        (lambda t, name: t.update({name: torch.zeros(2, 3)}), "{name} is float32 .2, 3., but must"),
        (lambda t, name: t.update({name: t[name].to(torch.int8)}), "{name} is int8"),
        (lambda t, name: t[name].view(-1)[-1:].fill_(float("nan")), "values that are not finite"),
    ],
    ids=["missing", "unknown", "shape", "type", "nan"],
)
def test_tensors_that_do_not_fit_are_refused(
    heads_folder: Path, kind: str, change: Change, said: str
) -> None:
    tensors = load_file(heads_folder / WEIGHTS)
    name = max(tensors)
    change(tensors, name)
    save_file(tensors, heads_folder / WEIGHTS)
    with pytest.raises(ModelError, match=said.format(name=name)):
        READERS[kind](heads_folder, with_cache(tiny_llama()))


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 128}, "hidden_size 128; this one has 64"),
        ({"vocab_size": 99}, "vocab_size 99; this one has 64"),
        ({"num_layers": 9}, "num_layers 9; this one has 2"),
    ],
)
def test_a_head_for_another_target_is_refused(
    heads_folder: Path, kind: str, values: dict[str, int], said: str
) -> None:
    change_config(heads_folder, "target", **values)
    with pytest.raises(ModelError, match=said):
        READERS[kind](heads_folder, with_cache(tiny_llama()))


@each_kind
def test_a_head_of_another_kind_and_no_head_are_refused(heads: Path, kind: str) -> None:
    target = with_cache(tiny_llama())
    other = next(name for name in READERS if name != kind)
    with pytest.raises(ModelError, match=f"of the kind '{other}', not '{kind}'"):
        READERS[kind](heads / other, target)
    with pytest.raises(ModelError, match="no head"):
        READERS[kind](heads, target)


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"speculators_model_type": "eagle", "num_hidden_layers": 1}, "speculators .eagle."),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash without a dflash_config"),
        (
            {"model_type": "muse_glimmer_assistant"},
            "transformers .the block drafter of Muse Glimmer.",
        ),
        ({"architectures": ["PEagleDraftModel"], "num_hidden_layers": 4}, "P-EAGLE"),
    ],
)
def test_a_published_layout_that_is_not_read_is_named(
    tmp_path: Path, config: dict[str, object], layout: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"in the layout of {layout}, which is not read yet"):
        head_kind(tmp_path)
