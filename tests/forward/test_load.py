"""A checked folder becomes a model that answers as its weights say, or a ModelError in words."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from localspec.core.errors import ModelError
from localspec.formats.folder_files import SINGLE
from localspec.formats.native import KNOWN_AS
from localspec.forward import load as loading
from localspec.forward import row_attention
from localspec.forward.by_transformers import load_module, opened_module
from localspec.forward.cache import KEY_BLOCK
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.forward.model import CausalLM
from localspec.forward.row_check import has_invariant_rows
from localspec.machine.folder_shapes import shape_from_folder
from localspec.weights import dense
from localspec.weights.dense import PackedLinear
from localspec.weights.int4 import Int4Linear
from localspec.weights.library import bitsandbytes
from localspec.weights.nf4 import Nf4Linear
from localspec.weights.precision import Bits
from tests.kit.damage import in_shards, own_code, truncated_file, with_config
from tests.kit.decoders import layers_of
from tests.kit.tiny import CPU, NEEDS_BF16, tiny_llama, tiny_qwen


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "good"
    folder.mkdir()
    module = tiny_llama()
    module.config.save_pretrained(str(folder))
    tensors = {name: t.detach().clone() for name, t in module.state_dict().items()}
    save_file(tensors, str(folder / SINGLE), metadata={"format": "pt"})
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "damaged"
    shutil.copytree(good, copied)
    return copied


def load(folder: Path) -> Any:
    return load_model(folder, torch.float32, CPU, 32).model


def test_a_good_folder_loads_the_very_weights(good: Path) -> None:
    module = load_module(good, torch.float32, CPU)
    wanted, found = tiny_llama().state_dict(), module.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


def test_shards_load_like_one_file(folder: Path) -> None:
    in_shards(folder)
    tokens = [3, 1, 4, 1, 5]
    expected = tiny_llama()(input_ids=torch.tensor([tokens])).logits[0]
    assert torch.allclose(load(folder).forward(tokens), expected, atol=1e-5)


def test_tied_head_is_not_missing(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    module = Qwen2ForCausalLM(config)
    module.config.save_pretrained(str(tmp_path))
    tensors = {
        n: t.detach().clone() for n, t in module.state_dict().items() if n != "lm_head.weight"
    }
    save_file(tensors, str(tmp_path / SINGLE), metadata={"format": "pt"})
    assert load(tmp_path).vocab_size == 40


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(str(folder / SINGLE))
    change(tensors)
    save_file(tensors, str(folder / SINGLE), metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore")  # transformers tells of the head as well
@pytest.mark.parametrize("is_other", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, 4)]
)
def test_the_head_in_the_files_is_used_whatever_the_config_says(
    is_other: bool, dtype: torch.dtype, bits: Bits | None, tmp_path: Path
) -> None:
    """Some programs train a head apart and leave the config of the model that they began with."""
    module = llama_of(tmp_path, 64, 128, 1)
    tensors = load_file(str(module / SINGLE))
    if not is_other:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, str(tmp_path / SINGLE), metadata={"format": "pt"})
    with_config(tmp_path, tie_word_embeddings=True)
    model = load_model(tmp_path, dtype, CPU, 32, bits=bits).model
    assert isinstance(model, Decoder)
    wanted = tensors["lm_head.weight"].to(model.weights.embedding.dtype)
    rows = torch.eye(64, dtype=wanted.dtype)
    assert torch.allclose(model.head(rows), wanted.T.float(), atol=1e-2)
    assert shape_from_folder(tmp_path).is_tied is not is_other


def test_a_tensor_that_the_model_would_miss_is_refused(folder: Path) -> None:
    """A bias of zeros, as programs that quantise write it, changes nothing."""
    name = "model.layers.1.self_attn.q_proj.bias"
    rewritten(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert load_model(folder, torch.float32, CPU, 32).unread is None
    rewritten(folder, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(ModelError, match=r"holds 1 tensor that a llama model.*layers.1.*q_proj"):
        load(folder)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_tensor_that_nothing_reads_is_told(bits: Bits | None, folder: Path) -> None:
    more = {"score.weight": torch.ones(2, 64), "model.mtp_layers.0.norm.weight": torch.ones(64)}
    rewritten(folder, lambda tensors: tensors.update(more))
    said = load_model(folder, torch.float32, CPU, 32, bits=bits).unread
    assert said is not None and "1 tensor " in said and "score.weight" in said


def truncated(folder: Path) -> None:
    truncated_file(folder / SINGLE)


def tensor_missing(folder: Path) -> None:
    tensors = load_file(str(folder / SINGLE))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, str(folder / SINGLE), metadata={"format": "pt"})


def layer_missing(folder: Path) -> None:
    with_config(folder, num_hidden_layers=3)


def wrong_shapes(folder: Path) -> None:
    with_config(folder, hidden_size=128)


def unknown_family(folder: Path) -> None:
    with_config(folder, model_type="no-such-family")


def wrong_type_in_config(folder: Path) -> None:
    with_config(folder, hidden_size="big")


def negative_layers(folder: Path) -> None:
    with_config(folder, num_hidden_layers=-1)


def unknown_activation(folder: Path) -> None:
    with_config(folder, hidden_act="no-such-function")


FAULTS: tuple[tuple[Callable[[Path], None], str], ...] = (
    (truncated, SINGLE),
    (tensor_missing, "up_proj"),
    (layer_missing, "layers.2"),
    (wrong_shapes, "another shape"),
    (own_code, "code of its own"),
    (unknown_family, "damaged"),
    (wrong_type_in_config, "damaged"),
    (negative_layers, "-1 layers"),
    (unknown_activation, "no-such-function"),
)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore")  # transformers warns about damaged folders in its own ways
@pytest.mark.parametrize(("fault", "named"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_damaged_folder_is_a_model_error_that_names_it(
    fault: Callable[[Path], None], named: str, folder: Path
) -> None:
    fault(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert named in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(KNOWN_AS.keys() - {"mimo"}))  # mimo: test_mtp
def test_a_family_that_is_known_by_its_own_name_is_opened_without_the_code_it_brings(
    family: str, tmp_path: Path
) -> None:
    """Phi-4-mini names code of its own, and is what transformers knows as phi3."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32,
             "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "head_dim": 8,
             "max_position_embeddings": 64, "num_local_experts": 2, "moe_num_experts": 2,
             "moe_k": 1, "moe_intermediate_size": 8}  # fmt: skip
    known = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{n: v for n, v in sizes.items() if n in known})
    module: Any = AutoModelForCausalLM.from_config(config).eval()
    module.save_pretrained(str(tmp_path))
    ids = torch.arange(5)
    wanted = module(ids[None]).logits[0]  # [5, V]
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    with_config(tmp_path, auto_map={"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.Evil"})
    model = load(tmp_path)
    assert torch.allclose(model.forward(ids.tolist()), wanted, atol=1e-5)


def test_a_family_of_another_shape_runs_on_transformers(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=4)).save_pretrained(
        tmp_path
    )
    opened = load_model(tmp_path, torch.float32, CPU, 32)
    assert isinstance(opened.model, CausalLM)
    assert opened.notice is not None and "learnt positions" in opened.notice


def test_a_model_that_is_known_runs_natively(good: Path) -> None:
    opened = load_model(good, torch.float32, CPU, 32)
    assert isinstance(opened.model, Decoder) and opened.notice is None
    assert opened.has_invariant_rows


@pytest.mark.parametrize("first_other", [5, 33, 65, 500])
def test_a_kernel_that_changes_with_the_number_of_rows_is_noticed_at_load(
    first_other: int, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As oneDNN's do on a processor with AMX from 33 rows on."""
    product = PackedLinear.__call__

    def rounds_otherwise(layer: Any, rows: torch.Tensor) -> torch.Tensor:
        result = product(layer, rows)
        return result * (1.0 + 1e-6) if rows.shape[0] >= first_other else result

    monkeypatch.setattr(dense, "_suits_fp16", lambda weight: False)
    assert load_model(good, torch.float32, CPU, 1024).has_invariant_rows
    monkeypatch.setattr(PackedLinear, "__call__", rounds_otherwise)
    assert not load_model(good, torch.float32, CPU, 1024).has_invariant_rows


def rounds_many_rows_otherwise(rows: torch.Tensor, keys: torch.Tensor) -> bool:
    return rows.shape[2] > 32


def rounds_otherwise_behind_a_block(rows: torch.Tensor, keys: torch.Tensor) -> bool:
    return rows.shape[2] > 16 and keys.shape[2] > KEY_BLOCK


@pytest.mark.parametrize("rounds_otherwise", [rounds_many_rows_otherwise,
                                              rounds_otherwise_behind_a_block])  # fmt: skip
def test_attention_that_changes_with_the_number_of_rows_is_noticed_at_load(
    rounds_otherwise: Callable[..., bool], good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = row_attention.fused_attention

    def fused(rows: torch.Tensor, keys: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        result = kernel(rows, keys, *inputs)
        return result * (1.0 + 1e-6) if rounds_otherwise(rows, keys) else result

    monkeypatch.setattr(row_attention, "fused_attention", fused)
    monkeypatch.setattr(row_attention, "tile_of", lambda *_: row_attention.TILES[0])
    assert not load_model(good, torch.float32, CPU, 1024).has_invariant_rows


def test_a_tree_whose_paths_are_no_chains_is_noticed_at_load(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_attention, "leaf_paths", lambda parents: [tuple(range(len(parents)))])
    assert not load_model(good, torch.float32, CPU, 1024).has_invariant_rows


def test_blocks_of_other_kernels_are_checked_as_well(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose last block alone has such a kernel."""
    model = load_model(good, torch.float32, CPU, 64).model
    assert isinstance(model, Decoder)
    assert has_invariant_rows(model)
    *before, last = model.weights.blocks
    changed = last.with_linears(_RoundsOtherwise)
    weights = replace(model.weights, blocks=(*before, changed))
    assert not has_invariant_rows(Decoder(weights, model.cache))


class _RoundsOtherwise:
    """A linear layer that gives more than 32 rows other bits."""

    has_invariant_rows = True

    def __init__(self, layer: Any) -> None:
        self._layer, self.weight_bytes = layer, layer.weight_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._layer(rows)
        return result * (1.0 + 1e-6) if rows.shape[0] > 32 else result

    def add_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(rows)


@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
def test_4_bits_without_a_kernel_for_nf4_are_groups(
    has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes would unpack every weight at every step."""
    monkeypatch.setattr(bitsandbytes().functional, "has_avx512bf16", lambda: False)
    module = tiny_qwen("qwen2") if has_bias else tiny_llama()
    for name, tensor in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(tensor)
    module.save_pretrained(str(tmp_path), max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    opened = load_model(tmp_path, torch.float32, CPU, 32, bits=4)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows
    assert opened.repacking_error is None, "the files hold no 4-bit weights"
    assert all(isinstance(each, Int4Linear) for each in layers_of(opened.model))
    wanted = load(tmp_path).forward([3, 1, 4, 1, 5])
    off = float((opened.model.forward([3, 1, 4, 1, 5]) - wanted).norm() / wanted.norm())
    assert 0.0 < off < 0.3


def llama_of(folder: Path, hidden_size: int, ffn_size: int, num_layers: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = LlamaConfig(vocab_size=263, hidden_size=hidden_size, num_key_value_heads=2,
                              intermediate_size=ffn_size, num_hidden_layers=num_layers,
                              num_attention_heads=4)  # fmt: skip
    module: Any = LlamaForCausalLM(config)
    for weight in (each for each in module.parameters() if each.ndim == 2):
        nn.init.normal_(weight, std=1.2 * weight.shape[1] ** -0.5)
    module.save_pretrained(str(folder))
    return folder


@NEEDS_BF16
def test_in_4_bits_layers_that_the_kernel_cannot_take_stay_whole(tmp_path: Path) -> None:
    """Mamba's input in Granite 4; bitsandbytes' own forward fails at them."""
    folder = llama_of(tmp_path, 64, 100, 2)
    opened = load_model(folder, torch.bfloat16, CPU, 32, bits=4)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows
    block = opened.model.weights.blocks[0]
    assert isinstance(block.output, Nf4Linear) and block.linears[-1].dense() is not None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_8_bits_rows_have_the_same_bits_beside_others(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """bitsandbytes' own layer rounds rows by what all of them hold."""
    opened = load_model(llama_of(tmp_path, 256, 512, 4), dtype, CPU, 32, bits=8)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows


def test_a_family_without_a_fast_attention_is_quantised_too(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    module: Any = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=32, pad_token_id=None))
    module.save_pretrained(str(tmp_path))
    assert load_model(tmp_path, torch.float32, CPU, 32, bits=4).model.vocab_size == 64


def test_the_fastest_kernels_promise_no_bits(good: Path) -> None:
    opened = load_model(good, torch.float32, CPU, 32, is_fastest=True)
    assert isinstance(opened.model, Decoder) and not opened.has_invariant_rows


def test_an_attention_of_its_own_is_named(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    BloomForCausalLM(
        BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32)
    ).save_pretrained(str(tmp_path))
    with pytest.raises(ModelError, match=r"bloom.*attention of its own"):
        load(tmp_path)


def test_weights_of_two_values_are_loaded(tmp_path: Path) -> None:
    """Models of 1 bit are published so: nothing is near 0."""
    module = tiny_llama()
    with torch.no_grad():
        for layer in (each for each in module.modules() if type(each) is nn.Linear):
            layer.weight.copy_(layer.weight.sign() * 0.02)
    module.half().save_pretrained(str(tmp_path))
    ids = torch.arange(5)
    wanted = module.float()(input_ids=ids[None]).logits[0]
    assert torch.allclose(load(tmp_path).forward(ids.tolist()), wanted, atol=1e-5)


def test_a_model_that_continues_no_text_is_named(tmp_path: Path) -> None:
    from transformers import T5Config

    config: Any = T5Config(vocab_size=32, d_model=16, num_layers=1, num_heads=2)
    config.save_pretrained(str(tmp_path))
    save_file({"shared.weight": torch.zeros(32, 16)}, str(tmp_path / SINGLE))
    with pytest.raises(ModelError, match="t5 does not continue a text"):
        load(tmp_path)


def on_hooked(folder: Path, monkeypatch: pytest.MonkeyPatch, hook: Any) -> Any:
    """What loading gives of a family that is not native, whose attention is run through `hook`."""
    from transformers import HunYuanDenseV1Config, HunYuanDenseV1ForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16}
    sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    made: Any = HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**sizes, initializer_range=1.0))
    made.save_pretrained(str(folder))

    def hooked(*asked: Any) -> Any:
        module, unread = opened_module(*asked)
        for layer in module.model.layers:
            layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        return module, unread

    monkeypatch.setattr(loading, "opened_module", hooked)
    return load(folder)


def test_an_attention_that_takes_no_mask_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that it checks would be judged by tokens that come after them."""

    def without(_: Any, given: Any, named: dict[str, Any]) -> Any:
        return given, {**named, "attention_mask": None}

    assert isinstance(on_hooked(tmp_path / "whole", monkeypatch, lambda *_: None), CausalLM)
    with pytest.raises(ModelError, match=r"hunyuan.*cannot check several tokens at once"):
        on_hooked(tmp_path / "maskless", monkeypatch, without)


def test_a_forward_that_fails_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("no attribute x")

    with pytest.raises(ModelError, match=r"transformers cannot run it: no attribute x"):
        on_hooked(tmp_path / "failing", monkeypatch, fail)


def test_falcon_has_one_head_of_keys(tmp_path: Path) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    made: Any = FalconForCausalLM(
        FalconConfig(vocab_size=32, hidden_size=16, num_attention_heads=4, num_hidden_layers=1)
    )
    made.save_pretrained(str(tmp_path))
    assert load(tmp_path).cache.shape.num_kv_heads == 1
    assert shape_from_folder(tmp_path).num_kv_heads == 1


@pytest.mark.slow
def test_a_tower_for_images_is_not_kept(tmp_path: Path) -> None:
    """The text model answers as it does beside the tower."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    whole = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    ).eval()
    whole.save_pretrained(str(tmp_path))
    kept = load_module(tmp_path, torch.float32, CPU)
    towers = ("vision_tower", "multi_modal_projector")
    assert not any(part in name for name in kept.state_dict() for part in towers)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(kept(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_the_text_part_of_a_model_for_images_runs_natively(tmp_path: Path) -> None:
    """Mistral Small and Ministral 3 are published so."""
    from transformers import AutoConfig, Mistral3ForConditionalGeneration

    text = {"model_type": "ministral3", "vocab_size": 32, "hidden_size": 16, "head_dim": 8,
            "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}  # fmt: skip
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=vision)
    whole: Any = Mistral3ForConditionalGeneration(config).eval()
    whole.save_pretrained(str(tmp_path))
    model = load(tmp_path)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        wanted = whole(input_ids=torch.arange(6)[None]).logits[0]
    assert torch.allclose(model.forward(range(6)), wanted, atol=1e-5)
    shape = shape_from_folder(tmp_path)
    kept = sum(each.numel() for each in whole.model.language_model.parameters())  # tied
    assert shape.weight_bytes("fp32") == 4 * kept and not shape.not_native
