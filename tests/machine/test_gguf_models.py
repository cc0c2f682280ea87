"""A GGUF file is found, planned, written out as a model folder and answered with."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from localspec.chat.template import ChatTemplate
from localspec.core.backend import Message, Request
from localspec.core.config import PROJECT_FOLDER
from localspec.core.decoding import OFF, SamplingParams
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.core.precisions import Precision
from localspec.formats.fingerprint import fingerprint
from localspec.formats.folder_files import notices_of, weight_files
from localspec.loading.fitting import needed_bytes
from localspec.loading.local_backend import open_local_backend
from localspec.loading.placement import Place
from localspec.machine.compatibility import read_token_map
from localspec.machine.folder_shapes import shape_from_folder, shape_of_gguf
from localspec.machine.gguf_models import gguf_of, opened_gguf, title_of
from localspec.machine.hardware import probe
from localspec.machine.plan_report import machine_for, make_plans
from localspec.machine.sources import resolve
from tests.kit.gguf_files import vocabulary_of, write_gguf
from tests.kit.tiny import tiny_llama

DRAFT = PROJECT_FOLDER / "assets" / "demo" / "draft"


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped draft as a GGUF file of BF16, with its tokenizer and its template."""
    file = tmp_path_factory.mktemp("gguf") / "demo-draft.gguf"
    module: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(DRAFT))
    module.load_state_dict(load_file(str(DRAFT / "model.safetensors")), strict=False)
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text("utf-8"))
    template = (DRAFT / "chat_template.jinja").read_text("utf-8")
    write_gguf(file, module, "BF16", describe=vocabulary_of(tokenizer, "smollm", template, (2, 0)))
    return file


@pytest.fixture(scope="module")
def gguf_backend(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loaded from the file alone, which also drafts."""
    home = tmp_path_factory.mktemp("home")
    options = LoadOptions(model=str(demo_gguf), draft=str(demo_gguf), home=home, context=128)
    return open_local_backend(options, None, lambda phrase: None)


def test_its_shape_is_that_of_the_model_it_was_made_from(demo_gguf: Path) -> None:
    found, wanted = shape_of_gguf(demo_gguf, "demo"), shape_from_folder(DRAFT)
    assert found.stored_as == "GGUF (BF16)"
    assert found.num_params == wanted.num_params
    assert found.kv_bytes(100) == wanted.kv_bytes(100)
    assert found.context_length == wanted.context_length


def test_a_token_that_is_marked_as_none_is_not_the_last_of_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text("utf-8"))
    known = vocabulary_of(tokenizer, "smollm", "{{ messages[0].content }}", (2,))

    def describe(writer: Any) -> None:
        known(writer)
        writer.add_int32("tokenizer.ggml.padding_token_id", -1)

    write_gguf(tmp_path / "m.gguf", tiny_llama(vocab_size=6144), describe=describe)
    folder = opened_gguf(tmp_path / "m.gguf", tmp_path)
    assert "pad_token" not in json.loads((folder / "tokenizer_config.json").read_text("utf-8"))


def test_settings_that_are_not_read_and_an_unsaid_split_are_told(tmp_path: Path) -> None:
    """Files before May 2024 do not say how they split text."""
    words = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}

    def describe(writer: GGUFWriter) -> None:
        vocabulary_of(words, "gpt-2")(writer)
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_float32("llama.rope.scaling.alpha", 1000.0)
        writer.add_uint32("llama.attention.sliding_window", 8)
        writer.add_bool("tokenizer.ggml.add_eos_token", True)
        writer.add_bool("tokenizer.ggml.remove_extra_whitespaces", False)
        writer.add_uint32("tokenizer.ggml.fim_pad_token_id", 0)

    write_gguf(tmp_path / "old.gguf", tiny_llama(), describe=describe)
    split, settings = notices_of(opened_gguf(tmp_path / "old.gguf", tmp_path))
    assert "does not say how it splits text (tokenizer.ggml.pre" in split
    assert (
        "not read here: llama.attention.sliding_window, llama.rope.scaling.alpha and "
        "tokenizer.ggml.add_eos_token. " in settings
    )


def test_it_can_be_named_by_its_folder_and_two_are_not_guessed_between(
    demo_gguf: Path, tmp_path: Path
) -> None:
    shutil.copy(demo_gguf, tmp_path / "one.gguf")
    shutil.copy(demo_gguf, tmp_path / "mmproj-one.gguf")  # a vision tower is no model
    shutil.copy(demo_gguf, tmp_path / "mtp-one.gguf")  # nor is a module that drafts for one
    assert gguf_of(tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "config.json").touch()  # as some publish it beside their files
    assert gguf_of(tmp_path) == tmp_path / "one.gguf"
    assert gguf_of(DRAFT) is None
    shutil.copy(demo_gguf, tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"holds 2 models \(one.gguf, two.gguf\)"):
        gguf_of(tmp_path)


@pytest.mark.slow
def test_its_token_map_template_and_end_ids_are_the_models(demo_gguf: Path, tmp_path: Path) -> None:
    folder = opened_gguf(demo_gguf, tmp_path)
    assert read_token_map(demo_gguf) == read_token_map(folder) == read_token_map(DRAFT)
    found, wanted = ChatTemplate.load(folder), ChatTemplate.load(DRAFT)
    assert found.end_ids == wanted.end_ids
    messages = (Message("user", "Hello, you."), Message("assistant", "Yes?"), Message("user", "Go"))
    assert found.decode(found.render(messages)) == wanted.decode(wanted.render(messages))


@pytest.mark.slow
def test_it_answers_as_the_folder_it_was_made_from(gguf_backend: Any, tmp_path: Path) -> None:
    options = LoadOptions(model=str(DRAFT), home=tmp_path, context=128)
    folder = open_local_backend(options, None, lambda phrase: None)
    # The tokenizers split digits otherwise.
    prompt = ChatTemplate.load(DRAFT).render((Message("user", "Tell me of the sea."),))
    found, wanted = (one.loaded.engine.target.forward(prompt) for one in (gguf_backend, folder))
    assert torch.equal(found, wanted)
    gguf_backend.loaded.engine.target.cache.rollback(0)


@pytest.mark.slow
def test_a_reply_is_written_from_the_file_alone(gguf_backend: Any) -> None:
    assert gguf_backend.describe().target == "demo-draft"
    request = Request((Message("user", "Hi"),), SamplingParams(seed=1), 8, drafter=OFF)
    chunks = list(gguf_backend.generate(request, threading.Event()))
    assert "".join(chunk.text for chunk in chunks)
    assert chunks[-1].error is None


def test_it_is_planned_by_what_it_holds(demo_gguf: Path) -> None:
    report = make_plans(
        LoadOptions(model=str(demo_gguf), draft=str(demo_gguf)), hardware=machine_for(vram_gib=(8,))
    )
    best = report.plans[0]
    assert best.target.name == "demo-draft"
    assert "Its weights are kept as GGUF (BF16), and unpacked" in best.reason
    wanted = make_plans(LoadOptions(model=str(DRAFT)), hardware=machine_for(vram_gib=(8,))).plans[0]
    assert best.bytes.target_weights == wanted.bytes.target_weights


@pytest.mark.slow
def test_in_4_bits_on_a_processor_it_is_counted_and_told_as_it_is_kept(tmp_path: Path) -> None:
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text("utf-8"))
    module = tiny_llama(vocab_size=6144)
    known = vocabulary_of(tokenizer, "smollm", "{{ messages[0].content }}", (2,))

    def describe(writer: GGUFWriter) -> None:
        known(writer)
        writer.add_uint32("llama.attention.sliding_window", 8)

    write_gguf(tmp_path / "q4.gguf", module, "Q4_0", describe=describe)
    options = LoadOptions(model=str(tmp_path / "q4.gguf"), home=tmp_path, context=64, dtype="4-bit")
    backend = open_local_backend(options, None, lambda phrase: None)
    told = [each for each in backend.describe().notices if "as they are" in each]
    assert len(told) == 1 and "by at most 0." in told[0]
    assert any("llama.attention.sliding_window" in each for each in backend.describe().notices)
    folder = opened_gguf(tmp_path / "q4.gguf", tmp_path)
    dtype = backend._engine.target.embed([0]).dtype
    full: Precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    place = Place(probe(), torch.device("cpu"), dtype, 4, 64)
    held = backend.describe().target_bytes
    _, cache = shape_from_folder(folder).loaded_bytes("4-bit", full, 64, "cpu")
    assert needed_bytes(folder, place) - cache == pytest.approx(held, rel=0.05)


def test_a_plan_says_what_is_done_to_the_files_weights(demo_gguf: Path) -> None:
    report = make_plans(LoadOptions(model=str(demo_gguf)), hardware=machine_for(vram_gib=(8,)))
    said = {each.precision: each.reason for each in report.plans}
    assert "unpacked while loading" in said["bf16"]
    assert "quantised a second time" in said["4-bit"]


def test_only_weights_of_4_bits_are_said_to_be_left_in_them(tmp_path: Path) -> None:
    describe = vocabulary_of({"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []},
                             "gpt-2")  # fmt: skip
    said = {}
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(tmp_path / f"{kind}.gguf", tiny_llama(), kind, describe=describe)
        options = LoadOptions(model=str(tmp_path / f"{kind}.gguf"), dtype="4-bit")
        said[kind] = make_plans(options, hardware=machine_for(vram_gib=(0,))).plans[0].reason
    assert "left in their 4 bits" in said["Q4_0"] and "a second time" in said["Q8_0"]


def test_its_settings_are_written_once_and_again_when_the_file_changes(
    demo_gguf: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.gguf"
    shutil.copy(demo_gguf, file)
    first = opened_gguf(file, tmp_path)
    written = (first / "config.json").stat().st_mtime_ns
    assert opened_gguf(file, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == written
    write_gguf(file, tiny_llama(), describe=vocabulary_of(
        {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "gpt-2"))  # fmt: skip
    assert opened_gguf(file, tmp_path) != first


@pytest.mark.slow
def test_a_file_that_was_moved_is_still_the_same_model(demo_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    moved = Path(shutil.copy(demo_gguf, tmp_path / "other"))
    first, second = opened_gguf(demo_gguf, tmp_path), opened_gguf(moved, tmp_path)
    assert first != second
    assert fingerprint(first) == fingerprint(second)


def test_parts_in_the_hubs_cache_are_found_by_the_names_of_their_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    describe = vocabulary_of({"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []},
                             "gpt-2")  # fmt: skip
    write_gguf(blobs / "0", tiny_llama(), describe=describe)
    write_gguf(blobs / "1", tiny_llama(num_layers=0))
    for number in (0, 1):
        place = snapshot / f"big-0000{number + 1}-of-00002.gguf"
        place.symlink_to(blobs / str(number))
    folder = opened_gguf(snapshot / "big-00001-of-00002.gguf", tmp_path)
    assert folder.name.startswith("big-")
    assert [file.name for file in weight_files(folder)] == sorted(os.listdir(snapshot))


def test_a_file_of_ollama_is_called_as_it_says_itself(tmp_path: Path) -> None:
    words = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}

    def named(writer: GGUFWriter) -> None:
        vocabulary_of(words, "gpt-2")(writer)
        writer.add_name("../Tiny 1B")

    blob = tmp_path / "sha256-0123456789abcdef"
    write_gguf(blob, tiny_llama(), describe=named)
    assert title_of(blob) == "../Tiny 1B (01234567)"
    assert opened_gguf(blob, tmp_path).parent == tmp_path / "gguf"


def test_a_family_without_a_reader_is_named_with_what_would_do(tmp_path: Path) -> None:
    write_gguf(tmp_path / "odd.gguf", tiny_llama(), family="minicpm")
    with pytest.raises(
        ModelError, match=r"of the family minicpm.*Fetch the model with .safetensors"
    ):
        resolve(LoadOptions(model=str(tmp_path / "odd.gguf"), home=tmp_path))


def test_a_tensor_that_the_family_does_not_have_is_refused(tmp_path: Path) -> None:
    import numpy as np

    file = tmp_path / "odd.gguf"
    write_gguf(file, tiny_llama(), describe=lambda writer: writer.add_tensor(
        "blk.0.attn_sinks.weight", np.zeros(4, np.float32)))  # fmt: skip
    with pytest.raises(ModelError, match=r"not known to have, first blk.0.attn_sinks.weight"):
        opened_gguf(file, tmp_path)


@pytest.mark.slow
def test_what_a_file_of_ollama_holds_for_images_is_left_out(tmp_path: Path) -> None:
    """Gemma 3's vision tower and its projector are in the same file there."""
    import numpy as np

    def describe(writer: Any) -> None:
        vocabulary_of(json.loads((DRAFT / "tokenizer.json").read_text("utf-8")), "gpt-2")(writer)
        for name in ("v.blk.0.attn_k.weight", "mm.mm_input_projection.weight"):
            writer.add_tensor(name, np.ones((64, 64), np.float32))

    write_gguf(tmp_path / "text.gguf", tiny_llama(vocab_size=6144), "Q4_0", describe=vocabulary_of(
        json.loads((DRAFT / "tokenizer.json").read_text("utf-8")), "gpt-2"))  # fmt: skip
    write_gguf(tmp_path / "both.gguf", tiny_llama(vocab_size=6144), "Q4_0", describe=describe)
    text, both = (shape_of_gguf(tmp_path / f"{name}.gguf", "a") for name in ("text", "both"))
    assert both.weight_bytes("fp32", "fp32", "cpu") == text.weight_bytes("fp32", "fp32", "cpu")
    options = LoadOptions(model=str(tmp_path / "both.gguf"), home=tmp_path, context=64)
    assert open_local_backend(options, None, lambda phrase: None).describe().target


@pytest.mark.parametrize("name", ["block_count", "feed_forward_length", "attention.head_count"])
def test_a_size_that_is_not_that_of_its_tensors_is_damage(name: str, tmp_path: Path) -> None:
    """A model of two thousand million layers would take all memory."""
    file = tmp_path / "odd.gguf"
    write_gguf(file, tiny_llama(), describe=vocabulary_of(
        {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}, "gpt-2"))  # fmt: skip
    raw = bytearray(file.read_bytes())
    key = f"llama.{name}".encode()
    at = raw.index(key) + len(key) + 4  # behind the type of the number
    raw[at : at + 4] = (2**31).to_bytes(4, "little")
    file.write_bytes(raw)
    with pytest.raises(ModelError, match=f"its {name} is not that of its tensors"):
        opened_gguf(file, tmp_path)


def test_a_damaged_vocabulary_is_named(tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    words = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}

    def describe(writer: Any) -> None:
        vocabulary_of(words, "gpt-2")(writer)
        writer.add_uint32("tokenizer.ggml.bos_token_id", 7)
        writer.add_bool("tokenizer.ggml.add_bos_token", True)

    write_gguf(file, tiny_llama(), describe=describe)
    with pytest.raises(ModelError, match=r"The vocabulary in odd.gguf is damaged.*again"):
        opened_gguf(file, tmp_path)
