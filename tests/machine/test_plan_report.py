"""From what a person asks to a report: names, folders, values, the catalogue, the text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from localspec.core.config import PROJECT_FOLDER, Settings, settings_for
from localspec.core.errors import ConfigError, ModelError
from localspec.core.options import LoadOptions
from localspec.core.speculation import Measurement
from localspec.core.units import gib
from localspec.loading.local_backend import open_local_backend
from localspec.machine.catalogue import folder_model
from localspec.machine.hardware import Hardware, probe
from localspec.machine.memory import Room, full_precision, room_for
from localspec.machine.plan_report import machine_for, make_plans, render
from localspec.machine.plans import PlanReport
from localspec.machine.sources import find_model
from tests.kit.fake_nvml import CUDA_BUILD, GIB, LINUX, FakeNvml
from tests.kit.model_folders import llama_shapes, save_header

GPU = probe(FakeNvml(free_gib=10, total_gib=12), LINUX, CUDA_BUILD)
CPU = probe(FakeNvml(failing={"nvmlInit": 12}), LINUX, CUDA_BUILD)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
TOKENS = {"a": 0, "b": 1, "c": 2}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


def model_folder(folder: Path, layers: int = 12, tokens: dict[str, int] | None = None) -> str:
    folder.mkdir()
    config = {**CONFIG, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    content = {"model": {"vocab": tokens or TOKENS}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    save_header(folder / "model.safetensors", llama_shapes(config))
    return str(folder)


def plans_of(
    settings: Settings, hardware: Hardware = GPU, vram: float | None = None, **options: Any
) -> dict[str, Any]:
    planned = hardware if vram is None else machine_for(None, (vram,), hardware)
    return make_plans(LoadOptions(**options), settings, planned).as_dict()


def of_gib(*vram_gib: float) -> Hardware:
    return machine_for(None, vram_gib, GPU)


# -- the room -------------------------------------------------------------------------------


def test_the_room_is_what_the_machine_has_free() -> None:
    assert (room_for(GPU).device, room_for(GPU).free_bytes) == ("cuda", 10 * GIB)
    assert (room_for(CPU).device, room_for(CPU).free_bytes) == ("cpu", 20 * GIB)


def test_the_table_of_cards_in_the_readme_is_what_is_planned(settings: Settings) -> None:
    readme = (PROJECT_FOLDER / "README.md").read_text("utf-8")
    row = r"^\| (\d+) GB \| (\S+), (\S+) \| (.+) \| (\d+) \| (\S+ GiB) \|$"
    rows = re.findall(row, readme, re.M)
    assert [int(card) for card, *_ in rows] == [6, 8, 12, 16, 24]
    for card, *shown in rows:
        hardware = machine_for(None, (float(card),), CPU)
        best = make_plans(LoadOptions(context=8192), settings, hardware).plans[0]
        own = {"mtp": "its own (MTP)", "ngram": "n-gram lookup"}
        target, draft = best.target.name, best.draft_name or own[best.drafter]
        names = [name.rpartition("/")[2] for name in (target, draft)]
        names.insert(1, best.precision)
        assert shown == [*names, str(best.context_length), gib(best.bytes.total, ceil)]


def test_given_memory_is_planned_for_as_a_gpu_even_without_one() -> None:
    room = room_for(machine_for(None, (8,), CPU))
    assert (room.device, room.total_bytes) == ("cuda", 8 * GIB)


def test_a_desktop_takes_its_part_of_the_card_that_is_planned_for() -> None:
    """Of 12 GiB drivers report 10.5 to 11.3 as free."""
    hardware = machine_for(None, (8, 12), GPU)
    room, report = room_for(hardware), PlanReport("cuda", (), ())
    assert 10.5 * GIB <= room.free_bytes <= 11.3 * GIB and room.has_display
    assert render(report, room).startswith("Planning for a GPU with 10.9 GiB free")
    assert hardware.gpus[1].free_bytes == 8 * GIB, "no desktop is drawn with the other one"
    assert "11.0 GiB free" in render(report, Room("cuda", int(10.97 * GIB))), (
        "rounded to the nearest"
    )


@pytest.mark.parametrize(("device", "gib"), [("cuda", 8), ("cpu", 0)])
def test_a_gpu_that_is_planned_for_may_be_named(device: str, gib: float) -> None:
    assert machine_for(device, (gib,), CPU).device == device


def test_no_gpu_memory_means_the_cpu() -> None:
    room = room_for(machine_for(None, (0,), GPU))
    assert (room.device, room.free_bytes) == ("cpu", 20 * GIB)


def test_hidden_gpu_memory_is_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GPU.gpu is not None
    hidden = replace(GPU, gpu=replace(GPU.gpu, free_bytes=None, total_bytes=None))
    monkeypatch.setattr("localspec.machine.memory.confirmed_by_torch", lambda _: GPU)
    assert room_for(hidden).free_bytes == 10 * GIB


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e300])
def test_memory_that_is_no_amount_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--vram-gib"):
        machine_for(None, (value,), GPU)


def test_the_device_decides_the_full_precision() -> None:
    assert full_precision(None, GPU) == "bf16"
    assert full_precision(None, CPU) == "bf16"
    old = replace(CPU, host=replace(LINUX, multiplies_bf16=False))
    assert full_precision(None, old) == "fp32"
    assert full_precision("float32", GPU) == "fp32"
    turing = probe(FakeNvml(capability=(7, 5)), LINUX, CUDA_BUILD)
    assert full_precision(None, turing) == "fp16"
    assert full_precision(None, machine_for(None, (12.0,), turing)) == "fp16"
    assert full_precision("bf16", turing) == "bf16"
    assert full_precision(None, replace(CPU, device="mps")) == "bf16"
    with pytest.raises(ConfigError, match="Choose one of: fp32, fp16, bf16"):
        full_precision("bfloat61", GPU)


@pytest.mark.parametrize(
    ("gibs", "asked", "places"),
    [
        ((16, 8), None, {None}),
        ((8, 16), "cuda:1", {"cuda:1"}),
        ((16,), "cpu", {"cpu"}),
        ((0,), "cpu", {None}),
    ],
)
def test_a_draft_may_be_planned_for_another_device(
    settings: Settings, gibs: tuple[float, ...], asked: str | None, places: set[str | None]
) -> None:
    options = LoadOptions(model="Qwen/Qwen3-8B", draft_device=asked)
    plans = make_plans(options, settings, of_gib(*gibs)).plans
    assert {each.draft_device for each in plans if each.drafter == "draft_model"} == places
    heads = [each for each in plans if each.draft and each.draft.head]
    assert heads and {each.draft_device for each in heads} == {None}, "they read its states"


# -- one model ------------------------------------------------------------------------------


OF_QWEN3_8B = {
    ("draft_model", "Qwen/Qwen3-0.6B"),
    ("draft_model", "Qwen/Qwen3-1.7B"),
    ("block", "deepseek-ai/dspark_qwen3_8b_block7"),
    ("block", "z-lab/Qwen3-8B-DFlash-b16"),
    ("eagle", "RedHatAI/Qwen3-8B-speculator.eagle3"),
}


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-8b", "Qwen3-8B"])
def test_a_known_model_brings_its_drafts(settings: Settings, name: str) -> None:
    report = plans_of(settings, vram=40, model=name)
    drafts = {(each["drafter"], each["draft"]) for each in report["plans"] if each["draft"]}
    assert drafts == OF_QWEN3_8B


def test_an_unknown_model_names_the_nearest(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'Qwen/Qwen3-8B'"):
        plans_of(settings, model="Qwen/Qwen3-8X")


@pytest.mark.parametrize("name", ["Qwen/Qwen2-7B", "qwen4-8b", "Qwen/Qwen3-9B"])
def test_another_generation_or_size_is_not_what_was_meant(settings: Settings, name: str) -> None:
    with pytest.raises(ConfigError, match=r"size is not known\. Fetch it"):
        plans_of(settings, model=name)


def test_files_in_4_bits_are_offered_before_those_that_would_be_quantised(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = plans_of(settings, vram=12, model="Qwen/Qwen3-8B")["plans"]
    assert {each["target"] for each in four} == {"Qwen/Qwen3-8B-AWQ"}
    assert "about 5.7 GiB to fetch. The 16-bit files, 15.3 GiB," in four[0]["reason"]
    whole = plans_of(settings, vram=40, model="Qwen/Qwen3-8B")["plans"]
    assert {each["target"] for each in whole if each["precision"] == "bf16"} == {"Qwen/Qwen3-8B"}
    said = [each["target"] for each in plans_of(settings, vram=12)["plans"] if each["draft"]]
    assert said.index("Qwen/Qwen2.5-7B-Instruct-AWQ") < said.index(
        "meta-llama/Llama-3.1-8B-Instruct"
    )
    monkeypatch.setattr("localspec.machine.sources.cached_folder", lambda hub_id: Path("here"))
    here = plans_of(settings, vram=12, model="Qwen/Qwen3-8B")["plans"]
    assert {each["target"] for each in here} == {"Qwen/Qwen3-8B"}, "nothing is to be fetched"


def test_a_copy_in_4_bits_has_the_drafts_of_its_model(settings: Settings) -> None:
    plans = plans_of(settings, vram=40, model="Qwen/Qwen3-8B-AWQ")["plans"]
    assert {(each["drafter"], each["draft"]) for each in plans if each["draft"]} == OF_QWEN3_8B


def test_a_folder_is_planned_with_its_token_map_compared(
    settings: Settings, tmp_path: Path
) -> None:
    target = model_folder(tmp_path / "target")
    draft = model_folder(tmp_path / "draft", layers=1)
    report = plans_of(settings, CPU, model=target, draft=draft, context=2048)
    best = report["plans"][0]
    assert report["device"] == "cpu"
    assert (best["target"], best["drafter"], best["draft"]) == ("target", "draft_model", "draft")
    assert best["context"] == 2048
    assert "all 3 tokens have the same id" in best["reason"]


def test_a_folder_with_one_swapped_id_is_refused_as_draft(
    settings: Settings, tmp_path: Path
) -> None:
    target = model_folder(tmp_path / "target")
    draft = model_folder(tmp_path / "draft", layers=1, tokens={"a": 0, "b": 2, "c": 1})
    report = plans_of(settings, CPU, model=target, draft=draft)
    assert "draft_model" not in {each["drafter"] for each in report["plans"]}
    (reason,) = [each["reason"] for each in report["refused"] if each["drafter"] == "draft_model"]
    assert "'b' has id 1 in the target and 2 in the draft" in reason


def test_a_folder_without_a_config_says_what_it_lacks(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        plans_of(settings, model=str(tmp_path))


@pytest.mark.parametrize(
    ("lost", "changed"),
    [
        ("tokenizer.json", {}),
        ("model.safetensors", {}),
        ("", {"auto_map": {"AutoModelForCausalLM": "code.Model"}}),
        ("", {"quantization_config": {"quant_method": "torchao"}}),
        ("", {"model_type": "bloom"}),
        ("", {"model_type": "bert"}),
        ("", {"model_type": "bart", "is_encoder_decoder": True}),
        ("", {"model_type": "deepseek_v3", "kv_lora_rank": 8}),
    ],
)
def test_what_loading_refuses_the_plan_and_the_models_tab_refuse_in_the_same_words(
    settings: Settings, tmp_path: Path, lost: str, changed: dict[str, Any]
) -> None:
    folder = Path(model_folder(tmp_path / "target"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    if lost:
        (folder / lost).unlink()
    said = set[str]()
    for asked in (
        lambda: open_local_backend(LoadOptions(model=str(folder)), tmp_path, print),
        lambda: plans_of(settings, CPU, model=str(folder)),
        lambda: folder_model(folder),
    ):
        with pytest.raises(ModelError) as raised:
            asked()
        said.add(str(raised.value))
    assert len(said) == 1, said


def test_one_drafter_can_be_asked_for(settings: Settings) -> None:
    report = plans_of(settings, vram=40, model="Qwen/Qwen3-8B", drafter="ngram")
    assert {each["drafter"] for each in report["plans"]} == {"ngram"}
    with pytest.raises(ConfigError, match="'ngram'"):
        plans_of(settings, model="Qwen/Qwen3-8B", drafter="n-gram")


def test_a_kind_of_head_that_no_model_has_is_refused_in_words(settings: Settings) -> None:
    report = plans_of(settings, vram=24, model="Qwen/Qwen3-8B", drafter="assistant")
    assert report["plans"] == []
    (refused,) = report["refused"]
    assert (
        "published head for the assistant" in refused["reason"] and "--draft" in refused["reason"]
    )
    alone = plans_of(settings, vram=24, model="Qwen/Qwen3-8B", draft="none")["plans"]
    assert {each["draft"] for each in alone} == {None}
    other = plans_of(settings, vram=24, model="Qwen/Qwen3-8B", draft="z-lab/Qwen3-8B-DFlash-b16")
    assert other["plans"][0]["drafter"] == "block"


@pytest.mark.parametrize("context", [0, -5])
def test_a_context_that_holds_nothing_is_refused(settings: Settings, context: int) -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        plans_of(settings, model="Qwen/Qwen3-8B", context=context)


def test_a_persons_own_profile_is_found_in_the_home(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "models"
    folder.mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    target = model_folder(tmp_path / "mine" / "target")
    text = f"""default = "me/mine"
    [models."me/mine"]
    license = "own"
    folder = {json.dumps(target)}
    drafts = []
    """
    (folder / "mine.toml").write_text(text)
    report = plans_of(settings, CPU, profile="mine")
    assert {each["target"] for each in report["plans"]} == {"me/mine"}


def test_a_profiles_folder_named_by_path_keeps_its_drafts(
    settings: Settings, tmp_path: Path
) -> None:
    target = model_folder(tmp_path / "target")
    model_folder(tmp_path / "draft", layers=1)
    folder = tmp_path / "profiles" / "models"
    folder.mkdir(parents=True)
    lines = ['default = "pair/target"']
    for name, drafts in (("target", '"pair/draft"'), ("draft", "")):
        place = json.dumps(str(tmp_path / name))
        lines += [f'[models."pair/{name}"]', 'license = "own"', f"folder = {place}"]
        lines += [f"drafts = [{drafts}]"]
    (folder / "pair.toml").write_text("\n".join(lines))
    report = plans_of(settings, CPU, model=target)
    assert report["plans"][0]["draft"] == "pair/draft"
    catalogue = plans_of(settings, CPU, profile="pair")
    assert {each["target"] for each in catalogue["plans"]} == {"pair/target"}


# -- the catalogue --------------------------------------------------------------------------


@pytest.mark.parametrize("vram", [0, 4, 6, 8, 12, 16, 24])
def test_the_catalogue_says_something_of_every_model_and_drafter(
    settings: Settings, vram: float
) -> None:
    report = plans_of(settings, vram=vram, profile="qwen3")
    told = [(each["target"], each["drafter"]) for each in report["plans"]]
    assert len(told) == len(set(told))
    assert len(told) + len(report["refused"]) == 9 * 5
    free = 20 * GIB if vram == 0 else vram * GIB
    assert all(each["bytes"]["total"] <= free for each in report["plans"])


def test_the_catalogue_puts_first_what_the_models_tab_does(settings: Settings) -> None:
    """A draft counts more than twice the size; a processor reads a few gigabytes in time, and of a
    tied embedding the copy that is its output head."""
    targets = [plans_of(settings, vram=v, profile="qwen3")["plans"][0]["target"] for v in (8, 24)]
    assert targets == ["Qwen/Qwen3-4B-AWQ", "Qwen/Qwen3-32B-AWQ"]
    on_cpu = plans_of(settings, CPU, profile="qwen3")["plans"]
    assert on_cpu[0]["target"] == "Qwen/Qwen3-1.7B"
    looked_up = 2 * 151936 * 2048  # the embedding, in 16 bits
    assert on_cpu[0]["bytes"]["target_weights"] - looked_up <= 4e9
    assert on_cpu[-1]["bytes"]["target_weights"] > 4e9


def test_the_whole_catalogue_serialises(settings: Settings) -> None:
    report = plans_of(settings, vram=12)
    assert json.loads(json.dumps(report)) == report
    assert {each["target"].partition("/")[0] for each in report["plans"]} >= {"Qwen", "meta-llama"}


def test_every_draft_a_profile_names_is_known_to_the_profiles(settings: Settings) -> None:
    from localspec.machine.profiles import load_profiles

    profiles = load_profiles(settings.profile_folders)
    for profile in profiles.values():
        for entry in profile.models.values():
            if entry.path is None:
                for draft in (each for each in entry.drafts if each.head is None):
                    small = find_model(draft.id, profiles).shape
                    assert small.num_params < find_model(entry.id, profiles).shape.num_params


# -- measurements and text ------------------------------------------------------------------


def test_measurements_reach_the_report(settings: Settings) -> None:
    flat = {1: 10.0, 8: 10.0}
    measured = Measurement("Qwen/Qwen3-8B", "bf16", flat, {"ngram": 0.1}, {"ngram": (0.9,)})
    report = make_plans(LoadOptions(model="Qwen/Qwen3-8B"), settings, of_gib(40), (measured,))
    best = report.plans[0]
    assert best.drafter == "ngram" and best.expected_speedup is not None


def test_of_many_models_the_text_has_one_line_each_for_the_best(settings: Settings) -> None:
    report = make_plans(LoadOptions(), settings, of_gib(24))
    models = list(dict.fromkeys(each.target.name for each in report.plans))
    lines = render(report, Room("cuda", 24 * GIB)).splitlines()
    numbered = [line.split(",")[0].split() for line in lines[2:10]]
    assert numbered == [[f"{n}.", name] for n, name in enumerate(models[:8], 1)]
    assert lines[10].strip() == f"… and {len(models) - 8} more models (--json lists all)."
    assert len(lines) == 13 and "--model NAME" in lines[-1]


def test_the_text_shows_what_is_assumed_of_an_unmeasured_gain(settings: Settings) -> None:
    report = make_plans(LoadOptions(model="Qwen/Qwen3-8B", context=32768), settings, of_gib(24))
    text = render(report, Room("cuda", 24 * GIB), most=3)
    assert "Planning for a GPU with 24.0 GiB free." in text and "gain –" not in text
    gain = r"1\.\dx to \d\.\dx faster than without drafting \(assumed"
    assert re.search(rf"draft_model with \S+, context \d+: \S+ GiB, {gain}", text)
    assert f"and {len(report.plans) - 3} more plans" in text and "Refused:" in text
    first = report.plans[0]
    assert first.as_dict()["further_reply_bytes"] == first.bytes.target_kv + first.bytes.draft_kv
    assert f"further reply at the same time: {gib(first.bytes.further_reply, ceil)}" in text
    two = render(report, Room("cuda", 24 * GIB), other_gib=12.0)
    assert "a GPU with 24.0 GiB free, and a second one with 12.0 GiB." in two
    nothing = make_plans(LoadOptions(model="Qwen/Qwen3-8B"), settings, of_gib(2))
    assert "Nothing fits." in render(nothing, Room("cuda", 2 * GIB))
