"""Models with recurrent states answer as they do without drafts, and no text is read on from a
state of another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from localspec.core import decoding
from localspec.core.backend import Message, Request
from localspec.core.decoding import DraftPlan, Proposal, SamplingParams
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.drafters.parts import DrafterBase
from localspec.engine.engine import Engine
from localspec.forward.load import load_model
from localspec.forward.model import CausalLM, kv_shape
from localspec.forward.recurrent import RecurrentLM
from localspec.loading.local_backend import open_local_backend
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.memory import Room
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import PlanReport, PlanRequest
from localspec.machine.shapes import Counted, ModelShape
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import CPU, GREEDY, Plans, play, tiny_llama, with_cache

PROMPT = (5, 9, 12, 5, 9, 30, 7)
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def planned(shape: ModelShape, draft: ModelShape) -> PlanReport:
    drafts = (Model("draft", known_shape=draft),)
    target = Model("target", known_shape=shape, drafts=drafts)
    return plan(PlanRequest(target, Room("cpu", 2**33)))


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
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
              "mamba_chunk_size": 8, "attn_layer_indices": [1]},
    "falcon_mamba": {"state_size": 4},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp"],
                   "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
                   "chunk_size": 8},
    "qwen3_next": {**LINEAR, "num_experts": 2, "num_experts_per_tok": 1,
                   "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "minimax": {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 2,
                "num_experts_per_tok": 1, "block_size": 4},
}  # fmt: skip


# Those that loading puts on transformers' own forward.
LOADED = tuple(family for family in FAMILIES if family != "qwen3_next")


def module_of(family: str, is_peaked: bool = True, **sizes: int) -> Any:
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **sizes})
    module: Any = AutoModelForCausalLM.from_config(config).eval()
    tables = (module.get_output_embeddings().weight, module.get_input_embeddings().weight)
    with torch.no_grad():  # peaked, so that a lost state changes the text
        for name, weight in module.named_parameters() if is_peaked else ():
            if weight.ndim > 1 and "A_log" not in name:
                weight.mul_(30.0 if weight is tables[0] else 1.0 if weight is tables[1] else 8.0)
    return module


def test_a_model_of_a_hybrid_family_without_a_state_takes_every_draft(tmp_path: Path) -> None:
    """Granite 4 Micro; its config.json says "attention"."""
    all_attention = {**FAMILIES["granitemoehybrid"], "layer_types": ["attention"] * 2}
    config: Any = AutoConfig.for_model("granitemoehybrid", **{**COMMON, **all_attention})
    save_model(tmp_path, AutoModelForCausalLM.from_config(config))
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("full_attention", "attention"))
    assert isinstance(load_model(tmp_path, torch.float32, CPU, 32).model, CausalLM)
    shape = shape_from_folder(tmp_path)
    assert not shape.is_recurrent and shape.kv_bytes_per_token("fp32") == 2 * 2 * 16 * 4


def greedy(module: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """Each token from the whole text before it, without a state."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", LOADED)
def test_a_hybrid_decodes_what_it_says_of_the_whole_text(family: str, tmp_path: Path) -> None:
    """A turn, another that goes on from it, an edit, and the first again."""
    module = module_of(family)
    module.save_pretrained(str(tmp_path))
    opened = load_model(tmp_path, torch.float32, CPU, 64)
    assert isinstance(opened.model, RecurrentLM) and "into a state" in str(opened.notice)
    engine = Engine(opened.model, {})
    first = play(engine, PROMPT, Plans(("off", 0)), 6).tokens
    assert first == greedy(module, PROMPT, 6)
    for prompt in ((*first, 4, 8), (*PROMPT[:3], 40, *PROMPT[4:]), PROMPT):
        assert play(engine, prompt, Plans(("off", 0)), 4).tokens == greedy(module, prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("is_peaked", [True, False])
@pytest.mark.parametrize("family", LOADED)
def test_a_plan_drafts_for_a_hybrid_where_loading_reads_it_in_pieces(
    family: str, is_peaked: bool, tmp_path: Path
) -> None:
    """Also where its state counts for so little that losing it is rounding."""
    module = module_of(family, is_peaked)
    module.save_pretrained(str(tmp_path))
    plans = plan(
        PlanRequest(Model("m", known_shape=shape_from_folder(tmp_path)), Room("cpu", 2**33))
    ).plans
    is_planned = "ngram" in {each.drafter for each in plans}
    assert is_planned == RecurrentLM(module, 64).reads_pieces
    assert is_planned == (family not in ("falcon_mamba", "jamba", "mamba"))
    for told in ("runs on transformers' own forward, which is slower", "the text into a state"):
        assert all(told in each.reason for each in plans)


def test_a_family_that_answers_otherwise_token_by_token_is_refused() -> None:
    module = module_of("lfm2")
    module.register_forward_hook(
        lambda _, __, output: setattr(output, "past_key_values", None)  # the state is lost
    )
    with pytest.raises(ModelError, match=r"token by token.*another family"):
        RecurrentLM(module, 64)


def test_a_family_whose_state_cannot_be_held_is_read_token_by_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("localspec.forward.recurrent._copied", lambda state: state)
    model = RecurrentLM(module_of("qwen3_next"), 64)
    assert not model.reads_pieces and not drafters_of(model)


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


REPLY = 12  # tokens: each of the plans below has a round and more
DRAFTED = ("lfm2", "granitemoehybrid", "falcon_h1", "qwen3_next", "minimax")


def drafters_of(target: RecurrentLM) -> dict[str, Any]:
    """Lookup, and a draft model of another family."""
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    return build_drafters(Parts(target, with_cache(tiny_llama(vocab_size=64))), print)[0]


class RightButLast(DrafterBase):
    """Drafts what is said, but for the last token: every draft is accepted in part."""

    name, shapes_itself = "right", False

    def __init__(self) -> None:
        self.text = list[int]()

    def signal(self, sequence: decoding.Sequence) -> str:
        return self.name

    def propose(self, sequence: decoding.Sequence, plan: DraftPlan) -> Proposal:
        size = len(sequence.tokens)
        found = self.text[size : size + plan.num_draft_tokens]
        return decoding.chain((*found[:-1], *((token + 1) % 64 for token in found[-1:])))


@pytest.mark.slow
@pytest.mark.parametrize("family", DRAFTED)
def test_a_hybrid_that_drafts_says_what_it_says_without(family: str) -> None:
    """A turn that is cancelled, the whole turn, an edit, a longer prompt, the first one again."""
    sampled = SamplingParams(0.8, seed=3)
    module = module_of(family)
    plain = RecurrentLM(module, 128)
    assert plain.reads_pieces
    target, right = RecurrentLM(module, 128), RightButLast()
    engine = Engine(target, {**drafters_of(target), "right": right})
    edited = (*PROMPT[:3], 40, *PROMPT[4:])
    plans = Plans(("right", 4), ("ngram", 4), ("right", 3), ("draft_model", 3), ("off", 0))
    turns = (PROMPT, sampled), (edited, GREEDY), ((*PROMPT, 3, 3, 9), sampled), (PROMPT, GREEDY)
    for prompt, sampling in turns:
        right.text = play(Engine(plain, {}), prompt, Plans(("off", 0)), REPLY, sampling).tokens
        cancelled = engine.start(prompt, sampling, REPLY, frozenset())
        engine.prefill(cancelled, threading.Event())
        rounds = engine.decode(cancelled, plans, threading.Event())
        next(rounds), next(rounds), rounds.close()
        assert play(engine, prompt, plans, REPLY, sampling).tokens == right.text
    drafted = {each.drafter for each in plans.steps if each.num_draft_tokens}
    assert {"right", "draft_model"} <= drafted
    steps = [each for each in plans.steps if each.drafter == "right"]
    assert sum(each.num_accepted_tokens for each in steps) > len(steps)
    assert all(each.num_accepted_tokens < each.num_draft_tokens for each in steps)


def test_a_rejected_draft_costs_one_forward_of_what_was_accepted() -> None:
    module, sizes = module_of("lfm2"), list[int]()
    model = RecurrentLM(module, 64)
    model.forward(PROMPT)
    module.register_forward_pre_hook(
        lambda _, __, named: sizes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    model.forward([4, 9, 2, 6, 1])
    model.cache.keep(len(PROMPT), (0, 1))  # the root and the first draft token
    model.forward([8])
    assert sizes == [5, 2, 1]
    model.forward([5, 6])
    model.cache.keep(len(PROMPT) + 3, (0, 1))  # all of them
    model.forward([7])
    assert sizes[3:] == [2, 1]


def test_after_a_failed_forward_the_text_is_read_from_its_start() -> None:
    module = module_of("lfm2")
    wanted = RecurrentLM(module, 64).forward((*PROMPT, 4))[-1]
    model = RecurrentLM(module, 64)
    model.forward(PROMPT)

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = module.model.layers[1].register_forward_hook(fail)
    with pytest.raises(MemoryError):
        model.forward([4, 9])
    hook.remove()
    assert torch.allclose(model.forward([4])[-1], wanted, atol=1e-4)


def test_only_what_checks_chains_drafts_for_a_hybrid(tmp_path: Path) -> None:
    module = module_of("lfm2")
    assert set(drafters_of(RecurrentLM(module, 64))) == {"ngram", "draft_model", "chained"}
    module.save_pretrained(str(tmp_path))
    shape = shape_from_folder(tmp_path)
    small = replace(shape, counted=Counted(10, 5), is_recurrent=False)
    report = planned(shape, small)
    assert {each.drafter for each in report.plans} == {"off", "ngram", "draft_model"}
    (refused,) = (each.reason for each in report.refused if each.drafter == "self_quant")
    assert "one chain of tokens" in refused


def test_a_plan_for_what_is_read_token_by_token_is_plain_with_the_reason(tmp_path: Path) -> None:
    module_of("jamba").save_pretrained(str(tmp_path))
    shape = shape_from_folder(tmp_path)
    small = replace(shape, num_layers=1)
    report = planned(shape, small)
    assert {each.drafter for each in report.plans} == {"off"}
    refused = {each.drafter: each.reason for each in report.refused}
    assert {"ngram", "draft_model"} <= refused.keys() and "token by token" in refused["ngram"]
    whole = replace(shape, is_recurrent=False, all_kv_width=None)
    of_whole = planned(whole, small)
    assert any("full attention would do" in each.reason for each in of_whole.refused)


def test_keys_and_values_are_counted_for_the_layers_that_have_them(tmp_path: Path) -> None:
    shapes = dict[str, int]()
    for family in ("granitemoehybrid", "jamba", "falcon_h1"):
        module_of(family).save_pretrained(str(tmp_path / family))
        shape = shape_from_folder(tmp_path / family)
        shapes[family] = shape.kv_bytes_per_token("fp32") // (2 * 4 * shape.kv_width)
    assert shapes == {"granitemoehybrid": 1, "jamba": 1, "falcon_h1": 2}


def test_what_reads_token_by_token_drafts_for_none_and_is_drafted_for_by_none() -> None:
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    module = module_of("jamba")
    with pytest.raises(ModelError, match="cannot take back a rejected draft"):
        kv_shape(module.config, 64)  # asked before a draft is loaded
    target = RecurrentLM(module, 64)
    drafters, statuses = build_drafters(Parts(target), lambda said: None)
    assert drafters == {} and all("token by token" in each.reason for each in statuses)
    sampled = SamplingParams(0.7, seed=3)
    replies = [play(Engine(target, {}), PROMPT, Plans(("off", 0)), 8, sampled) for _ in "ab"]
    assert replies[0].tokens == replies[1].tokens


@pytest.mark.slow
def test_a_hybrid_is_loaded_and_answers(tmp_path: Path) -> None:
    module = module_of("lfm2", vocab_size=VOCAB_SIZE)
    folder = save_model(tmp_path / "hybrid", module)
    backend = open_local_backend(
        LoadOptions(model=str(folder), context=64, raw=True), None, lambda said: None
    )
    described = backend.describe()
    assert [each.name for each in described.drafters if each.is_available] == ["ngram"]
    assert any("one chain of tokens" in each for each in described.notices)
    request = Request((Message("user", "a b c"),), GREEDY, max_tokens=4)
    assert list(backend.generate(request, threading.Event()))[-1].phase == "done"
