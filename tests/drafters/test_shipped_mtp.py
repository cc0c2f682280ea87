"""A module that ships with its target drafts what transformers drafts with it, and wrong variants
of it do not: they would lose acceptance without a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from localspec.core.decoding import DraftPlan, SamplingParams
from localspec.core.errors import ModelError
from localspec.drafters.mtp import MtpDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST, Features
from localspec.forward.heads import mtp_files
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.mtp_files import read_mtp, ships_mtp
from localspec.loading.drafters import heads_of, marks_of
from localspec.machine.folder_shapes import shape_of_gguf
from localspec.machine.gguf_models import opened_gguf
from localspec.machine.model import Model
from tests.kit.families import assert_close, small
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.qwen_mtp import Reference, module_for, pair, published, write
from tests.kit.tiny import GREEDY, Plans, play, turn_of, with_cache
from tests.kit.tracing import StalePool, TracingPool

FAMILIES = ("qwen3_5", "qwen3_5_moe")
PROMPT = (5, 9, 12, 30, 7, 41, 3, 17, 22, 8)
CAPACITY, NUM_DRAFTED = 96, 4


@pytest.fixture(scope="module")
def shipped_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write(tmp_path_factory.mktemp(family), *pair(family)) for family in FAMILIES}


def target(family: str) -> Decoder:
    return with_cache(pair(family)[0], CAPACITY)


def read_up_to(model: Decoder, text: Sequence[int]) -> Features:
    """Let the target read all of a text but its last token, as the engine does before a draft."""
    features, wanted = model.follow([LAST]), list(text[:-1])
    if missing := wanted[model.cache.reuse(wanted) :]:
        model.forward(missing, num_logits=1)
    return features


def chain(
    head: AutoregressiveHead, text: Sequence[int], features: Features
) -> tuple[list[int], torch.Tensor]:
    """A greedy draft and its logits, [NUM_DRAFTED, V]."""
    state, tokens, rows = (
        head.start(list(text), features).forward(),
        list[int](),
        list[torch.Tensor](),
    )
    while len(tokens) < NUM_DRAFTED:
        rows.append(head.logits(state).forward()[0])
        tokens.append(int(rows[-1].argmax()))
        state = head.extend(tokens[-1], state).forward()
    head.forget(len(text) - 1)
    return tokens, torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_rounds_draft_as_transformers_whatever_was_accepted(
    family: str, shipped_folders: dict[str, Path]
) -> None:
    """The draft, its logits and what is kept equal those of a text that is read afresh."""
    model, reference = target(family), Reference(*pair(family))
    head = AutoregressiveHead(read_mtp(shipped_folders[family], model), CAPACITY)
    text = list(PROMPT)
    for num_accepted in (0, 1, 2, 3, 4, 4, 2, 0, 3, 1):
        tokens, rows = chain(head, text, read_up_to(model, text))
        assert_close(rows, reference.logits(text, NUM_DRAFTED))
        assert tokens == [int(row.argmax()) for row in rows]
        num_pairs = len(text) - 1
        assert head.cache.length == num_pairs, "no row is left that was made of guesses"
        assert_close(head.cache.slots[0][1][0, :, :num_pairs], reference.values)
        model.forward([text[-1], *tokens], num_logits=1)  # checked, and taken back in part
        model.cache.rollback(len(text) + num_accepted)
        text += [*tokens[:num_accepted], (tokens[-1] + 7) % model.vocab_size]


def states_before_the_norm(family: str, text: Sequence[int]) -> torch.Tensor:
    model = pair(family)[0]
    seen = list[torch.Tensor]()
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    Reference(*pair(family)).states(text)
    hook.remove()
    return seen[0]


def states_one_off(family: str, text: Sequence[int]) -> torch.Tensor:
    return Reference(*pair(family)).states(text).roll(1, 0)


@pytest.mark.parametrize("wrong", [states_before_the_norm, states_one_off])
def test_states_of_another_place_do_not_pass(
    wrong: Callable[[str, Sequence[int]], torch.Tensor], shipped_folders: dict[str, Path]
) -> None:
    model, text = target("qwen3_5"), list(PROMPT)
    features = read_up_to(model, text)
    features.write(len(text) - 1, {LAST: wrong("qwen3_5", text[:-1])})
    _, rows = chain(
        AutoregressiveHead(read_mtp(shipped_folders["qwen3_5"], model), CAPACITY), text, features
    )
    with pytest.raises(AssertionError):
        assert_close(rows, Reference(*pair()).logits(text, NUM_DRAFTED))


def test_state_and_embedding_in_the_other_order_do_not_pass(
    shipped_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = mtp_files.LAYOUTS
    swapped = {name: replace(each, is_hidden_first=True) for name, each in known.items()}
    monkeypatch.setattr(mtp_files, "LAYOUTS", swapped)
    model, text = target("qwen3_5"), list(PROMPT)
    head = AutoregressiveHead(read_mtp(shipped_folders["qwen3_5"], model), CAPACITY)
    _, rows = chain(head, text, read_up_to(model, text))
    with pytest.raises(AssertionError):
        assert_close(rows, Reference(*pair()).logits(text, NUM_DRAFTED))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, seed=3)], ids=str)
def test_a_reply_is_the_same_with_the_shipped_module(
    family: str, sampling: SamplingParams, shipped_folders: dict[str, Path]
) -> None:
    model = target(family)
    drafter = MtpDrafter.build(Parts(model, heads={"mtp": shipped_folders[family]}))
    drafted = play(Engine(model, {"mtp": drafter}), PROMPT, Plans(("mtp", 3)), 12, sampling)
    plain = play(Engine(target(family), {}), PROMPT, Plans(("off", 0)), 12, sampling)
    assert drafted.tokens == plain.tokens


def test_a_prompt_is_read_in_pieces(shipped_folders: dict[str, Path]) -> None:
    model, text = target("qwen3_5"), list(PROMPT)
    head = AutoregressiveHead(read_mtp(shipped_folders["qwen3_5"], model), CAPACITY)
    features = read_up_to(model, text)
    left = head.start(text, features)
    while (cut := left.cut(3)) is not None:
        piece, left = cut
        assert piece.num_rows == 3
        piece.forward()
    left.forward()
    _, rows = chain(head, text, features)
    assert_close(rows, Reference(*pair()).logits(text, NUM_DRAFTED))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, seed=3)], ids=str)
def test_captured_steps_draft_the_same(
    sampling: SamplingParams, shipped_folders: dict[str, Path]
) -> None:
    """Over several rounds, each of which takes back what the one before has written."""
    proposals = list[list[tuple[int, ...]]]()
    pool = TracingPool()
    for each in (None, pool):
        model = target("qwen3_5")
        heads = {"mtp": shipped_folders["qwen3_5"]}
        drafter = MtpDrafter.build(Parts(model, heads=heads, pool=each))
        for captures in drafter.captures:
            assert len(list(captures.capture())) == pool.num_captures > 0
            assert captures.notice is None
        text, proposed = list(PROMPT), list[tuple[int, ...]]()
        pool.num_replays = 0
        for num_accepted in (0, 2, 4, 1):
            sequence = turn_of(tuple(text), sampling)
            read_up_to(model, text)
            proposal = drafter.propose(sequence, DraftPlan("mtp", NUM_DRAFTED))
            proposed.append(proposal.tokens)
            text += [*proposal.tokens[:num_accepted], (proposal.tokens[-1] + 7) % 48]
        proposals.append(proposed)
    assert proposals[0] == proposals[1]


def test_a_replay_that_does_nothing_is_not_used(shipped_folders: dict[str, Path]) -> None:
    heads = {"mtp": shipped_folders["qwen3_5"]}
    drafter = MtpDrafter.build(Parts(target("qwen3_5"), heads=heads, pool=StalePool()))
    (captures,) = drafter.captures
    list(captures.capture())
    assert captures.notice is not None and "other tokens" in captures.notice


def test_a_target_without_a_first_state_is_left_alone(shipped_folders: dict[str, Path]) -> None:
    model = target("qwen3_5")
    drafter = MtpDrafter.build(Parts(model, heads={"mtp": shipped_folders["qwen3_5"]}))
    assert drafter.propose(turn_of((5,), GREEDY), DraftPlan("mtp", 4)).tokens == ()


def test_it_is_kept_in_the_bits_of_its_target(tmp_path: Path) -> None:
    model = small("qwen3_5", hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                  layer_types=["linear_attention", "full_attention"])  # fmt: skip
    folder, loaded = write(tmp_path, model, module_for(model)), with_cache(model, CAPACITY)
    whole, quantised = read_mtp(folder, loaded), read_mtp(folder, loaded, bits=4)
    assert quantised.weight_bytes < 0.35 * whole.weight_bytes
    drafter = MtpDrafter.build(Parts(loaded, heads={"mtp": folder}, bits=4))
    assert (
        drafter.memory_bytes < MtpDrafter.build(Parts(loaded, heads={"mtp": folder})).memory_bytes
    )


GGUF_NAMES = {
    "mtp.fc": "nextn.eh_proj", "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm", "mtp.norm": "nextn.shared_head_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


def add_module(writer: GGUFWriter, module: Any, block: int) -> None:
    """As llama.cpp's converter writes it: a block after the last, every norm with its 1."""
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)
    for name, tensor in published(module).items():
        path = name.removesuffix(".weight").removeprefix("mtp.layers.0.")
        shift = 1.0 if "norm" in path else 0.0
        called = f"blk.{block}.{GGUF_NAMES[path]}.weight"
        writer.add_tensor(called, (tensor + shift).numpy())


def gguf_pair(place: Path, is_alone: bool, family: str = "qwen3_5") -> Path:
    """The tiny Qwen3.5 as a GGUF file, with its module in it, or in a file beside it."""
    model, module = pair(family)
    num_layers = model.config.num_hidden_layers

    def describe(writer: GGUFWriter) -> None:
        VOCABULARY(writer)
        writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_state_size(16)
        writer.add_ssm_group_count(2)
        writer.add_ssm_time_step_rank(4)
        writer.add_ssm_inner_size(32)
        writer.add_rope_dimension_count(8)
        writer.add_name("Tiny Qwen")
        if family == "qwen3_5_moe":
            writer.add_expert_count(6)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(24)
            writer.add_expert_shared_feed_forward_length(40)
        if not is_alone:
            add_module(writer, module, num_layers)

    file = place / "tiny-Q8.gguf"
    architecture = "qwen35" if family == "qwen3_5" else "qwen35moe"
    write_gguf(file, model, "F32", architecture, describe, num_drafting=0 if is_alone else 1)
    return file


def write_alone(file: Path, name: str = "tiny-qwen", width: int = 32) -> None:
    model, module = pair()
    writer = GGUFWriter(file, "qwen35")
    writer.add_name(name)
    writer.add_block_count(model.config.num_hidden_layers + 1)
    writer.add_embedding_length(width)
    add_module(writer, module, model.config.num_hidden_layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "is_alone"), [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False)]
)
def test_a_gguf_file_has_the_same_module(family: str, is_alone: bool, tmp_path: Path) -> None:
    """In the model's own file, or in a file beside it."""
    file = gguf_pair(tmp_path, is_alone, family)
    folder = opened_gguf(file, tmp_path)
    assert ships_mtp(folder) is not is_alone
    if is_alone:
        assert shape_of_gguf(file, "tiny").mtp is None
        write_alone(tmp_path / "mtp-tiny-F32.gguf")
        write_alone(tmp_path / "mtp-another-F32.gguf", "another")
    assert ships_mtp(folder)
    heads, _ = heads_of(Model("tiny", path=folder))
    assert heads == {"mtp": folder}, "without a flag"
    marks = marks_of(Model("tiny", path=folder), heads)
    assert ("mtp" in marks) is is_alone, "what was learnt with another module is not this one's"
    counted = shape_of_gguf(file, "tiny").mtp
    num_weights = sum(tensor.numel() for tensor in published(pair(family)[1]).values())
    assert counted is not None and counted.num_params == num_weights
    model, text = target(family), list(PROMPT)
    head = AutoregressiveHead(read_mtp(folder, model), CAPACITY)
    _, rows = chain(head, text, read_up_to(model, text))
    assert_close(rows, Reference(*pair(family)).logits(text, NUM_DRAFTED))


def test_experts_that_are_published_one_by_one_are_the_same(tmp_path: Path) -> None:
    """As in Qwen3.6-35B-A3B."""
    folder = write(tmp_path, *pair("qwen3_5_moe"))
    tensors, begin = load_file(folder / "model.safetensors"), "mtp.layers.0.mlp.experts."
    gate, up = tensors.pop(f"{begin}gate_up_proj").chunk(2, 1)
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": tensors.pop(f"{begin}down_proj")}
    for part, stack in parts.items():
        for expert, weight in enumerate(stack):
            tensors[f"{begin}{expert}.{part}.weight"] = weight.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, text = target("qwen3_5_moe"), list(PROMPT)
    head = AutoregressiveHead(read_mtp(folder, model), CAPACITY)
    _, rows = chain(head, text, read_up_to(model, text))
    assert_close(rows, Reference(*pair("qwen3_5_moe")).logits(text, NUM_DRAFTED))


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"name": "Another"}, "of the name another, and tiny-Q8.gguf has tinyqwen"),
     ({"width": 64}, "of the width 64, and tiny-Q8.gguf has 32")],
)  # fmt: skip
def test_the_module_of_another_model_is_refused_by_name_and_shape(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = opened_gguf(gguf_pair(tmp_path, is_alone=True), tmp_path)
    write_alone(tmp_path / "mtp-tiny.gguf", **changed)
    with pytest.raises(ModelError, match="Name the file of the model itself"):
        opened_gguf(tmp_path / "mtp-tiny.gguf", tmp_path)
    with pytest.raises(ModelError, match=said):
        read_mtp(folder, target("qwen3_5"))
