"""Whatever is wrong with the files of a model folder becomes a ModelError that names it, before
anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.errors import ModelError
from localspec.formats.folder_files import (
    INDEX,
    SINGLE,
    check_folder,
    require_tokenizer,
    weight_files,
)
from tests.kit.damage import in_shards, own_code, truncated_file, with_config


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    made = tmp_path / "damaged"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    save_file({f"{name}.weight": torch.ones(4, 6) for name in "abcd"}, made / SINGLE)
    return made


def test_the_files_of_a_model_are_those_that_its_index_names(model_folder: Path) -> None:
    assert check_folder(model_folder).config == {"model_type": "llama"}
    assert weight_files(model_folder) == [model_folder / SINGLE]
    in_shards(model_folder)
    assert [file.name for file in weight_files(model_folder)] == ["a.safetensors", "b.safetensors"]
    assert check_folder(model_folder).config == {"model_type": "llama"}


def truncated(folder: Path) -> None:
    truncated_file(folder / SINGLE)


def shard_missing(folder: Path) -> None:
    in_shards(folder)
    (folder / "b.safetensors").unlink()


def shard_truncated(folder: Path) -> None:
    in_shards(folder)
    truncated_file(folder / "b.safetensors")


def shard_outside(folder: Path) -> None:
    in_shards(folder)
    shutil.move(folder / "b.safetensors", folder.parent / "b.safetensors")
    index = folder / INDEX
    index.write_text(index.read_text().replace('"b.saf', '"../b.saf'))


def index_of_a_long_name(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": 5000 * "x"}}))


def index_of_nothing(folder: Path) -> None:
    in_shards(folder)
    (folder / INDEX).write_text('{"weight_map": {}}')


def index_of_no_json(folder: Path) -> None:
    in_shards(folder)
    (folder / INDEX).write_text("{")


def single_beside_an_index(folder: Path) -> None:
    """transformers opens the single file then, so that is the one to check."""
    raw = (folder / SINGLE).read_bytes()
    in_shards(folder)
    (folder / SINGLE).write_bytes(raw[:-4])


def pickle_alone(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def no_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()


def adapter(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/Base"}')
    no_config(folder)


def another_layout(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "consolidated.safetensors")


def own_code_without_weights(folder: Path) -> None:
    own_code(folder)
    no_weights(folder)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config_of_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{'model_type': 'llama'}")


def config_nested_for_ever(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200_000)


def config_of_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def config_of_half_characters(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')


def family_of_a_list(folder: Path) -> None:
    with_config(folder, model_type=["llama"])


def text_part_of_a_list(folder: Path) -> None:
    with_config(folder, text_config=[1])


def weights_of_which_too_little_is_said(folder: Path) -> None:
    with_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


def awq_of_the_first_kind(folder: Path) -> None:
    (folder / "quant_config.json").write_text('{"w_bit": 4, "q_group_size": 128}')


FAULTS: tuple[tuple[Callable[[Path], None], str], ...] = (
    (truncated, "model.safetensors in .* is damaged"),
    (shard_missing, "1 of 2 weight files are missing from damaged, first b.safetensors"),
    (shard_truncated, "b.safetensors in .* is damaged"),
    (shard_outside, r"points outside its folder \(../b.safetensors\)"),
    (index_of_a_long_name, "1 of 1 weight files are missing from damaged"),
    (index_of_nothing, f"{INDEX} names no weights"),
    (index_of_no_json, f"{INDEX} is not valid JSON"),
    (single_beside_an_index, "model.safetensors in .* is damaged"),
    (pickle_alone, "pytorch_model.bin.* is refused"),
    (no_weights, "holds no weights"),
    (adapter, "damaged is an adapter .LoRA. for org/Base, and no model. Merge it"),
    (another_layout, "damaged has no model.safetensors, .* but consolidated.safetensors"),
    (own_code, "code of its own"),
    (own_code_without_weights, "code of its own"),
    (no_config, r"damaged has no config.json, so it is not a model folder"),
    (config_of_no_json, "config.json is not valid JSON"),
    (config_nested_for_ever, "config.json is not valid JSON"),
    (config_of_a_list, "config.json is not a JSON object"),
    (config_of_half_characters, "config.json is not valid JSON"),
    (family_of_a_list, "is no name"),
    (text_part_of_a_list, "is no JSON object"),
    (weights_of_which_too_little_is_said, "quantization_config of damaged .*group_size"),
    (awq_of_the_first_kind, "is an AWQ model of the first kind.*Choose a copy"),
)


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_damaged_folder_is_a_model_error_that_names_it(
    fault: Callable[[Path], None], said: str, model_folder: Path
) -> None:
    fault(model_folder)
    with pytest.raises(ModelError, match=said):
        check_folder(model_folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [("tokenizer.model", "tokenizer.model alone, which is not read"), ("other", "no tokenizer")],
)
def test_a_tokenizer_that_is_not_read_is_told(name: str, said: str, model_folder: Path) -> None:
    (model_folder / name).touch()
    with pytest.raises(ModelError, match=rf"{said}\. Fetch the tokenizer\.json"):
        require_tokenizer(model_folder)
    (model_folder / "tokenizer.json").touch()
    require_tokenizer(model_folder)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("model_index.json", "of diffusers"),
        ("params.json", "layout of its makers"),
        ("mmproj-model-f16.gguf", "for images"),
        ("mtp-model-f16.gguf", "drafts for a model"),
    ],
)
def test_a_folder_of_another_kind_is_told_by_its_files(
    file: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=said):
        check_folder(tmp_path)


@pytest.mark.parametrize("place", ["model.onnx", "onnx/model_q4.onnx"])
def test_weights_as_onnx_are_told_and_not_to_be_fetched_again(
    place: str, model_folder: Path
) -> None:
    (model_folder / SINGLE).unlink()
    (model_folder / place).parent.mkdir(exist_ok=True)
    (model_folder / place).write_bytes(b"")
    with pytest.raises(ModelError, match=r"as ONNX \(model.*\.onnx\).*or as GGUF"):
        check_folder(model_folder)


def test_what_judges_texts_is_told(model_folder: Path) -> None:
    with_config(model_folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match=r"judges texts.*LlamaForSequenceClassification"):
        check_folder(model_folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        check_folder(tmp_path / "nowhere")
