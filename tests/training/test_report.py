"""A report multiplies what was held out with what was measured, and says when it would lose."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from localspec.core.errors import ModelError
from localspec.forward.fingerprint import fingerprint
from localspec.training.artifact import Artifact, deliver
from localspec.training.report import (
    LengthGain,
    ResultGain,
    measure_gains,
    render,
)
from tests.kit.tiny import agreeing_draft, tiny_llama
from tests.training.runs import PLACE
from tools.demo_pair.tokenizer import save_tokenizer


def gain(*lengths: LengthGain, plain_ms: float = 10.0) -> ResultGain:
    return ResultGain("out", "draft_model", "t", (0.8, 0.7), None, plain_ms, lengths, False)


def test_the_best_length_is_named_with_its_gain() -> None:
    found = gain(LengthGain(1, 1.8, 12.0, 1.5), LengthGain(2, 2.36, 14.0, 1.69))
    assert "1.69 times the speed of plain decoding, with 2 draft tokens" in render(found)
    assert found.as_dict()["pays"] and found.as_dict()["best"]["num_draft_tokens"] == 2


def test_a_loss_is_called_a_loss() -> None:
    found = gain(LengthGain(1, 1.8, 20.0, 0.9), LengthGain(2, 2.36, 40.0, 0.59))
    assert "would not pay here: at best 0.90 times" in render(found)
    assert "costs as much as 2.00 tokens without drafting and yields 1.80" in render(found)
    assert not found.as_dict()["pays"]


@pytest.fixture
def target(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    module = tiny_llama(0, num_layers=4, vocab_size=420)
    module.save_pretrained(tmp_path / "target")
    agreeing_draft(module).save_pretrained(tmp_path / "draft-weights")
    save_tokenizer(tokenizer, tmp_path / "target", 256)
    return tmp_path / "target"


def trained(target: Path, mark: str | None = None) -> Path:
    """A finished draft with a note of how well it did."""
    folder = target.parent / "draft"
    made = Artifact(
        "draft", "target", mark or fingerprint(target), (0.8, 0.7, 0.6), None, 1, 1, 0.1
    )
    source = target.parent / "draft-weights"
    deliver(folder, made, lambda part: source.rename(part) and None)
    return folder


@pytest.mark.slow
def test_costs_are_measured_with_the_drafter_itself(target: Path) -> None:
    said: list[str] = []
    (found,), _ = measure_gains(target, PLACE, [trained(target)], said.append)
    assert [each.num_draft_tokens for each in found.lengths] == [1, 2, 3]
    for each in found.lengths:
        assert each.round_ms > 0.0
        expected = each.tokens * found.plain_ms / each.round_ms
        assert each.speedup == pytest.approx(expected)
    assert found.lengths[2].tokens == pytest.approx(1 + 0.8 + 0.8 * 0.7 + 0.8 * 0.7 * 0.6)
    assert said == ["Loading the target.", f"measuring draft_model in {found.folder}"]


def test_a_result_for_other_weights_is_refused_before_anything_is_loaded(
    target: Path,
) -> None:
    said: list[str] = []
    with pytest.raises(ModelError, match="other weights"):
        measure_gains(target, PLACE, [trained(target, mark="another")], said.append)
    assert not said


def test_a_folder_that_was_not_trained_here_is_refused(target: Path) -> None:
    with pytest.raises(ModelError, match="was not made by"):
        measure_gains(target, PLACE, [target], lambda _: None)
