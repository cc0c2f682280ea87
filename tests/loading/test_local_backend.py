"""From options to a backend: what is indispensable fails, everything else is a reason."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.backend import Message, Request
from localspec.core.decoding import SamplingParams, Sequence
from localspec.core.errors import ConfigError, MemoryShortage, ModelError
from localspec.core.options import LoadOptions
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY
from localspec.forward.decoder import Decoder
from localspec.loading import drafters as guesses
from localspec.loading import fitting, placement, torch_start
from localspec.loading import local_backend as load_module
from localspec.loading.local_backend import open_local_backend
from localspec.loading.torch_start import library_settings
from tests.kit.model_folders import VOCAB_SIZE, save_model, save_tokenizer
from tests.kit.packed import LAYOUTS, packed_folder
from tests.kit.tiny import NEEDS_BF16, agreeing_draft, tiny_llama

# They load models with all that drafts for them.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_home")]
HELLO = (Message("user", "hello hello"),)


@pytest.fixture(scope="module")
def saved_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    module = tiny_llama(vocab_size=VOCAB_SIZE)
    return save_model(root / "target", module), save_model(root / "draft", agreeing_draft(module))


def options_of(target: Path, draft: Path | None = None, **more: Any) -> LoadOptions:
    return LoadOptions(
        model=str(target),
        draft=None if draft is None else str(draft),
        **{"context": 128, "dtype": "float32", **more},
    )


def opened(options: LoadOptions, state: dict[str, Any] | None = None) -> Any:
    return open_local_backend(options, state, lambda phrase: None)


@pytest.fixture(scope="module")
def plain(saved_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The target with nothing named that may draft, for tests that change nothing of it."""
    return opened(options_of(saved_pair[0], home=tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def learnt(
    saved_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The state of the pair after costs were measured, as the log keeps it."""
    backend = opened(options_of(*saved_pair, home=tmp_path_factory.mktemp("home")))
    backend._controller.costs.set_verify(1, 10, 7.0)
    backend._controller.costs.set_verify(2, 10, 8.0)
    return dict(json.loads(json.dumps(backend.snapshot())))


def status(backend: Any, name: str) -> Any:
    return next(s for s in backend.describe().drafters if s.name == name)


def text_of(backend: Any, drafter: str) -> str:
    request = Request(HELLO, max_tokens=16, drafter=drafter)
    chunks = list(backend.generate(request, threading.Event()))
    assert chunks[-1].error is None
    return "".join(chunk.text for chunk in chunks)


def test_target_and_draft_answer_alike(saved_pair: tuple[Path, Path]) -> None:
    phrases: list[str] = []
    backend = open_local_backend(options_of(*saved_pair), None, phrases.append)
    found = backend.describe()
    assert (found.target, found.draft, found.dtype) == ("target", "draft", "float32")
    assert found.context_length == 128 and found.calibration is None
    turn = Sequence((1,) * 300, SamplingParams(), 8, frozenset(), torch.Generator())
    missed = backend.loaded.controller.catch_up.num_missed
    assert missed("self_quant", turn, 299) == 0, "what drafts in the target's cache reads no prompt"
    assert missed("draft_model", turn, 299) == 300
    assert status(backend, "draft_model").is_available and status(backend, "ngram").is_available
    assert text_of(backend, "draft_model") == text_of(backend, "off") != ""
    shared = backend.loaded.controller.shared
    assert (
        shared["draft_model"] == shared["chained"] == shared["draft_tree"] and "ngram" not in shared
    )
    assert any("target" in phrase for phrase in phrases)


@pytest.mark.parametrize(
    "drafter", ["draft_model", "chained", "draft_tree", "self_quant", "early_exit"]
)
def test_alike_replies_at_the_same_time_take_the_draft_passes_of_one(
    saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    backend = opened(options_of(*saved_pair, parallel=3))
    target = backend.loaded.engine.target.weights
    layers, drafted = Decoder.layers, list[int]()

    def noted(model: Decoder, rows: torch.Tensor, *rest: Any) -> Any:
        drafted.append(len(rows)) if model.weights is not target else None
        return layers(model, rows, *rest)

    monkeypatch.setattr(Decoder, "layers", noted)

    def passes_of(count: int) -> list[int]:
        request = Request(HELLO, max_tokens=12, drafter=drafter, num_draft_tokens=3)
        replies = [backend.generate(request, threading.Event()) for _ in range(count)]
        drafted.clear()
        texts = [
            "".join(chunk.text for chunk in together) for together in zip(*replies, strict=True)
        ]
        assert texts and all(text == text[: len(text) // count] * count for text in texts)
        return drafted[:]

    passes_of(2)  # reads the prompt
    assert passes_of(2) == [2 * rows for rows in passes_of(1)] != []


@pytest.mark.usefixtures("sets_aside")
def test_a_load_collects_no_garbage_but_the_last_ones_and_spares_the_collector_what_it_loads(
    saved_pair: tuple[Path, Path],
) -> None:
    passes: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        passes.append(phase)

    gc.callbacks.append(count)
    try:
        gc.unfreeze()
        backend = opened(options_of(*saved_pair))
    finally:
        gc.callbacks.remove(count)
    assert not passes and gc.isenabled()
    assert not any(each is backend.loaded.engine.target for each in gc.get_objects())
    backend.loaded.engine.target.itself = backend.loaded.engine.target
    held = weakref.ref(backend.loaded.engine.target)
    del backend
    gc.collect()
    assert held() is not None, "set aside"
    opened(options_of(saved_pair[0]))
    assert held() is None


def test_every_registered_drafter_has_a_status(plain: Any) -> None:
    assert [s.name for s in plain.describe().drafters] == list(REGISTRY)
    refused = status(plain, "draft_model")
    assert not refused.is_available and "--draft" in refused.reason
    assert plain.describe().draft is None


def test_a_damaged_draft_is_a_reason_and_no_error(
    saved_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(saved_pair[1], draft)
    (draft / "model.safetensors").write_bytes(b"nothing")
    backend = opened(options_of(saved_pair[0], draft))
    assert "model.safetensors" in status(backend, "draft_model").reason
    assert text_of(backend, "off")


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), MemoryError("no memory")])
def test_a_drafter_that_does_not_fit_is_a_reason_and_no_error(
    saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(parts: Parts) -> Any:
        raise fault

    from localspec.drafters.ngram import NgramDrafter

    monkeypatch.setattr(NgramDrafter, "build", fail)
    backend = opened(options_of(*saved_pair))
    assert not status(backend, "ngram").is_available
    reason = status(backend, "ngram").reason
    assert "is left out" in reason and str(fault) in reason and "keeps its context" in reason
    assert status(backend, "ngram").code == "no_memory"


def test_a_draft_with_a_shorter_context_gets_no_longer_cache(
    saved_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(saved_pair[1], draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}))
    backend = opened(options_of(saved_pair[0], draft))
    assert backend._engine.drafters["draft_model"].model.cache.shape.capacity == 40
    assert text_of(backend, "draft_model") == text_of(backend, "off")


def test_a_damaged_target_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        opened(options_of(tmp_path / "nowhere"))


@pytest.mark.parametrize("context", [0, 1, 15, 257, 100_000])
def test_impossible_context_is_refused_with_its_limits(
    saved_pair: tuple[Path, Path], context: int
) -> None:
    with pytest.raises(ConfigError, match="256"):
        opened(options_of(saved_pair[0], context=context))


def test_unknown_precision_is_refused_with_the_choices(saved_pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="fp32, fp16, bf16, 8-bit, 4-bit"):
        opened(options_of(saved_pair[0], dtype="float7"))


def test_the_fastest_kernels_say_what_they_promise(saved_pair: tuple[Path, Path]) -> None:
    same_bits, fastest = (
        opened(options_of(saved_pair[0], kernels=kernels)) for kernels in ("same-bits", "fastest")
    )
    said = " ".join(same_bits.describe().notices), " ".join(fastest.describe().notices)
    assert [text.count("equal within rounding") for text in said] == [0, 1]
    assert (same_bits.describe().kernels, fastest.describe().kernels) == ("same-bits", "fastest")
    assert same_bits.loaded.identity != fastest.loaded.identity  # costs of one are not the other's
    with pytest.raises(ConfigError, match="none of same-bits, fastest"):
        opened(options_of(saved_pair[0], kernels="slow"))


@pytest.mark.parametrize(("dtype", "told"), [("8-bit", "LLM.int8"), ("float32", "equal within")])
def test_where_rows_differ_by_more_than_rounding_no_rounding_is_promised(
    dtype: str, told: str, saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes' layer for 8 bits, of which transformers' forward is made."""
    load_at = load_module.load_at

    def on_transformers(*asked: Any, **named: Any) -> Any:
        opened = load_at(*asked, **named)
        return replace(opened, notice="Its family is another.", has_invariant_rows=False)

    monkeypatch.setattr(load_module, "load_at", on_transformers)
    notices = opened(options_of(saved_pair[0], dtype=dtype)).describe().notices
    said = [each for each in notices if "than without" in each]
    assert len(said) == 1 and told in said[0]


def test_weights_beyond_the_free_memory_are_refused_before_loading(
    saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "free_bytes_now", lambda *_, **__: 1000)
    monkeypatch.setattr(load_module, "load_at", lambda *_: pytest.fail("loaded all the same"))
    with pytest.raises(MemoryShortage, match="target"):
        opened(options_of(saved_pair[0]))


def test_learnt_state_does_not_return_for_another_combination(
    saved_pair: tuple[Path, Path], learnt: dict[str, Any]
) -> None:
    without_draft = opened(options_of(saved_pair[0]), learnt)
    assert without_draft.describe().calibration is None
    assert not set(without_draft.snapshot()) & set(learnt)


def test_what_was_learnt_is_found_whatever_number_of_threads_a_load_chooses(
    saved_pair: tuple[Path, Path], learnt: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is chosen by time, so a busy moment chooses another."""
    ((name, kept),) = learnt.items()
    kernels = " | same-bits"
    earlier = name.replace(kernels, f" | 2 threads{kernels}")  # as versions before named it
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    for state in ({name: kept}, {earlier: kept}):
        again = opened(options_of(*saved_pair), state)
        assert again._controller.costs.plain_ms(10) == pytest.approx(7.0)


def test_unreadable_state_is_a_notice_and_no_error(
    saved_pair: tuple[Path, Path], plain: Any
) -> None:
    identity = next(iter(plain.snapshot()))
    for own in (5, {"version": 1, "costs": {}}):
        backend = opened(options_of(saved_pair[0]), {identity: own})
        assert any("learnt anew" in notice for notice in backend.describe().notices), own


def test_a_4_bit_output_head_is_kept_where_it_is_asked_for_and_said(tmp_path: Path) -> None:
    """Exactness is relative to it: what drafts changes nothing."""
    module = tiny_llama(vocab_size=288)  # the kernels take 32 x n rows
    target = save_model(tmp_path / "target", module)
    draft = save_model(tmp_path / "draft", agreeing_draft(module))
    plain, whole = (opened(options_of(target, draft, dtype=d)) for d in ("4-bit", "4-bit-head"))
    assert (plain.describe().dtype, whole.describe().dtype) == ("4-bit", "4-bit-head")
    assert any("output head is kept in 4 bits" in each for each in whole.describe().notices)
    assert not any("output head" in each for each in plain.describe().notices)
    said = [backend.loaded.engine.target.forward([1, 2, 3]) for backend in (plain, whole)]
    off = float((said[0] - said[1]).norm() / said[0].norm())
    assert 0.01 < off < 0.5
    for backend in (plain, whole):
        backend.loaded.engine.target.cache.rollback(0)
    assert text_of(whole, "draft_model") == text_of(whole, "off")
    assert plain.loaded.identity != whole.loaded.identity
    odd = save_model(tmp_path / "odd", tiny_llama(vocab_size=VOCAB_SIZE))
    with pytest.raises(ModelError, match=r"32 x n tokens\. Use --dtype 4-bit"):
        opened(options_of(odd, dtype="4-bit-head"))


@pytest.mark.parametrize(
    ("layout", "became"),
    [
        ("awq", ["are used as they are"]),
        ("compressed int4, smaller groups", ["a second time"]),
        ("gptq out of order", ["a second time"]),
        ("gptq of 8 bits", []),
    ],
)
def test_what_became_of_weights_that_files_keep_in_4_bits_is_said(
    layout: str, became: list[str], tmp_path: Path
) -> None:
    """Of those that torch has no kernel for nothing was said."""
    pack, settings, _ = LAYOUTS[layout]
    packed_folder(tmp_path, pack, settings, tiny_llama(vocab_size=VOCAB_SIZE))
    save_tokenizer(tmp_path)
    notices = opened(options_of(tmp_path, dtype="4-bit")).describe().notices
    said = [each for each in notices if "4-bit weights of its files" in each]
    assert len(said) == len(became)
    assert all(words in notice for words, notice in zip(became, said, strict=True))


def test_a_model_whose_thoughts_cannot_be_ended_says_so(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", tiny_llama(vocab_size=VOCAB_SIZE))
    assert not opened(options_of(target)).describe().notices
    with (target / "chat_template.jinja").open("a") as template:
        template.write("{# <think> #}")  # it knows the mark, and the tokenizer has no token of it
    assert opened(options_of(target)).describe().notices == (load_module.THOUGHT_IS_TEXT,)


def test_a_model_whose_template_loses_its_texts_says_so(tmp_path: Path) -> None:
    target = save_model(tmp_path / "target", tiny_llama(vocab_size=VOCAB_SIZE))
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    (notice,) = opened(options_of(target)).describe().notices
    assert "leaves out your messages and earlier replies and the system prompt" in notice


def test_a_draft_without_room_beside_the_target_goes_to_the_next_device_and_it_is_said(
    saved_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    next_device = torch.device("cpu", 0)  # by name another one than the target's
    real_places, real_check = placement.draft_places, guesses.refuse_shortage

    def places(*asked: Any) -> Any:
        (beside,) = real_places(*asked)
        return beside, replace(beside, device=next_device)

    def refuse(folder: Path, place: Any) -> None:
        if place.device != next_device:
            raise MemoryShortage("draft needs 9 GiB, and 1 GiB is free.")
        real_check(folder, place)

    monkeypatch.setattr(load_module, "draft_places", places)
    monkeypatch.setattr(guesses, "refuse_shortage", refuse)
    backend = opened(options_of(*saved_pair))
    assert status(backend, "draft_model").is_available
    (said,) = [each for each in backend.describe().notices if "runs on" in each]
    assert "no room beside the target" in said and "draft needs 9 GiB" in said


def test_a_draft_that_does_not_fit_is_told_from_one_that_is_not_there(
    saved_pair: tuple[Path, Path], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = guesses.refuse_shortage

    def refuse(folder: Path, place: Any) -> None:
        if folder.name == "draft":
            raise MemoryShortage("draft needs 9 GiB, and 1 GiB is free.")
        real(folder, place)

    assert status(plain, "draft_model").code == "no_draft"
    monkeypatch.setattr(guesses, "refuse_shortage", refuse)
    backend = opened(options_of(*saved_pair))
    assert status(backend, "draft_model").code == "no_memory"
    assert "9 GiB" in status(backend, "draft_model").reason


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [None, "same-bits"])
def test_same_bits_leaves_out_the_kernels_that_change_with_the_rows(kernels: str | None) -> None:
    """A processor with AMX changes kernels at 33 rows; oneDNN names what it uses."""
    code = f"""
from localspec.loading.torch_start import quiet_torch
torch = quiet_torch(lambda phrase: None, {kernels!r})
torch.nn.functional.linear(torch.ones(4, 64).bfloat16(), torch.ones(64, 64).bfloat16())
"""
    environment = {n: v for n, v in os.environ.items() if n != "ONEDNN_MAX_CPU_ISA"}
    environment["ONEDNN_VERBOSE"] = "1"
    run = [sys.executable, "-c", code]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    (instructions,) = [line for line in ended.stdout.splitlines() if ",info,cpu,isa:" in line]
    assert "AMX" not in instructions.upper() and "INTEL AVX" in instructions.upper()


@pytest.mark.parametrize(("flags", "is_strict"), [("avx2 fma", True), ("avx2 avx512f", False)])
def test_sums_of_mkl_are_strict_where_a_processor_has_no_avx_512(
    flags: str, is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_start, "cpu_flags", lambda: frozenset(flags.split()))
    assert (library_settings("same-bits").get("MKL_CBWR") == "AUTO,STRICT") is is_strict
    assert "MKL_CBWR" not in library_settings("fastest")


def test_the_fastest_kernels_may_use_all_instructions() -> None:
    assert library_settings("same-bits")["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert "ONEDNN_MAX_CPU_ISA" not in library_settings("fastest")


@NEEDS_BF16
def test_prompts_of_all_lengths_do_not_fill_the_memory_with_kernels() -> None:
    code = """
import psutil
from localspec.loading.torch_start import quiet_torch
torch = quiet_torch(lambda phrase: None, None)
from localspec.weights.dense import PackedLinear
weight, rows = torch.ones(256, 256).bfloat16(), torch.ones(900, 256).bfloat16()
layer = PackedLinear(weight, None)
memory, taken = psutil.Process().memory_info, []
for count in range(4, 900):
    layer(rows[:count])
    taken.append(memory().rss)
print((taken[-1] - taken[500]) // 2**20)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) < 60  # MiB: 400 kernels would take 200 and more
