"""Settings of a training run over a tiny target, and what it reports."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from localspec.loading.placement import Place
from localspec.machine.hardware import probe
from localspec.training.prompt_files import read_prompts
from localspec.training.request import TrainRequest
from localspec.training.run import TrainSettings
from tests.kit.tiny import tiny_llama
from tools.demo_pair.tokenizer import save_tokenizer

CPU = torch.device("cpu")
PLACE = Place(replace(probe(), device="cpu", gpu=None), CPU, torch.float32, None, 256)


def settings(target: Path, prompts: Path, folder: Path, **changes: Any) -> TrainSettings:
    """changes: of the request's flags and of the settings."""
    flags: dict[str, Any] = {
        "kind": "draft", "max_answer_length": 12, "batch": 512, "rate": 4e-3, "answer_minutes": 5.0,
    }  # fmt: skip
    usual: dict[str, Any] = {
        "target": target, "target_name": "tiny", "place": PLACE,
        "prompts": read_prompts(prompts), "home": folder / "home", "out": folder / "out",
        "work": folder / "work", "num_steps": 4, "row_length": 96,
    }  # fmt: skip
    own = {each.name for each in fields(TrainSettings)} - {"request"}
    flags |= {name: value for name, value in changes.items() if name not in own}
    usual |= {name: value for name, value in changes.items() if name in own}
    return TrainSettings(TrainRequest(**flags), **usual)


def make_folder(folder: Path, tokenizer: Tokenizer, seed: int) -> Path:
    """A random target whose answers are neither one token over and over nor all alike."""
    tiny_llama(seed, num_layers=4, vocab_size=420).save_pretrained(folder)
    save_tokenizer(tokenizer, folder, 256)
    return folder


class Said(list[str]):
    """Report lines, kept."""

    def __call__(self, line: str) -> None:
        self.append(line)
