"""A larger model says what the small one says, to fp32 rounding, for every family and shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from localspec.core.errors import ConfigError, ModelError
from localspec.machine.config_shapes import shape_from_config
from localspec.machine.shapes import ModelShape
from tools.inflate.enlarge import Axis, Enlargement

CONFIGS = {
    "llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ROUNDING = 1e-5  # of the logits' spread, in fp32; the planted faults below are 100 times larger
TOKENS = torch.arange(60).reshape(1, 60) * 7 % 96


def trained(family: str = "llama", **settings: Any) -> Any:
    """A small fp32 model with sharp attention, uneven norms and, where it has any, biases."""
    torch.manual_seed(3)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if family == "mistral":
        settings["sliding_window"] = None
    made = {**SMALL, "rope_parameters": rope, **settings}
    module = AutoModelForCausalLM.from_config(CONFIGS[family](**made), attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.3)
            else:
                weight.mul_(8.0)
    return module.float().eval()


def shape_of(module: Any) -> ModelShape:
    return shape_from_config(module.config.to_dict(), "small")


def enlarged(
    module: Any, seed: int = 0, final_noise: float = 0.0, **widths: int
) -> tuple[Any, Enlargement]:
    source = shape_of(module)
    plan = Enlargement(source, replace(source, **widths), seed, final_noise)
    weights = module.state_dict()
    full = module.config.to_dict()
    config = type(module.config)(**plan.config(full, full))
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
    found = dict(plan.tensors(weights.__getitem__, frozenset(weights)))
    missing, unexpected = made.load_state_dict(found, strict=False)
    assert unexpected == [] and set(missing) <= {"lm_head.weight"}
    assert ("lm_head.weight" in missing) == source.is_tied
    return made, plan


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(TOKENS).logits[0]
    return found


def error_of(module: Any, larger: Any) -> float:
    """The largest difference, as a share of the logits' spread."""
    wanted = logits(module)
    return float((logits(larger) - wanted).abs().max() / wanted.std())


WIDER = {"hidden_size": 128}
SHAPES = {
    "as it is": {},
    "wider by 4": WIDER,
    "wider by 2, so two copies": {"hidden_size": 64},
    "wider by 8, so two copies": {"hidden_size": 256},
    "wider by 5 halves": {"hidden_size": 80},
    "deeper": {"num_layers": 5},
    "more units": {"intermediate_size": 100},
    "more heads, same groups": {"num_heads": 8, "num_kv_heads": 4},
    "larger groups": {"hidden_size": 48, "num_heads": 12, "num_kv_heads": 3},
    "heads twice as wide": {"head_dim": 16},
    "heads four times as wide": {"head_dim": 32},
    "heads wider by a half": {"head_dim": 12},
    "all of it": {
        "hidden_size": 256, "num_layers": 5, "num_heads": 16, "num_kv_heads": 4, "head_dim": 16,
        "intermediate_size": 200,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "shape"),
    [*((each, "all of it") for each in CONFIGS), *(("qwen3", shape) for shape in [*SHAPES][:-1])],
)
def test_a_larger_model_says_the_same(family: str, shape: str) -> None:
    module = trained(family)
    larger, plan = enlarged(module, **SHAPES[shape])
    assert shape_of(larger) == plan.wanted
    assert error_of(module, larger) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=["tied", "biases", "a key head each", "one key head", "large epsilon", "linear", "llama3"],
)  # fmt: skip
def test_whatever_a_llama_may_have_is_kept(settings: dict[str, Any]) -> None:
    module = trained("llama", **settings)
    widths = {**SHAPES["all of it"], "num_heads": 16, "num_kv_heads": 4}
    larger, _ = enlarged(module, **widths)
    assert error_of(module, larger) < ROUNDING


def test_a_large_epsilon_is_kept_by_norms_on_heads_too() -> None:
    module = trained("qwen3", rms_norm_eps=1e-2)
    larger, _ = enlarged(module, **SHAPES["all of it"])
    assert error_of(module, larger) < ROUNDING


def test_a_tied_head_does_not_count_a_copied_residual_twice() -> None:
    module = trained("qwen3", tie_word_embeddings=True)
    larger, plan = enlarged(module, hidden_size=64)
    assert plan.copies == 2 and error_of(module, larger) < ROUNDING


def test_powers_of_two_leave_bf16_weights_as_they_are() -> None:
    """Whole logits, so the rounding of every weight counts: fp32 arithmetic over bf16 weights."""
    module = trained().bfloat16().float()
    for widths in ({"hidden_size": 512}, {"hidden_size": 256}, {**WIDER, "head_dim": 32}):
        larger, plan = enlarged(module, **widths)
        assert plan.is_exact
        assert error_of(module, larger.bfloat16().float()) < ROUNDING


def test_other_factors_are_called_rounded() -> None:
    _, plan = enlarged(trained(), **SHAPES["heads twice as wide"])
    assert not plan.is_exact and plan.factors["query"] == pytest.approx(2**0.5)


def test_what_was_added_holds_numbers_like_the_real_ones() -> None:
    module = trained()
    larger, plan = enlarged(module, **SHAPES["all of it"])
    extra = [i for i, (_, is_real) in enumerate(plan.layer_plan()) if not is_real]
    assert len(extra) == 3
    spread = float(module.state_dict()["model.layers.0.mlp.up_proj.weight"].std())
    weights = larger.state_dict()
    for i in range(5):
        values = weights[f"model.layers.{i}.self_attn.v_proj.weight"]
        assert values.count_nonzero() == values.numel()
        found = float(weights[f"model.layers.{i}.mlp.up_proj.weight"].std())
        assert found == pytest.approx(spread, rel=0.2)
    assert all(not weights[f"model.layers.{i}.mlp.down_proj.weight"].any() for i in extra)


def test_real_layers_are_spread_and_the_last_is_real() -> None:
    source = replace(shape_of(trained()), num_layers=3)
    plan = Enlargement(source, replace(source, num_layers=7), 0).layer_plan()
    assert [donor for donor, is_real in plan if is_real] == [0, 1, 2]
    assert [is_real for _, is_real in plan] == [False, True, False, True, False, False, True]


def test_the_same_seed_makes_the_same_weights() -> None:
    module = trained()
    first, again, other = (enlarged(module, seed, **WIDER)[0].state_dict() for seed in (1, 1, 2))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])


def test_noise_lowers_agreement_and_more_noise_lowers_it_more() -> None:
    module = trained()
    best = logits(module).argmax(-1)
    agreed = [
        float((logits(enlarged(module, final_noise=noise, **WIDER)[0]).argmax(-1) == best)
              .float().mean())
        for noise in (0.0, 0.2, 2.0)
    ]  # fmt: skip
    assert agreed[0] == 1.0 > agreed[1] > agreed[2]


@pytest.mark.parametrize(
    ("widths", "named"),
    [
        ({"hidden_size": 16}, "hidden width of 32"),
        ({"num_layers": 1}, "number of layers"),
        ({"num_kv_heads": 1}, "key heads"),
        ({"num_heads": 4, "num_kv_heads": 4}, "for each key head"),
        ({"head_dim": 4}, "head size"),
        ({"intermediate_size": 39}, "feed-forward width of 40"),
    ],
)
def test_a_smaller_size_is_refused_by_name(widths: dict[str, int], named: str) -> None:
    source = shape_of(trained())
    with pytest.raises(ConfigError, match=named):
        Enlargement(source, replace(source, **widths), 0)


def test_a_mixture_of_experts_is_refused() -> None:
    source = replace(shape_of(trained()), family="qwen3_moe", num_experts=4)
    with pytest.raises(ModelError, match="dense models of these families"):
        Enlargement(source, source, 0)


def test_a_sliding_window_is_refused() -> None:
    source = shape_of(trained("mistral"))
    full = {**trained("mistral").config.to_dict(), "sliding_window": 16}
    with pytest.raises(ModelError, match="sliding window"):
        Enlargement(source, source, 0).config(full, full)


def test_positions_that_depend_on_the_head_size_are_refused_for_another_one() -> None:
    module = trained()
    source, full = shape_of(module), module.config.to_dict()
    full["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
    Enlargement(source, source, 0).config(full, full)
    with pytest.raises(ModelError, match="yarn"):
        Enlargement(source, replace(source, head_dim=16), 0).config(full, full)


AXIS = Enlargement._axis


def _without_clearing(self: Enlargement, kind: str) -> Axis:
    axis = AXIS(self, kind)
    return replace(axis, cleared=axis.cleared[:0])


def _side_by_side(self: Enlargement) -> torch.Tensor:
    return torch.arange(self.source.head_dim)


def _first_heads(self: Enlargement) -> torch.Tensor:
    return torch.arange(self.source.num_heads)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("head_growth", property(lambda self: 1.0)),
        ("dilution", property(lambda self: 1.0)),
        ("_axis", _without_clearing),
        ("_head_places", _side_by_side),
        ("_query_heads", _first_heads),
        ("copies", property(lambda self: 1)),
    ],
)
def test_a_planted_fault_changes_the_logits(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    """But for `copies`, which changes nothing but rounding: there the weights are not exact."""
    module = trained()
    monkeypatch.setattr(Enlargement, name, fault)
    larger, plan = enlarged(module, **SHAPES["all of it"])
    if name == "copies":
        assert plan.factors["norm"] == pytest.approx(8**-0.5)
    else:
        assert error_of(module, larger) > 1e-3
