"""What the configs of published block drafters say, and which of them are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from localspec.core.errors import ModelError
from localspec.formats.head_folder import head_kind
from localspec.forward.heads.block_files import read_block
from localspec.forward.heads.block_layout import EMBEDDING, BlockLayout, layout_of
from localspec.forward.heads.files import HeadSettings, TargetSizes
from tests.kit.random_block import config_for, write_random
from tests.kit.tiny import tiny_llama, with_cache

SIZES = TargetSizes(64, 64, 2)
LAYER = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "rope_theta": 1e4, "attention_bias": False, "tie_word_embeddings": False,
    "use_sliding_window": True, "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
DFLASH = {"target_layer_ids": [0, 1], "mask_token_id": 9}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 8}


def z_lab(nested: dict[str, Any], **top: Any) -> dict[str, Any]:
    architecture = {"architectures": ["DFlashDraftModel"], "num_target_layers": 2}
    return {**LAYER, **architecture, "dflash_config": {**DFLASH, **nested}, **top}


def speculators(kind: str, **top: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind, "speculators_version": "0.4.0", "block_size": 5,
        "transformer_layer_config": LAYER, "draft_vocab_size": 32, "mask_token_id": 9,
        "aux_hidden_state_layer_ids": [0, 1, 2], **top,
    }  # fmt: skip


def read(config: dict[str, Any], sizes: TargetSizes = SIZES) -> BlockLayout:
    return layout_of(HeadSettings(config, "block", Path("drafter")), sizes)


def test_a_block_is_as_long_as_the_config_says_on_top_or_nested() -> None:
    assert read(z_lab({}, block_size=6)).num_drafts == 5
    assert read(z_lab({"block_size": 4}, block_size=6)).num_drafts == 3, "the nested one counts"


def test_causality_follows_an_explicit_key_and_else_the_kind_of_the_layer() -> None:
    assert read(z_lab({"block_size": 4})).is_causal == (False, True)
    assert read(z_lab({"block_size": 4, "causal": False})).is_causal == (False, False)
    assert read(z_lab({"block_size": 4, "causal": True})).is_causal == (True, True)
    both = z_lab({"block_size": 4, "causal": True}, is_causal=False)
    assert read(both).is_causal == (False, False)
    assert read(speculators("dflash")).is_causal == (False, True)
    assert read(speculators("dflash", sliding_window_non_causal=True)).is_causal == (False, False)


def test_the_root_predicts_where_the_layout_samples_from_it() -> None:
    assert read(speculators("dflash")).num_drafts == 4
    assert read(speculators("dflash", sample_from_anchor=True)).num_drafts == 5
    assert read(speculators("dspark", markov_rank=4)).num_drafts == 5
    assert read(speculators("dspark", markov_rank=4, sample_from_anchor=False)).num_drafts == 4


def test_layers_are_counted_as_the_layout_counts_them() -> None:
    assert read(z_lab({"block_size": 4})).layers == (0, 1)
    assert read(speculators("dflash")).layers == (EMBEDDING, 0, 1)
    deepspec = config_for(with_cache(tiny_llama()))
    assert read(deepspec).layers == (EMBEDDING, 0)
    assert read(deepspec).num_drafts == 5
    assert read({**deepspec, "markov_rank": 0}).name == "DeepSpec (DFlash)"


def test_a_second_dflash_is_never_read_as_a_first() -> None:
    whole = z_lab({"block_size": 4, **SECOND})
    assert read(whole).name == "z-lab (DFlash2)"
    for key in SECOND:
        nested = {name: value for name, value in SECOND.items() if name != key}
        with pytest.raises(ModelError, match=f"of z-lab .DFlash2., does not say {key}"):
            read(z_lab({"block_size": 4, **nested}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (z_lab({}), "of the layout of z-lab, does not say block_size"),
        (z_lab({"block_size": 4, "gates": 2}), "its dflash_config says gates"),
        (z_lab({"block_size": 4}, gates=2), "gates, a setting that is not known"),
        (z_lab({"block_size": 4, "target_layer_ids": [0, 2]}), r"reads the layers \[0, 2\]"),
        (z_lab({"block_size": 4, "mask_token_id": 64}), "its mask token is 64"),
        (z_lab({"block_size": 1}), "leaves no draft"),
        (speculators("dspark", markov_head_type="lstm"), "markov_head_type is lstm"),
        (speculators("dflash", gates=2), "its config.json says gates"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_refused_by_its_key(
    config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read(config)


def test_a_drafter_of_another_target_is_refused_by_name_and_shape() -> None:
    named = {"verifier": {"name_or_path": "Big/Model-8B"}}
    with pytest.raises(ModelError, match="made for Big/Model-8B, 64 wide with 64 tokens"):
        read(speculators("dflash", speculators_config=named), TargetSizes(128, 64, 2))
    with pytest.raises(ModelError, match="2 layers; this target is 64 wide with 64 and 9"):
        read(z_lab({"block_size": 4}), TargetSizes(64, 64, 9))


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_folder_with_other_tensors_is_refused(tmp_path: Path, change: str) -> None:
    target = with_cache(tiny_llama())
    write_random(tmp_path, target)
    assert head_kind(tmp_path) == "block"
    tensors = load_file(tmp_path / "model.safetensors")
    if change == "missing":
        del tensors["markov_head.markov_w2.weight"]
    else:
        tensors["markov_head.gate_proj.weight"] = tensors["norm.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="markov_w2" if change == "missing" else "holds markov"):
        read_block(tmp_path, target)


def test_an_embedding_and_a_head_that_are_the_targets_are_not_held_twice(tmp_path: Path) -> None:
    target = with_cache(tiny_llama())
    write_random(tmp_path, target)
    borrowed = read_block(tmp_path, target).weight_bytes
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    held = read_block(tmp_path, target).weight_bytes
    assert held - borrowed == tensors["embed_tokens.weight"].nbytes
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] == 64
