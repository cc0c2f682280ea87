"""A model with states goes back by what it holds of the last tokens, with the bits of a text that
was read without going back."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from localspec.core.decoding import DraftPlan, Proposal, SamplingParams, chain
from localspec.core.decoding import Sequence as Turn
from localspec.drafters.early_exit import EarlyExit
from localspec.drafters.parts import DrafterBase
from localspec.engine.engine import Engine
from localspec.forward import snapshots
from localspec.forward.decoder import Decoder
from localspec.forward.delta_chunks import ClosedStates
from localspec.forward.load import load_model
from localspec.forward.passes import Rows, forward_together
from localspec.machine.folder_shapes import shape_from_folder
from tests.kit.families import SETTINGS, SHAPE, VISION, WITH_STATES, assert_close, scrambled
from tests.kit.hybrids import TEXT, VOCAB_SIZE, by_transformers, module, num_rows_read, read
from tests.kit.tiny import CPU, GREEDY, Plans, play, tiny_llama, with_cache

VISION_TOWER = {**VISION, "num_position_embeddings": 16}
SAMPLED = SamplingParams(0.8, seed=3)


class Wrong(DrafterBase):
    """Drafts what no reply here holds, as much as it may."""

    name = "wrong"
    shapes_itself = False

    def signal(self, sequence: Turn) -> str:
        return "always"

    def propose(self, sequence: Turn, plan: DraftPlan) -> Proposal:
        return chain((0,) * plan.num_draft_tokens)


def decoder(family: str = "qwen3_5") -> Decoder:
    return with_cache(module(family), 96)


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_prompt_and_single_tokens_give_what_transformers_gives(family: str) -> None:
    wanted = by_transformers(family)
    assert_close(read(decoder(family), TEXT, [60, *[1] * 20]), wanted)


def test_a_mixture_has_the_same_bits_at_every_width_and_after_a_rejection() -> None:
    wanted, model = decoder("qwen3_5_moe").forward(TEXT), decoder("qwen3_5_moe")
    assert torch.equal(read(model, TEXT, [20, 1, 2, 5, 16]), wanted[:44])
    model.forward([5] * 8)
    model.cache.rollback(30)
    assert torch.equal(model.forward(TEXT[30:40]), wanted[30:40])


@pytest.mark.parametrize("width", range(1, 18))
def test_rows_of_every_width_have_the_same_bits(width: int) -> None:
    wanted = decoder().forward(TEXT)
    widths = [width] * (80 // width)
    assert torch.equal(read(decoder(), TEXT, widths), wanted[: sum(widths)])


@pytest.mark.parametrize("width", [2, 8, 16])
def test_a_draft_that_is_rejected_at_any_position_leaves_nothing(width: int) -> None:
    wanted = decoder().forward(TEXT)
    model = decoder()
    model.forward(TEXT[:20])
    for num_accepted in range(1, width + 1):
        base = model.cache.length
        draft = [*TEXT[base : base + num_accepted], *[5] * width][:width]
        if base + num_accepted >= len(TEXT):
            break
        model.forward(draft)
        model.cache.keep(base, range(num_accepted))
        place = base + num_accepted
        assert torch.equal(model.forward([TEXT[place]])[0], wanted[place])


def test_a_text_is_gone_back_in_token_by_token() -> None:
    """Within what is held, and behind it, where the text is read again."""
    wanted = decoder().forward(TEXT)
    model = decoder()
    read(model, TEXT, [30, *[1] * 40])
    for length in (69, 60, 55, 54, 31, 3, 0):
        model.cache.rollback(length)
        assert torch.equal(model.forward(TEXT[length : length + 2]), wanted[length : length + 2])


def test_a_second_turn_reads_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reply stands in it in other words, and where the prompt's last tokens do."""
    model = decoder()
    sizes, engine = num_rows_read(monkeypatch, model), Engine(model, {})
    reply = play(engine, TEXT[:40], Plans(("off", 0)), 40).tokens
    for prompt, num_new in (
        ((*reply, 4, 8, 1), 3),
        ((*TEXT[:40], 9, 9, 2, 6), 4),  # the root of the first turn is among them
        ((*TEXT[:37], 1, 2, 3, 4, 5, 6), 5),
    ):
        del sizes[:]
        engine.prefill(engine.start(prompt, GREEDY, 4, frozenset()), threading.Event())
        assert sum(sizes) == num_new
        assert torch.equal(model.forward([prompt[-1]])[0], decoder().forward(prompt)[-1])
        model.cache.rollback(len(prompt) - 1)


def test_a_long_prompt_is_held_at_places_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.forward.cache.SNAPSHOT_EVERY", 20)
    model = decoder()
    read(model, TEXT, [20, 20, 20, 20])
    prompt = (*TEXT[:42], 1, 2, 3)
    assert model.cache.reuse_read(prompt) == 40
    assert torch.equal(model.forward(prompt[40:]), decoder().forward(prompt)[40:])


def test_a_copy_of_another_text_is_not_gone_back_to() -> None:
    model, other = decoder(), TEXT[::-1]
    model.forward(other[:40])
    model.cache.hold()
    model.cache.rollback(0)
    model.forward(TEXT[:70])
    model.cache.rollback(35)
    assert torch.equal(model.forward(TEXT[35:40]), decoder().forward(TEXT[:40])[35:])


def test_only_the_last_copies_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MOST_SNAPSHOTS", 2)
    model = decoder()
    for length in (20, 40, 60):
        read(model, TEXT[model.cache.length : length], [20])
        model.cache.hold()
    assert model.cache.reuse((*TEXT[:20], 1)) == 0
    assert torch.equal(model.forward(TEXT[:30]), decoder().forward(TEXT[:30]))


@pytest.mark.parametrize("width", [4, 20])
def test_after_a_failed_forward_the_states_are_as_before(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder()
    model.forward(TEXT[:20])
    with monkeypatch.context() as patched:
        patched.setattr("localspec.forward.decoder.last_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([5] * width)
    assert torch.equal(model.forward(TEXT[20:24]), decoder().forward(TEXT)[20:24])


def test_sequences_that_run_together_keep_their_states() -> None:
    first, wanted = decoder(), decoder().forward(TEXT)
    second = first.beside()
    parts = [Rows(first, TEXT[:30]), Rows(second, TEXT[:3])]
    forward_together(parts)
    after = [Rows(first, TEXT[30:34]), Rows(second, TEXT[3:40])]
    found = forward_together(after)
    assert torch.equal(found[0], wanted[30:34]) and torch.equal(found[1], wanted[3:40])


@pytest.mark.parametrize(
    ("family", "sampling"),
    [("qwen3_5", GREEDY), ("qwen3_5", SAMPLED), ("qwen3_5_moe", SAMPLED)],
    ids=["greedy", "0.8", "mixture"],
)
def test_drafts_change_no_reply(family: str, sampling: SamplingParams) -> None:
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    wanted = play(Engine(decoder(family), {}), TEXT[:30], Plans(("off", 0)), 40, sampling).tokens
    draft, target = with_cache(tiny_llama(vocab_size=VOCAB_SIZE)), decoder(family)
    drafters, _ = build_drafters(Parts(target, draft), print)
    plans = Plans(("ngram", 5), ("draft_model", 4), ("off", 0), ("draft_model", 15))
    assert play(Engine(target, drafters), TEXT[:30], plans, 40, sampling).tokens == wanted
    assert any(step.num_draft_tokens for step in plans.steps)


def test_a_draft_is_no_longer_than_the_states_can_take_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a rejection never costs the reading of a text."""
    target = decoder()
    engine, plans = Engine(target, {"wrong": Wrong()}), Plans(("wrong", 64))
    prefilled = engine.start(TEXT[:30], GREEDY, 40, frozenset())
    engine.prefill(prefilled, threading.Event())
    sizes = num_rows_read(monkeypatch, target)
    play(engine, TEXT[:30], plans, 40)
    assert max(step.num_draft_tokens for step in plans.steps) == 15
    assert len(sizes) == len(plans.steps), "a text was read again"


def test_what_was_not_kept_is_read_again_by_the_model_and_not_by_its_copy() -> None:
    """A drafter over the target's cache may be the first that needs it."""
    target, wanted = decoder(), decoder().forward(TEXT)
    target.forward(TEXT[:40])
    target.cache.rollback(20)
    EarlyExit(target, 1).forward([5])
    target.cache.rollback(20)
    assert torch.equal(target.forward(TEXT[20:24]), wanted[20:24])


def test_what_needs_a_tree_is_refused_with_what_would_do() -> None:
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    small = with_cache(tiny_llama(vocab_size=VOCAB_SIZE))
    for target, draft, refused in (
        (decoder(), small, {"lookahead", "draft_tree"}),
        (small, decoder(), {"draft_tree"}),
    ):
        _, statuses = build_drafters(Parts(target, draft), lambda said: None)
        reasons = {each.name: each.reason for each in statuses if not each.is_available}
        of_trees = {name: why for name, why in reasons.items() if " tree" in why}
        assert of_trees.keys() == refused
        assert all("chain" in why for why in of_trees.values())


def test_a_model_with_states_drafts_for_another() -> None:
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    target = with_cache(tiny_llama(vocab_size=VOCAB_SIZE))
    wanted = play(Engine(target, {}), TEXT[:30], Plans(("off", 0)), 20).tokens
    target.cache.rollback(0)
    drafters, _ = build_drafters(Parts(target, decoder()), print)
    plans = Plans(("draft_model", 4), ("draft_model", 15))
    assert play(Engine(target, drafters), TEXT[:30], plans, 20).tokens == wanted


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_published_folder_is_loaded_without_its_images(family: str, tmp_path: Path) -> None:
    """Its tensors stand under model.language_model., those of its drafting head beside them."""
    text = {**SHAPE, **SETTINGS[family]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=VISION_TOWER)
    published = scrambled(config)
    published.save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    opened = load_model(tmp_path, torch.float32, CPU, 96)
    assert isinstance(opened.model, Decoder) and opened.has_invariant_rows
    assert (opened.notice, opened.unread) == (None, None)
    with torch.no_grad():
        wanted = published(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
    assert_close(opened.model.forward(TEXT), wanted)
    shape = shape_from_folder(tmp_path)
    states = opened.model.cache.states
    assert shape.is_native and states is not None and shape.kv_bytes(0) == states.nbytes
    on_gpu = ClosedStates(states.shape, torch.bfloat16, CPU)
    assert on_gpu.nbytes <= shape.loaded_bytes("bf16", "bf16", 0, "cuda")[1] < states.nbytes
    assert shape.kv_bytes_per_token("fp32") == 2 * 2 * 16 * 4  # one layer of four


def test_a_published_folder_of_qwen3_next_is_read(tmp_path: Path) -> None:
    """Its config.json has older names of the rotation, and no kinds of layers."""
    module("qwen3_next").save_pretrained(str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    rotation = config.pop("rope_parameters")
    config |= {"full_attention_interval": 4, "rope_scaling": None, "decoder_sparse_step": 1}
    config |= {name: rotation[name] for name in ("rope_theta", "partial_rotary_factor")}
    path.write_text(json.dumps(config))
    opened = load_model(tmp_path, torch.float32, CPU, 96)
    assert (opened.notice, opened.unread) == (None, None)
    assert_close(opened.model.forward(TEXT), by_transformers("qwen3_next"))
    shape = shape_from_folder(tmp_path)
    states = opened.model.cache.states
    assert shape.is_native and states is not None and shape.kv_bytes(0) == states.nbytes
