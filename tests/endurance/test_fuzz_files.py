"""Mutated GGUF files, packed weights and heads: each is read or refused by a sentence."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.core.config import PROJECT_FOLDER
from localspec.formats.gguf_file import read_header
from localspec.formats.head_folder import head_kind
from localspec.forward.heads.eagle_files import read_eagle
from localspec.machine.folder_shapes import shape_from_folder, shape_of_gguf
from localspec.machine.gguf_models import opened_gguf
from tests.endurance.fuzzing import copied, fuzz, load_and_answer, mutated, twisted
from tests.kit.gguf_files import vocabulary_of, write_gguf
from tests.kit.packed import LAYOUTS, packed_folder
from tests.kit.random_eagle import write_random
from tests.kit.tally import Tally
from tests.kit.tiny import tiny_llama, with_cache

TOKENIZER = PROJECT_FOLDER / "assets" / "demo" / "draft" / "tokenizer.json"


@pytest.mark.slow
def test_mutated_gguf_files_are_loaded_or_refused(tmp_path: Path, tally: Tally) -> None:
    file = tmp_path / "whole.gguf"
    tokenizer = json.loads(TOKENIZER.read_text("utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    describe = vocabulary_of(tokenizer, "smollm", "{{ messages[0].content }}", (2,))
    write_gguf(file, tiny_llama(vocab_size=6144), "Q4_0", describe=describe)
    data = file.read_bytes()
    tensors = read_header(file).tensors
    table = data.index(tensors[0].name.encode())  # the list of tensors begins 8 bytes before
    begin = min(tensor.start for tensor in tensors)
    spans = ((0, 1500), (table - 8, begin), (table - 8, begin))

    def gguf(rng: random.Random) -> None:
        first, last = rng.choice(spans)
        if rng.random() < 0.2:
            made = data[: rng.randrange(len(data))]
        elif rng.random() < 0.5:  # of the same length
            made = bytearray(data)
            size = rng.choice((1, 1, 4, 8))
            at = rng.randrange(first, last)
            made[at : at + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
        else:
            made = data[:first] + mutated(data[first:last], rng) + data[last:]
        folder = tmp_path / str(rng.randrange(10**9))
        folder.mkdir()
        (folder / "model.gguf").write_bytes(made)
        try:
            shape_of_gguf(folder / "model.gguf", "model")
            load_and_answer(opened_gguf(folder / "model.gguf", folder))
        finally:
            shutil.rmtree(folder)

    fuzz(tally, gguf, quick=4, whole=400)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mutated_packed_weights_are_loaded_or_refused(
    layout: str, tmp_path: Path, tally: Tally
) -> None:
    pack, settings, _ = LAYOUTS[layout]
    folder = tmp_path / "whole"
    folder.mkdir()
    packed_folder(folder, pack, settings)
    tensors = load_file(folder / "model.safetensors")
    packed = sorted(name for name in tensors if "_proj." in name)

    def weights(rng: random.Random) -> None:
        copy = copied(folder, rng)
        if rng.random() < 0.5:
            config = json.loads((copy / "config.json").read_text())
            config["quantization_config"] = twisted(settings, rng)
            (copy / "config.json").write_text(json.dumps(config))
        else:
            name, held = rng.choice(packed), dict(tensors)
            tensor = torch.atleast_2d(held[name].contiguous())
            other = tensors[rng.choice(packed)]
            held[name] = rng.choice((
                tensor[:-1], tensor.mT.contiguous(), other.clone(),
                tensor.reshape(-1), torch.zeros(0, dtype=tensor.dtype),
                torch.full(tensor.shape, -1, dtype=torch.int32), tensor.float(),
            ))  # fmt: skip
            save_file(held, copy / "model.safetensors", metadata={"format": "pt"})
        try:
            shape_from_folder(copy)
            load_and_answer(copy)
        finally:
            shutil.rmtree(copy)

    fuzz(tally, weights, quick=2, whole=60)


def test_mutated_heads_are_read_or_refused(tmp_path: Path, tally: Tally) -> None:
    folder, target = tmp_path / "head", with_cache(tiny_llama())
    write_random(folder, target)

    def heads(rng: random.Random) -> None:
        copy = copied(folder, rng)
        file = copy / rng.choice(("head.json", "config.json"))
        config = json.loads((copy / "head.json").read_text())
        file.write_text(json.dumps(twisted(config | {"num_hidden_layers": 1}, rng)))
        if file.name == "config.json":
            (copy / "head.json").unlink()
            (copy / "head.safetensors").rename(copy / "model.safetensors")
        try:
            head_kind(copy)
            read_eagle(copy, target)
        finally:
            shutil.rmtree(copy)

    fuzz(tally, heads, quick=4, whole=200)
