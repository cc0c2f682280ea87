"""EAGLE heads from folders: published ones compute what their authors' code computes, written here
with transformers' own layer, and whatever does not fit the target is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from localspec.core.errors import ModelError
from localspec.formats.head_folder import head_kind
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle_files import read_eagle
from tests.kit.heads import change_config
from tests.kit.random_eagle import write_random
from tests.kit.tiny import HIDDEN_SIZE, VOCAB_SIZE, tiny_llama, with_cache

TEXT = [3, 1, 4, 1, 5, 9, 2, 6]
CAPACITY = 64
DRAFT_VOCAB = 20
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {  # it scales cos and sin as well
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
THIRD = CONFIG | {
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama", **CONFIG},
    "norm_before_residual": True,
    LAYER_IDS: [1, 2, 3],  # by what goes into them
}
DEEPSPEC = CONFIG | {  # the target's own config, changed
    "architectures": ["Qwen3Eagle3Model"],
    "head_dim": HIDDEN_SIZE // 4,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "ttt_length": 7,
}
IDS = torch.arange(DRAFT_VOCAB) * 3  # what the draft's tokens are called by the target


def any_target() -> Any:
    return with_cache(tiny_llama(num_layers=4), CAPACITY)


class Reference(torch.nn.Module):
    """The layer with transformers' parts, under the published names. num_read: layers that an
    EAGLE-3 reads."""

    def __init__(self, is_third: bool, num_read: int = 3, vocab_size: int = DRAFT_VOCAB) -> None:
        super().__init__()
        torch.manual_seed(5)
        config = LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "architectures"})
        config._attn_implementation = "eager"
        self.rotary = LlamaRotaryEmbedding(config)
        layer = torch.nn.Module()
        layer.self_attn = LlamaAttention(config, 0)
        layer.mlp = LlamaMLP(config)
        layer.post_attention_layernorm = LlamaRMSNorm(HIDDEN_SIZE, 1e-5)
        if is_third:
            wide = 2 * HIDDEN_SIZE
            for side in ("q_proj", "k_proj", "v_proj"):
                size = getattr(layer.self_attn, side).out_features
                setattr(layer.self_attn, side, torch.nn.Linear(wide, size, bias=False))
            layer.hidden_norm = LlamaRMSNorm(HIDDEN_SIZE, 1e-5)
            layer.input_layernorm = LlamaRMSNorm(HIDDEN_SIZE, 1e-5)
            self.midlayer = layer
            self.fc = torch.nn.Linear(num_read * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
            self.norm = LlamaRMSNorm(HIDDEN_SIZE, 1e-5)
            self.lm_head = torch.nn.Linear(HIDDEN_SIZE, vocab_size, bias=False)
        else:
            self.layers = torch.nn.ModuleList([layer])
            self.fc = torch.nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE)
        self.disturb()

    @torch.no_grad()
    def disturb(self) -> None:
        for weight in self.parameters():
            weight.add_(0.1 * torch.randn_like(weight))

    def run(self, layer: Any, mixed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """[n, .] -> [n, d]."""
        size = len(mixed)
        mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
        turned = self.rotary(mixed[None], torch.arange(size)[None])
        stream = stream + layer.self_attn(mixed[None], turned, mask)[0][0]
        return stream + layer.mlp(layer.post_attention_layernorm(stream))

    def first(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        rows = self.fc(torch.cat((embedded, features), -1))
        return self.run(self.layers[0], rows, rows)

    def third(
        self, embedded: torch.Tensor, features: torch.Tensor, is_normed: bool = False
    ) -> torch.Tensor:
        hidden, layer = self.fc(features), self.midlayer
        normed = layer.hidden_norm(hidden)
        mixed = torch.cat((layer.input_layernorm(embedded), normed), -1)
        return self.run(layer, mixed, normed if is_normed else hidden)


def publish(
    folder: Path, is_third: bool, reference: Reference | None = None, **changes: Any
) -> Reference:
    """changes: of the config, or of tensors (None leaves either out)."""
    reference = reference or Reference(is_third)
    tensors: dict[str, Any] = dict(reference.state_dict())
    if is_third:
        known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        known[IDS] = True
        tensors |= {"d2t": IDS - torch.arange(DRAFT_VOCAB), "t2d": known}
    config = dict(THIRD if is_third else CONFIG)
    for name, value in changes.items():
        (tensors if isinstance(value, torch.Tensor) else config)[name] = value
    config = {k: v for k, v in config.items() if v is not None}
    tensors |= {name: None for name, value in changes.items() if value is None}
    held = {k: t.contiguous() for k, t in tensors.items() if t is not None}
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return reference


def states(target: Any, layers: tuple[int, ...]) -> torch.Tensor:
    """[n, layers * d] of TEXT but its last token."""
    features = target.follow(layers)
    target.cache.rollback(0)
    target.forward(TEXT[:-1])
    return torch.cat([features.rows(layer, 0, len(TEXT) - 1) for layer in layers], -1).clone()


def test_the_layers_that_a_head_reads_are_named_inside_or_beside_its_own_settings(
    tmp_path: Path,
) -> None:
    publish(tmp_path, True, eagle_config={}, eagle_aux_hidden_state_layer_ids=[2, 0, 1])
    assert read_eagle(tmp_path, any_target()).layers == (2, 0, 1)


@pytest.mark.parametrize("is_third", [False, True])
@torch.no_grad()
def test_a_published_head_says_what_its_authors_code_says(tmp_path: Path, is_third: bool) -> None:
    target = any_target()
    reference = publish(tmp_path, is_third)
    head = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    assert head.layers == ((0, 1, 2) if is_third else (LAST,))
    rows, embedded = states(target, head.layers), target.embed(TEXT[1:])
    head.reuse(TEXT)
    output = head.read(TEXT, target.follow(head.layers)).forward()
    if is_third:
        wanted = reference.third(embedded, rows)[-1:]
        said = reference.lm_head(reference.norm(wanted))
        logits = torch.full((1, VOCAB_SIZE), float("-inf"))
        logits[:, IDS] = said
    else:
        wanted = reference.first(embedded, rows)[-1:]
        logits = target.head(wanted)
    assert torch.allclose(output, wanted, atol=1e-4)
    assert torch.allclose(head.logits(output).forward(), logits, atol=1e-3)


@torch.no_grad()
def test_a_head_in_the_layout_of_speculators_says_what_its_authors_code_says(
    tmp_path: Path,
) -> None:
    """Its config nests the layer's, and its stream carries the normalised state."""
    target = any_target()
    reference = publish(tmp_path, True)
    own = {"draft_vocab_size": DRAFT_VOCAB, "architectures": ["Eagle3Speculator"]}
    (tmp_path / "config.json").write_text(json.dumps(NESTED | own), encoding="utf-8")
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert head_kind(tmp_path) == "eagle"
    head = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    assert head.layers == (0, 1, 2)
    rows, embedded = states(target, head.layers), target.embed(TEXT[1:])
    head.reuse(TEXT)
    output = head.read(TEXT, target.follow(head.layers)).forward()
    wanted = reference.third(embedded, rows, is_normed=True)[-1:]
    assert torch.allclose(output, wanted, atol=1e-4)
    plain = reference.third(embedded, rows)[-1:]
    assert not torch.allclose(output, plain, atol=1e-2)


def test_a_head_in_several_files_is_read_like_one_in_one(tmp_path: Path) -> None:
    publish(tmp_path, True)
    target, file = any_target(), tmp_path / "model.safetensors"
    wanted = read_eagle(tmp_path, target)
    tensors = load_file(file)
    file.unlink()
    places = {name: f"model-{1 + number % 2}.safetensors" for number, name in enumerate(tensors)}
    for part in set(places.values()):
        save_file({n: t for n, t in tensors.items() if places[n] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    found = read_eagle(tmp_path, target)
    assert found.weight_bytes == wanted.weight_bytes
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"missing from .*, first model-2.safetensors"):
        read_eagle(tmp_path, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "is_read"),
    [
        ({"sliding_window": 32}, False),
        ({"sliding_window": CAPACITY}, True),
        ({"sliding_window": 32, "use_sliding_window": False}, True),
        ({"sliding_window": 32, "layer_types": ["full_attention"]}, True),
        ({"sliding_window": 32, "layer_types": ["sliding_attention"]}, False),
    ],
)
def test_a_head_that_sees_less_than_the_context_is_refused(
    settings: dict[str, Any], is_read: bool, tmp_path: Path
) -> None:
    publish(tmp_path, True, **settings)
    if is_read:
        read_eagle(tmp_path, any_target())
        return
    with pytest.raises(ModelError, match=r"sliding window of 32 tokens.*--context 32"):
        read_eagle(tmp_path, any_target())


def of_deepspec() -> Reference:
    """Queries and keys of each head are normalised, two layers are read, all tokens are known."""
    made = Reference(True, num_read=2, vocab_size=VOCAB_SIZE)
    known = {name: value for name, value in DEEPSPEC.items() if name != "architectures"}
    config = Qwen3Config(**known, attn_implementation="eager")
    attention, plain = Qwen3Attention(config, 0), made.midlayer.self_attn
    for side in ("q_proj", "k_proj", "v_proj", "o_proj"):
        setattr(attention, side, getattr(plain, side))
    made.midlayer.self_attn = attention
    made.disturb()
    return made


@torch.no_grad()
def test_a_head_of_deepspec_says_what_its_authors_code_says(tmp_path: Path) -> None:
    target, reference = any_target(), of_deepspec()
    less = dict.fromkeys(("d2t", "t2d", "draft_vocab_size", "eagle_config"))
    publish(tmp_path, True, reference, **DEEPSPEC, **less)
    assert head_kind(tmp_path) == "eagle"
    head = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    assert head.layers == (0, 2)
    rows, embedded = states(target, head.layers), target.embed(TEXT[1:])
    head.reuse(TEXT)
    output = head.read(TEXT, target.follow(head.layers)).forward()
    wanted = reference.third(embedded, rows)[-1:]
    assert torch.allclose(output, wanted, atol=1e-4)
    logits = reference.lm_head(reference.norm(wanted))
    assert torch.allclose(head.logits(output).forward(), logits, atol=1e-3)


@pytest.mark.parametrize("reads_normed", ["fc_norm", "norm_before_fc"])
@torch.no_grad()
def test_a_head_of_eagle_3_1_normalises_what_it_reads_and_what_it_says(
    tmp_path: Path, reads_normed: str
) -> None:
    target, reference = any_target(), Reference(True)
    of_each = torch.nn.ModuleList([LlamaRMSNorm(HIDDEN_SIZE, 1e-5) for _ in range(3)])
    of_all = LlamaRMSNorm(3 * HIDDEN_SIZE, 1e-5)
    if reads_normed == "fc_norm":
        reference.fc_norm = of_each
    else:
        reference.input_norm = of_all
    reference.disturb()
    publish(tmp_path, True, reference, norm_output=True, **{reads_normed: True})
    head = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    rows, embedded = states(target, head.layers), target.embed(TEXT[1:])
    head.reuse(TEXT)
    output = head.read(TEXT, target.follow(head.layers)).forward()
    chunks = zip(of_each, rows.chunk(3, -1), strict=True)
    each = torch.cat([norm(chunk) for norm, chunk in chunks], -1)
    read = each if reads_normed == "fc_norm" else of_all(rows)
    wanted = reference.norm(reference.third(embedded, read)[-1:])
    assert torch.allclose(output, wanted, atol=1e-4)
    assert torch.allclose(
        head.logits(output).forward()[:, IDS], reference.lm_head(wanted), atol=1e-3
    )


@torch.no_grad()
def test_biases_of_an_eagle_1_are_used(tmp_path: Path) -> None:
    target = any_target()
    publish(tmp_path, False)
    plain = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    bias = {"layers.0.self_attn.v_proj.bias": torch.ones(2 * HIDDEN_SIZE // 4)}
    publish(tmp_path, False, **bias)
    biased = AutoregressiveHead(read_eagle(tmp_path, target), CAPACITY)
    states(target, (LAST,))
    for head in (plain, biased):
        head.reuse(TEXT)
    features = target.follow((LAST,))
    own, other = (each.read(TEXT, features).forward() for each in (plain, biased))
    assert not torch.allclose(own, other, atol=1e-2)


def test_an_embedding_that_is_the_targets_takes_no_memory(tmp_path: Path) -> None:
    target = any_target()
    publish(tmp_path, False)
    without = read_eagle(tmp_path, target).weight_bytes
    table = target.embed(range(VOCAB_SIZE)).clone()
    publish(tmp_path, False, **{"embed_tokens.weight": table})
    assert read_eagle(tmp_path, target).weight_bytes == without
    publish(tmp_path, False, **{"embed_tokens.weight": table + 1.0})
    own = read_eagle(tmp_path, target)
    assert own.weight_bytes == without + table.numel() * 4
    assert torch.equal(own.embed([2]), table[2:3] + 1.0)


@torch.no_grad()
def test_an_output_head_that_is_the_targets_takes_no_memory(tmp_path: Path) -> None:
    target, sizes = any_target(), list[int]()
    same = dict.fromkeys(("d2t", "t2d", "draft_vocab_size", "eagle_config"))
    for change in (0.0, 0.01):
        reference = of_deepspec()
        reference.lm_head.weight.data = target.weights.head.dense().weight.detach() + change
        publish(tmp_path, True, reference, **DEEPSPEC, **same)
        head = read_eagle(tmp_path, target)
        sizes.append(head.weight_bytes)
        rows = target.embed([3, 1])
        assert torch.allclose(head.output(rows), reference.lm_head(rows), atol=1e-3)
    assert sizes[1] - sizes[0] == 4 * VOCAB_SIZE * HIDDEN_SIZE


def test_without_names_the_authors_choice_of_layers_is_read(tmp_path: Path) -> None:
    """What goes into blocks 2, n / 2 and n - 3 is what comes out of the ones before."""
    target = with_cache(tiny_llama(num_layers=8), CAPACITY)
    publish(tmp_path, True, eagle_config={})
    assert read_eagle(tmp_path, target).layers == (1, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_third", "changes", "said"),
    [
        (False, {"hidden_size": 128}, "made for a target 128 wide"),
        (False, {"vocab_size": 32000}, "with 32000 tokens; this one is 64 wide with 64"),
        (False, {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        (False, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (False, {"intermediate_size": "many"}, "intermediate_size is 'many'"),
        (False, {"num_key_value_heads": 3}, "do not divide"),
        (False, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotation is dynamic"),
        (False, {"rope_scaling": 5}, "describes no rotation"),
        (False, {"max_position_embeddings": "many"}, "describes no rotation"),
        (False, {"rms_norm_eps": -1.0}, "rms_norm_eps is -1"),
        (False, {"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        (False, {"fc.weight": None}, "lacks fc.weight"),
        (False, {"layers.0.input_layernorm.weight": torch.ones(64)}, "input_layernorm.weight"),
        (False, {"fc.bias": torch.ones(64, dtype=torch.int8)}, "fc.bias is int8"),
        (False, {"norm_before_residual": True}, "norm_before_residual is True"),
        (True, {"num_target_layers": 36}, "made for a target of 36 layers; this one has 4"),
        (True, {"fc_norm.1.weight": torch.ones(HIDDEN_SIZE)}, "lacks fc_norm.0.weight"),
        (True, {"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "lacks self_attn.k_norm"),
        (True, NESTED | {"transformer_layer_config": 5}, "describes no layer"),
        (True, NESTED | {LAYER_IDS: [0, 1, 2]}, r"reads the layers \[-1, 0, 1\]"),
        (True, {"d2t": torch.full((DRAFT_VOCAB,), 60)}, "does not name 20 different tokens"),
        (True, {"d2t": -torch.arange(DRAFT_VOCAB)}, "does not name 20 different tokens"),
        (True, {"d2t": torch.zeros(DRAFT_VOCAB)}, "not int64"),
        (True, {"d2t": None, "t2d": None}, "without a d2t to tell which"),
        (True, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "has 4 layers"),
    ],
)
def test_a_published_head_that_does_not_fit_is_refused(
    tmp_path: Path, is_third: bool, changes: dict[str, Any], said: str
) -> None:
    publish(tmp_path, is_third, **changes)
    with pytest.raises(ModelError, match=said):
        read_eagle(tmp_path, any_target())


def test_pickle_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    publish(tmp_path, False)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickle .*weights_only=True.*'model.safetensors'"):
        read_eagle(tmp_path, any_target())


def test_a_damaged_config_is_refused(tmp_path: Path) -> None:
    publish(tmp_path, False)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_eagle(tmp_path, any_target())


# -- our own format -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layers": [0, 7]}, r"reads the layers \[0, 7\]"),
        ({"layers": []}, "reads the layers"),
        ({"hidden_size": 32}, "rows are 32 wide"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": True}, "num_heads is True"),
        ({"rope_base": "10k"}, "rope_base is '10k'"),
        ({"rope_base": True}, "rope_base is True"),
        ({"rope_base": 10**400}, "rope_base is 1000"),
        ({"num_kv_heads": 3}, "do not divide"),
        ({"speed": 3}, "setting speed is not known"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, values: dict[str, object], said: str
) -> None:
    target = with_cache(tiny_llama(), CAPACITY)
    write_random(tmp_path, target)
    change_config(tmp_path, "settings", **values)
    with pytest.raises(ModelError, match=said):
        read_eagle(tmp_path, target)
