"""Models with recurrent states decode plainly, and no text is read on from a state of another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.backend import Message, Request
from localspec.core import SamplingParams
from localspec.engine.engine import Engine
from localspec.errors import ModelError
from localspec.forward.model import kv_shape
from localspec.forward.recurrent import RecurrentLM
from localspec.forward.weights import load_model
from localspec.load import open_local_backend
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.planner import plan
from localspec.machine.plans import DraftCandidate, PlanRequest, Room
from localspec.options import LoadOptions
from tests.machine.folders import VOCAB_SIZE, save_model
from tests.tiny import CPU, GREEDY, Plans, play

PROMPT = (5, 9, 12, 5, 9, 30, 7)
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "num_hidden_layers": 4}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**MAMBA, "num_local_experts": 0, "num_experts_per_tok": 0,
                         "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1,
              "use_mamba_kernels": False, "mamba_d_state": 4},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8},
    "falcon_mamba": {"state_size": 4},
    "qwen3_5_text": LINEAR,
}  # fmt: skip


def module_of(family: str, **sizes: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **sizes})
    module: Any = AutoModelForCausalLM.from_config(config).eval()
    tables = (module.get_output_embeddings().weight, module.get_input_embeddings().weight)
    with torch.no_grad():  # peaked, so that a lost state changes the text
        for name, weight in module.named_parameters():
            if weight.ndim > 1 and "A_log" not in name:
                weight.mul_(30.0 if weight is tables[0] else 1.0 if weight is tables[1] else 8.0)
    return module


def greedy(module: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """Each token from the whole text before it, without a state."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hybrid_decodes_what_it_says_of_the_whole_text(family: str, tmp_path: Path) -> None:
    """A turn, another that goes on from it, an edit, and the first again."""
    module = module_of(family)
    module.save_pretrained(str(tmp_path))
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert isinstance(opened.model, RecurrentLM) and "cannot take back" in str(opened.notice)
    engine = Engine(opened.model, {})
    first = play(engine, PROMPT, Plans(("off", 0)), 6).tokens
    assert first == greedy(module, PROMPT, 6)
    for prompt in ((*first, 4, 8), (*PROMPT[:3], 40, *PROMPT[4:]), PROMPT):
        assert play(engine, prompt, Plans(("off", 0)), 4).tokens == greedy(module, prompt, 4)


def test_a_family_that_loses_its_state_between_pieces_is_read_token_by_token() -> None:
    families = ("falcon_mamba", "jamba", "lfm2", "granitemoehybrid")
    assert [RecurrentLM(module_of(each), 64).reads_pieces for each in families] == [
        False, False, True, True
    ]  # fmt: skip


def test_a_family_that_answers_otherwise_token_by_token_is_refused() -> None:
    module = module_of("lfm2")
    module.register_forward_hook(
        lambda _, __, output: setattr(output, "past_key_values", None)  # the state is lost
    )
    with pytest.raises(ModelError, match=r"token by token.*another family"):
        RecurrentLM(module, 64)


def test_only_what_goes_on_from_the_state_is_read_on() -> None:
    module, sizes = module_of("lfm2"), list[int]()
    model = RecurrentLM(module, 64)
    module.register_forward_pre_hook(
        lambda _, __, named: sizes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    engine = Engine(model, {})
    for prompt in (PROMPT, (*PROMPT, 3, 4), (8, *PROMPT, 2)):
        sequence = engine.start(prompt, GREEDY, 4, frozenset())
        engine.prefill(sequence, threading.Event())
    assert sizes == [6, 2, 8]


def test_a_plan_for_a_hybrid_is_plain_decoding_with_the_reason(tmp_path: Path) -> None:
    module_of("lfm2").save_pretrained(str(tmp_path))
    shape = shape_from_folder(tmp_path)
    small = DraftCandidate(replace(shape, num_layers=1))
    report = plan(PlanRequest(shape, Room("cpu", 2**33), drafts=(small,)))
    assert {each.drafter for each in report.plans} == {"off"}
    refused = {each.drafter: each.reason for each in report.refused}
    assert {"ngram", "draft_model"} <= refused.keys() and "cannot take back" in refused["ngram"]
    whole = replace(shape, is_recurrent=False, num_state_layers=0)
    of_whole = plan(PlanRequest(whole, Room("cpu", 2**33), drafts=(small,)))
    assert any("full attention would do" in each.reason for each in of_whole.refused)


def test_keys_and_values_are_counted_for_the_layers_that_have_them(tmp_path: Path) -> None:
    shapes = dict[str, int]()
    for family in ("granitemoehybrid", "jamba", "falcon_h1"):
        module_of(family).save_pretrained(str(tmp_path / family))
        shape = shape_from_folder(tmp_path / family)
        shapes[family] = shape.kv_bytes_per_token("fp32") // (2 * 4 * shape.kv_width)
    assert shapes == {"granitemoehybrid": 1, "jamba": 1, "falcon_h1": 2}


def test_what_cannot_go_back_drafts_for_none_and_is_drafted_for_by_none() -> None:
    from localspec.build_drafters import build_drafters
    from localspec.drafters.parts import Parts

    module = module_of("lfm2")
    with pytest.raises(ModelError, match="cannot take back a rejected draft"):
        kv_shape(module.config, 64)  # asked before a draft is loaded
    target = RecurrentLM(module, 64)
    drafters, statuses = build_drafters(Parts(target), lambda said: None)
    assert drafters == {} and all("cannot take back" in each.reason for each in statuses)
    sampled = SamplingParams(0.7, seed=3)
    replies = [play(Engine(target, {}), PROMPT, Plans(("off", 0)), 8, sampled) for _ in "ab"]
    assert replies[0].tokens == replies[1].tokens


def test_a_hybrid_is_loaded_and_answers(tmp_path: Path) -> None:
    module = module_of("lfm2", vocab_size=VOCAB_SIZE)
    folder = save_model(tmp_path / "hybrid", module)
    backend = open_local_backend(
        LoadOptions(model=str(folder), context=64, raw=True), None, lambda said: None
    )
    described = backend.describe()
    assert not any(each.is_available for each in described.drafters)
    assert any("cannot take back" in each for each in described.notices)
    request = Request((Message("user", "a b c"),), GREEDY, max_tokens=4)
    assert list(backend.generate(request, threading.Event()))[-1].phase == "done"
