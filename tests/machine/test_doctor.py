"""What the doctor finds, misses and admits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core.config import settings_for
from localspec.machine import doctor
from localspec.machine.doctor import doctor_report, never_run, render
from localspec.machine.hardware import probe
from tests.kit.fake_nvml import CPU_BUILD, CUDA_BUILD, LINUX, FakeNvml

GPU = probe(FakeNvml(), LINUX, CUDA_BUILD)
CPU = probe(FakeNvml(failing={"nvmlInit": 18}), LINUX, CPU_BUILD)


def names(report: dict[str, list[dict[str, str]]], part: str) -> set[str]:
    return {each["name"] for each in report[part]}


def demo_in(project: Path) -> None:
    for name in doctor.DEMO_FOLDERS:
        folder = project / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"")


def test_a_whole_machine_lacks_nothing(tmp_path: Path) -> None:
    demo_in(tmp_path)
    report = doctor_report(settings_for(tmp_path), GPU, tmp_path)
    assert report["missing"] == [] and report["device"] == "cuda"
    assert {"python", "torch", "GPU", "RAM", "bitsandbytes", "home", "disk", "demo pair"} <= names(
        report, "found"
    )
    assert "10.0 GiB of 12.0 GiB free" in render(report)
    assert json.loads(json.dumps(report)) == report


def test_the_report_begins_with_what_to_do_and_then_says_what_works(tmp_path: Path) -> None:
    text = render(doctor_report(settings_for(tmp_path), CPU, tmp_path))
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert heads[:3] == ["What is wrong, and what to do", "What will work", "Details"]
    assert "1. GPU: " in text and "     Restart the computer." in text
    assert "Models run on the processor" in text and "in bf16, with 20.0 GiB" in text
    assert "opens a chat with the included" not in text, "the pair is missing"
    demo_in(tmp_path)
    whole = render(doctor_report(settings_for(tmp_path), GPU, tmp_path))
    assert whole.startswith("Nothing is wrong.\n\nWhat will work\n  Models run on the GPU (")
    assert "python app.py opens a chat with the included model pair." in whole
    assert whole.index("may be the first to:") < whole.index("Captured CUDA graphs")
    assert whole.index("nor possible here: ") < whole.index("Apple GPUs")


def test_a_computer_without_a_card_lacks_nothing(tmp_path: Path) -> None:
    demo_in(tmp_path)
    bare = probe(FakeNvml(failing={"nvmlInit": 12}), LINUX, CPU_BUILD)
    report = doctor_report(settings_for(tmp_path), bare, tmp_path)
    assert report["missing"] == [] and "no NVIDIA driver" in render(report)


def test_a_driver_problem_is_missing_with_its_fix(tmp_path: Path) -> None:
    report = doctor_report(settings_for(tmp_path), CPU, tmp_path)
    (gpu,) = [each for each in report["missing"] if each["name"] == "GPU"]
    assert "version mismatch" in gpu["fact"] and gpu["fix"] == "Restart the computer."


def test_a_notice_without_a_remedy_tells_what_is_used(tmp_path: Path) -> None:
    shared = probe(FakeNvml(failing={"nvmlDeviceGetMemoryInfo": 3}), LINUX, CUDA_BUILD)
    report = doctor_report(settings_for(tmp_path), shared, tmp_path)
    (gpu,) = [each for each in report["missing"] if each["name"] == "GPU"]
    assert (
        "free RAM is used" in gpu["fact"]
        and gpu["fix"] == "localspec uses NVIDIA GeForce RTX 4070."
    )


def test_an_absent_demo_pair_is_missing(tmp_path: Path) -> None:
    report = doctor_report(settings_for(tmp_path), CPU, tmp_path)
    assert "demo pair" in names(report, "missing")
    assert "python -m tools.demo_pair" in render(report)


@pytest.mark.parametrize("place", ["file", "/proc"])  # where not even root may make a folder
def test_a_home_that_cannot_be_written_is_missing(tmp_path: Path, place: str) -> None:
    if not Path("/proc").exists():
        pytest.skip("this system has no /proc")
    (tmp_path / "file").write_text("")
    report = doctor_report(settings_for(tmp_path / place / "home"), CPU, tmp_path)
    assert "home" in names(report, "missing")


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [("bitsandbytes", None, "self_quant"), ("bitsandbytes", "0.49.2", "0.49.2")],
)
def test_bitsandbytes_absent_or_old_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str, words: str
) -> None:
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda n: version if n == package else real(n))
    report = doctor_report(settings_for(tmp_path), CPU, tmp_path)
    (found,) = [each for each in report["missing"] if each["name"] == package]
    assert words in found["fact"] and "0.50" in found["fix"]


def test_a_little_disk_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "disk" in names(doctor_report(settings_for(tmp_path), CPU, tmp_path), "missing")


def test_a_disk_that_does_not_answer_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Path) -> None:
        raise OSError("the network drive is gone")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    report = doctor_report(settings_for(tmp_path), CPU, tmp_path)
    assert {"name": "disk", "value": "– free"} in report["found"]


def test_a_broken_profile_is_missing_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "profiles" / "models"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("titel = 'x'")
    report = doctor_report(settings_for(tmp_path), CPU, tmp_path)
    (found,) = [each for each in report["missing"] if each["name"] == "profiles"]
    assert "'titel'" in found["fact"] and "'title'" in found["fact"]


def test_a_torch_that_cannot_start_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> None:
        raise OSError("libtorch.so: cannot open")

    monkeypatch.setattr(doctor, "probe", lambda: CPU)
    monkeypatch.setattr(doctor, "confirmed_by_torch", broken)
    report = doctor_report(settings_for(tmp_path), project=tmp_path)
    (found,) = [each for each in report["missing"] if each["name"] == "torch"]
    assert "libtorch.so" in found["fact"]


def test_untried_paths_follow_this_machines_hardware() -> None:
    on_gpu = {each["path"]: each["is_possible_here"] for each in never_run(GPU)}
    on_cpu = {each["path"]: each["is_possible_here"] for each in never_run(CPU)}
    weights = "Weights in 4 bits on CUDA, NF4 and in groups"
    assert on_gpu[weights] and not on_cpu[weights]
    windows = replace(CPU, host=replace(LINUX, system="Windows"))
    assert {each["path"] for each in never_run(windows) if each["is_possible_here"]} == {"Windows"}
    assert on_gpu["Captured CUDA graphs"] and not on_cpu["Captured CUDA graphs"]


def test_the_doctor_writes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "not" / "yet"
    doctor_report(settings_for(home), CPU, tmp_path)
    assert list(tmp_path.iterdir()) == []
