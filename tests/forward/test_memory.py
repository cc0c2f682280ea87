"""A model on a processor is read layer by layer, and what is read is let go again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from localspec.forward.by_transformers import load_module
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.machine.gguf_models import opened_gguf
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.tiny import CPU, tiny_qwen

MIB = 2**20
SCRATCH_BYTES = 40 * MIB  # of the kernels and the allocator, whatever the model's size
LOADED = """
import ctypes, re, sys, torch
from pathlib import Path
from localspec.forward.load import load_model

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def loaded(folder):
    bits = 4 if "Q4_0" in folder or "experts" in folder else None
    return load_model(Path(folder), torch.float32, torch.device("cpu"), 64, bits)

for small, large in zip(sys.argv[1::2], sys.argv[2::2]):
    loaded(small)  # the code, the kernels and their scratch
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    loaded(large)
    print(1024 * (kib("VmHWM") - before))
"""


def saved(folder: Path, dtype: torch.dtype, num_layers: int, width: int, is_tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(vocab_size=128, hidden_size=width, intermediate_size=3 * width,
                              num_hidden_layers=num_layers, num_attention_heads=4,
                              num_key_value_heads=2, tie_word_embeddings=is_tied)  # fmt: skip
    module: Any = LlamaForCausalLM(config).to(dtype).eval()
    module.save_pretrained(str(folder), max_shard_size="50MB")
    return module


def saved_gguf(folder: Path, num_layers: int, kind: str) -> tuple[Path, Any]:
    """Of one layer again and again, for more would only take longer to make."""
    shape = {**tiny_qwen("qwen3").config.to_dict(), "hidden_size": 512, "intermediate_size": 1536,
             "layer_types": None}  # fmt: skip
    module = Qwen3ForCausalLM(Qwen3Config(**shape))
    module.model.layers = torch.nn.ModuleList([*module.model.layers] * num_layers)
    module.config.num_hidden_layers = num_layers
    folder.mkdir()
    write_gguf(folder / "m.gguf", module, kind, "qwen3", VOCABULARY)
    return opened_gguf(folder / "m.gguf", folder), module


def saved_mixture(folder: Path, num_experts: int) -> Any:
    """Of one layer, whose experts are joined, in bf16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, moe_intermediate_size=512,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts=num_experts,
        num_experts_per_tok=2,
    )  # fmt: skip
    module = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    config.save_pretrained(str(folder))
    save_file(module.state_dict(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return module


def most_held(*folders: Path) -> list[int]:
    """While the second of each two is loaded, after the first was. The C library maps each tensor
    of a large model apart; those of a small one only where it is told to, else what was freed
    between those that stay is held too."""
    command = [sys.executable, "-c", LOADED, *map(str, folders)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB // 4)}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return [int(line) for line in ran.stdout.split()]


def bytes_in_fp32(module: Any) -> int:
    weight_bytes: int = 4 * sum(each.numel() for each in module.state_dict().values())
    assert weight_bytes > 2 * SCRATCH_BYTES, "half of it would pass for scratch"
    return weight_bytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """Both the files' pages and what is made of them would be twice the model. Of what is unpacked
    each layer is let go when it is laid out: the pages of a file in 8 bits are a quarter of the
    weights in fp32. What stays in 4 bits is an eighth of them; as numbers of their own, which is
    how they are read, they would be all of them. Experts are quantised one by one."""
    saved(tmp_path / "small", torch.float32, 2, 512, is_tied=False)
    large = saved(tmp_path / "large", torch.float32, 8, 512, is_tied=False)
    ggufs = {kind: [saved_gguf(tmp_path / f"{kind} {num_layers}", num_layers, kind)
             for num_layers in (2, 12)] for kind in ("Q8_0", "Q4_0")}  # fmt: skip
    folders = [folder for pair in ggufs.values() for folder, _ in pair]
    saved_mixture(tmp_path / "2 experts", 2)
    mixture = saved_mixture(tmp_path / "64 experts", 64)
    folders += [tmp_path / "2 experts", tmp_path / "64 experts"]
    dense, unpacked, in_4_bits, experts = most_held(
        tmp_path / "small", tmp_path / "large", *folders
    )
    of_gguf = bytes_in_fp32(ggufs["Q8_0"][-1][1])
    assert dense < 1.1 * bytes_in_fp32(large) + SCRATCH_BYTES
    assert unpacked < 1.1 * of_gguf + SCRATCH_BYTES
    assert in_4_bits < of_gguf / 4 + SCRATCH_BYTES
    assert experts < bytes_in_fp32(mixture) / 4 + SCRATCH_BYTES / 2


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_read_by_layers_answers_as_the_whole(
    dtype: torch.dtype, is_tied: bool, tmp_path: Path
) -> None:
    module = saved(tmp_path, dtype, 2, 32, is_tied).float()
    opened = load_model(tmp_path, torch.float32, CPU, 32)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows
    with torch.no_grad():
        wanted = module(input_ids=torch.arange(6)[None]).logits[0]
    assert torch.allclose(opened.model.forward(range(6)), wanted, atol=1e-5)
    whole = load_module(tmp_path, torch.float32, CPU)
    assert opened.model.weights.embedding.dtype == torch.float32
    assert torch.equal(opened.model.weights.embedding, whole.model.embed_tokens.weight)
