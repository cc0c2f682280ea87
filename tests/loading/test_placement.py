"""A target that does not fit is refused with what would, or loaded anyway where the person says
so."""

from __future__ import annotations

import ctypes
import json
import mmap
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
)

from localspec.core.config import SHIPPED_PROFILES
from localspec.core.errors import ConfigError, MemoryShortage
from localspec.core.options import LoadOptions
from localspec.forward.builder import return_cached
from localspec.forward.decoder import Decoder
from localspec.loading import fitting
from localspec.loading.fitting import (
    check_target,
    keep_out_of_ram,
    load_at,
    needed_bytes,
    refuse_shortage,
)
from localspec.loading.local_backend import open_local_backend
from localspec.loading.placement import (
    Place,
    device_of,
    draft_places,
    dtype_of,
    place_for,
    require_movable_draft,
)
from localspec.machine import shapes
from localspec.machine.catalogue import profile_models
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.gguf_models import opened_gguf
from localspec.machine.hardware import Host, on_device, probe
from localspec.machine.memory import Arrangement, bytes_of, full_precision, room_for
from localspec.machine.model import Model
from localspec.machine.plans import PlanRequest
from localspec.machine.profiles import load_profiles
from localspec.machine.recommend import Snapshot, recommend
from localspec.weights import dense
from localspec.weights.int4 import Int4Linear
from localspec.weights.library import bitsandbytes
from localspec.weights.mxfp4 import Mxfp4Linear
from localspec.weights.nf4 import Nf4Linear
from localspec.weights.precision import Bits
from tests.kit.fake_nvml import CPU_BUILD, CUDA_BUILD, GIB, LINUX, FakeNvml
from tests.kit.families import small
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.model_folders import VOCAB_SIZE, save_model, save_tokenizer
from tests.kit.mxfp4 import saved_in_mxfp4
from tests.kit.packed import AWQ, as_awq, packed_folder
from tests.kit.shapes import LLAMA_8B
from tests.kit.tiny import NEEDS_BF16, tiny_qwen

CONTEXT = 4096


@pytest.fixture
def place() -> Place:
    return Place(probe(), torch.device("cpu"), torch.float32, None, CONTEXT)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(fitting, "free_bytes_now", lambda *_, **__: free)


def tied(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def packed(folder: Path) -> Path:
    folder.mkdir()
    packed_folder(folder, as_awq, AWQ)
    return folder


def in_k_blocks(folder: Path) -> Path:
    folder.mkdir()
    write_gguf(folder / "m.gguf", tiny_qwen("qwen3"), "Q4_K", "qwen3", VOCABULARY)
    return opened_gguf(folder / "m.gguf", folder)


def in_16_bits(folder: Path) -> Path:
    folder.mkdir()
    write_gguf(folder / "m.gguf", tiny_qwen("qwen3"), "F16", "qwen3", VOCABULARY)
    return opened_gguf(folder / "m.gguf", folder)


def nested(folder: Path) -> Path:
    """Of bitsandbytes, with scales that are quantised themselves."""
    quantised: Any = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                        bnb_4bit_use_double_quant=True)  # fmt: skip
    asked = {"quantization_config": quantised, "dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    module: Any = AutoModelForCausalLM.from_pretrained(tied(folder / "whole"), **asked)
    module.save_pretrained(folder / "kept")
    return folder / "kept"


def wide(folder: Path) -> Path:
    """Published in 32 bits a weight, which fp16 does not hold."""
    model = LlamaForCausalLM.from_pretrained(tied(folder / "narrow"), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1e-4)
    model.save_pretrained(folder / "wide")
    return folder / "wide"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "bits"),
    [(make, bits) for make in (tied, wide, packed, in_k_blocks) for bits in (None, 4)]
    + [(in_16_bits, None)],
)
def test_the_same_of_a_processor_that_computes_in_fp32(
    make: Callable[[Path], Path],
    bits: Bits | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was published in 16 bits is kept in 16, but for the embedding."""
    monkeypatch.setattr(bitsandbytes().functional, "has_avx512bf16", lambda: False)
    folder = make(tmp_path / "model")
    there = Place(probe(), torch.device("cpu"), torch.float32, bits, 128)
    model = load_at(folder, there).model
    assert isinstance(model, Decoder)
    held = model.weight_bytes + model.cache.kv_bytes
    assert needed_bytes(folder, there) == pytest.approx(held, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (tied, None),
        (packed, None),
        (packed, 4),
        (in_k_blocks, None),
        (in_k_blocks, 4),
        pytest.param(nested, 4, marks=NEEDS_BF16),
    ],
)
def test_what_is_said_to_be_needed_is_what_loading_keeps(
    make: Callable[[Path], Path], bits: Bits | None, tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    there = Place(probe(), torch.device("cpu"), torch.bfloat16, bits, 128)
    model = load_at(folder, there).model
    assert isinstance(model, Decoder)
    held = model.weight_bytes + model.cache.kv_bytes
    assert needed_bytes(folder, there) == pytest.approx(held, rel=0.05)
    shape, precision = shape_from_folder(folder), "bf16" if bits is None else "4-bit"
    planned = bytes_of(
        Arrangement(Model("m", known_shape=shape), precision, 128),
        room_for(on_device(probe(), "cpu")),
    )
    assert planned.target_weights + planned.target_kv == needed_bytes(folder, there)


def test_what_bitsandbytes_wrote_is_counted_in_bf16_where_fp32_is_computed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels for bf16 its head is not laid out anew."""
    monkeypatch.setattr(dense, "PACKED_DTYPES", (torch.float32,))
    monkeypatch.setattr(shapes, "PACKS_BF16", False)
    folder = nested(tmp_path / "model")
    there = Place(probe(), torch.device("cpu"), torch.float32, 4, 1024)
    model = load_at(folder, there).model
    assert isinstance(model, Decoder)
    held = model.weight_bytes + model.cache.kv_bytes
    assert needed_bytes(folder, there) == pytest.approx(held, rel=0.05)


def test_what_fits_is_no_matter(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, place: Place
) -> None:
    with_free(monkeypatch, needed_bytes(saved_target, place))
    assert check_target(saved_target, place, anyway=False) is None


def test_a_refusal_names_the_longest_context_that_would_fit(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, place: Place
) -> None:
    with_free(monkeypatch, needed_bytes(saved_target, replace(place, context_length=1024)) + 1)
    with pytest.raises(MemoryShortage, match=r"is free on .*\. A context of 1024 tokens .*fit"):
        check_target(saved_target, place, anyway=False)


def test_a_refusal_names_the_fewer_bits_that_would_fit(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, place: Place
) -> None:
    short = replace(place, context_length=512)
    with_free(monkeypatch, needed_bytes(saved_target, replace(short, bits=4)))
    with pytest.raises(MemoryShortage) as refused:
        check_target(saved_target, short, anyway=False)
    assert "4-bit weights would fit" in str(refused.value)
    assert "8-bit" not in str(refused.value) and "context of 2" not in str(refused.value)


def test_fewer_bits_are_no_remedy_where_none_are_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 16, "num_experts": 4,
             "num_experts_per_tok": 2}  # fmt: skip
    config = Qwen3MoeConfig(**sizes, num_hidden_layers=1, num_attention_heads=4)
    settings = {**config.to_dict(), "speaks_backwards": True}  # transformers runs it
    (tmp_path / "config.json").write_text(json.dumps(settings))
    there = Place(probe(), torch.device("cpu"), torch.float32, None, 512)
    with_free(monkeypatch, needed_bytes(tmp_path, replace(there, bits=4)))
    with pytest.raises(MemoryShortage, match="Neither a shorter context nor fewer bits would fit"):
        check_target(tmp_path, there, anyway=False)


def test_weights_that_are_not_quantised_again_are_told_before_they_are_read(
    saved_target: Path, tmp_path: Path
) -> None:
    """transformers said of gpt-oss that a config of another class was passed."""
    folder = tmp_path / "oss"
    shutil.copytree(saved_target, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"oss keeps its weights as MXFP4.*Leave --dtype 4-bit"):
        place_for(LoadOptions(dtype="4-bit"), Model(str(folder), path=folder), probe(), torch)
    assert place_for(LoadOptions(), Model(str(folder), path=folder), probe(), torch).bits is None


def test_experts_stay_in_mxfp4_where_the_other_layers_are_quantised(tmp_path: Path) -> None:
    module = small("gpt_oss", vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64)
    saved_in_mxfp4(module, tmp_path / "oss")
    save_tokenizer(tmp_path / "oss")
    options = LoadOptions(model=str(tmp_path / "oss"), context=64, dtype="4-bit")
    backend = open_local_backend(options, None, lambda phrase: None)
    target = backend.loaded.engine.target
    assert isinstance(target, Decoder) and backend.describe().dtype == "4-bit"
    kinds = {type(each) for each in target.weights.linears}
    assert Mxfp4Linear in kinds and kinds & {Int4Linear, Nf4Linear}


def test_a_context_too_short_to_talk_in_is_no_remedy(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, place: Place
) -> None:
    short = replace(place, context_length=600)
    with_free(monkeypatch, needed_bytes(saved_target, replace(short, context_length=300)))
    with pytest.raises(MemoryShortage) as refused:
        check_target(saved_target, short, anyway=False)
    assert "context of 300" not in str(refused.value)


def test_where_nothing_would_fit_a_smaller_model_is_the_remedy(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, place: Place
) -> None:
    with_free(monkeypatch, 1000)
    with pytest.raises(MemoryShortage, match="choose a smaller model"):
        check_target(saved_target, place, anyway=False)


def test_weights_that_transformers_unpacks_for_a_gpu_need_room_in_the_ram(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path, tmp_path: Path
) -> None:
    with_free(monkeypatch, GIB)
    packed = tmp_path / "packed"
    shutil.copytree(saved_target, packed)
    config = json.loads((packed / "config.json").read_text())
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    config = {**config, "quantization_config": quantised}
    (packed / "config.json").write_text(json.dumps({**config, "model_type": "made_up"}))
    little = replace(LINUX, ram_available_bytes=1000)
    cuda = Place(
        probe(FakeNvml(free_gib=10, total_gib=12), little, CUDA_BUILD),
        torch.device("cuda"), torch.bfloat16, None, 64,
    )  # fmt: skip
    with pytest.raises(MemoryShortage, match=r"unpacked in the RAM.*--dtype 4-bit"):
        check_target(packed, cuda, anyway=False)
    assert "unpacked in the RAM" in (check_target(packed, cuda, anyway=True) or "")
    assert check_target(saved_target, cuda, anyway=False) is None, (
        "whole weights go straight to the GPU"
    )
    on_cpu = replace(cuda, device=torch.device("cpu"))
    assert check_target(packed, on_cpu, anyway=False) is None
    (packed / "config.json").write_text(json.dumps(config))
    assert check_target(packed, cuda, anyway=False) is None, "a native one comes block by block"
    (packed / "config.json").write_text(json.dumps({**config, "speaks_backwards": True}))
    with pytest.raises(MemoryShortage, match="unpacked in the RAM"):  # an unknown setting
        check_target(packed, cuda, anyway=False)
    (packed / "config.json").write_text(json.dumps({"quantization_config": quantised}))
    assert check_target(packed, cuda, anyway=False) is None, "how much it needs is not known"


def test_tables_that_stay_in_the_ram_need_room_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_free(monkeypatch, GIB)
    model = small("gemma4, keys of earlier layers", vocab_size=VOCAB_SIZE)
    folder = save_model(tmp_path / "gemma", model)
    table = model.model.embed_tokens_per_layer.weight
    host = replace(LINUX, ram_available_bytes=2 * GIB)  # of which 1.3 are left to others
    cuda = Place(
        probe(FakeNvml(), host, CUDA_BUILD), torch.device("cuda"), torch.bfloat16, None, 64
    )
    assert check_target(folder, cuda, anyway=False) is None
    fewer = replace(host, ram_available_bytes=host.ram_total_bytes // 25 + table.nbytes // 4)
    short = replace(cuda, hardware=replace(cuda.hardware, host=fewer))
    with pytest.raises(MemoryShortage, match=r"keeps .* in the RAM while NVIDIA .*Close other"):
        check_target(folder, short, anyway=False)
    assert "as you chose" in (check_target(folder, short, anyway=True) or "")
    with pytest.raises(MemoryShortage, match="of RAM is free"):
        refuse_shortage(folder, short)


def test_anyway_turns_the_refusal_into_a_notice_with_the_risk(
    monkeypatch: pytest.MonkeyPatch, saved_target: Path
) -> None:
    with_free(monkeypatch, 1000)
    options = LoadOptions(model=str(saved_target), context=128, dtype="float32", anyway=True)
    backend = open_local_backend(options, None, lambda phrase: None)
    notice = next(each for each in backend.describe().notices if "as you chose" in each)
    assert "is free" in notice and "the system may end" in notice


@pytest.mark.skipif(sys.platform != "linux", reason="the C library of Linux keeps freed memory")
def test_memory_that_was_freed_between_blocks_in_use_goes_back_to_the_system() -> None:
    """Loading a packed model of 200 million weights left 160 to 450 MB of it behind. The pages
    themselves are asked for: other threads of the tests' process take and free memory too."""

    def resident(address: int) -> bool:
        found = (ctypes.c_ubyte * 1)()
        where = ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE)
        return ctypes.CDLL(None).mincore(where, ctypes.c_size_t(1), found) == 0 and found[0] & 1 > 0

    sizes = [100_000] * 600  # too small for a mapping of their own
    blocks = sorted((torch.ones(n, dtype=torch.uint8) for n in sizes), key=torch.Tensor.data_ptr)
    middles = [each.data_ptr() + 50_000 for each in blocks[::2]]
    del blocks[::2]  # each between two in use: the end of a heap is kept in threads but the first
    assert all(map(resident, middles)), "the C library gives them back by itself"
    return_cached(torch.device("cpu"))
    assert sum(map(resident, middles)) < 30 and len(blocks) == 300


def test_the_longest_context_is_read_by_any_of_its_names(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=100)
    folder = save_model(tmp_path / "gpt2", GPT2LMHeadModel(config))
    source = Model("gpt2", path=folder)
    assert place_for(LoadOptions(), source, probe(), torch).context_length == 100
    with pytest.raises(ConfigError, match="can use 64 to 100"):
        place_for(LoadOptions(context=101), source, probe(), torch)


def test_on_a_mac_models_are_placed_on_mps_in_bfloat16_and_never_quantised() -> None:
    apple = Host("Darwin", "25.0", "arm64", "Apple M4", 10, 32 * GIB, 20 * GIB, False)
    hardware = probe(FakeNvml(failing={"nvmlInit": 12}), apple, CPU_BUILD)
    assert device_of(hardware, torch) == torch.device("mps")
    assert dtype_of(None, hardware) == torch.bfloat16
    assert dtype_of("fp16", hardware) == dtype_of("float16", hardware) == torch.float16
    assert PlanRequest(
        Model("m", known_shape=LLAMA_8B), room_for(hardware), full="bf16"
    ).precisions == ("bf16",)


def test_a_card_that_only_emulates_bfloat16_gets_float16() -> None:
    """Turing; whether it is chosen in the Models tab, on the command line or by nobody."""
    turing = probe(FakeNvml(capability=(7, 5)), LINUX, CUDA_BUILD)
    assert dtype_of(None, turing) == torch.float16
    models = profile_models(load_profiles((SHIPPED_PROFILES,)), [])
    snapshot = Snapshot(room_for(turing), full_precision(None, turing))
    cards = [card for card in recommend(snapshot, models, 4096).others if card.refusal is None]
    asked = {card.load_options().dtype for card in cards}
    assert "float16" in asked and "bfloat16" not in asked


class TwoCards:
    """torch with both cards of FakeNvml, by UUID."""

    device = torch.device

    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 2)
        get_device_properties = staticmethod(lambda index: SimpleNamespace(uuid=f"0000-gpu{index}"))
        get_device_capability = staticmethod(lambda index: (8, 9))
        get_arch_list = staticmethod(lambda: ["sm_80", "sm_90"])


def test_a_draft_is_placed_beside_the_target_then_on_the_other_card_or_where_it_is_asked_for() -> (
    None
):
    machine = probe(FakeNvml(num_gpus=2), replace(LINUX, multiplies_bf16=False), CUDA_BUILD)
    on_first = replace(machine, gpu=machine.gpus[0])
    target = Place(on_first, torch.device("cuda", 0), torch.bfloat16, 4, CONTEXT)

    def placed(**options: str) -> list[Place]:
        return list(draft_places(LoadOptions(**options), target, machine, TwoCards))

    beside, other = placed()
    assert (beside.device, other.device) == (torch.device("cuda", 0), torch.device("cuda", 1))
    assert beside.bits is None is other.bits and other.hardware.gpu == machine.gpus[1]
    assert [each.device for each in placed(draft_device="cuda:1")] == [torch.device("cuda", 1)]
    assert placed(draft_device="cuda:0") == [beside]
    (on_cpu,) = placed(draft_device="cpu")
    assert (on_cpu.device, on_cpu.dtype) == (torch.device("cpu"), torch.float32)
    assert on_cpu.hardware.gpu is None
    with pytest.raises(ConfigError, match="--draft-device cuda:2 is not here"):
        placed(draft_device="cuda:2")


def test_a_device_for_a_draft_that_is_not_there_is_refused_and_heads_stay_where_they_are() -> None:
    source, options = Model("t", path=Path("t")), LoadOptions(draft_device="cpu")
    require_movable_draft(LoadOptions(), source)
    require_movable_draft(options, replace(source, drafts=(Model("d", path=Path("d")),)))
    with pytest.raises(ConfigError, match=r"there is none for t\. Name one with --draft"):
        require_movable_draft(options, source)
    with pytest.raises(ConfigError, match="A head reads the target's hidden states"):
        require_movable_draft(options, replace(source, heads=(Path("h"),)))


def test_on_windows_torch_may_take_no_more_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """There an overrun goes to the RAM, silently and ten times slower."""
    limits = list[float]()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * GIB, 12 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share)
    )
    with_free(monkeypatch, 8 * GIB)
    for system in ("Linux", "Windows"):
        hardware = probe(FakeNvml(), replace(LINUX, system=system), CUDA_BUILD)
        keep_out_of_ram(Place(hardware, torch.device("cuda", 0), torch.bfloat16, None, CONTEXT))
    assert limits == [0.75]
