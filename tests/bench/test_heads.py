"""`bench --heads DIR`: what was named becomes arms, and the best of them says whether it pays."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from localspec.bench.arms import parse_arms
from localspec.bench.heads import NamedResult, gains, named_results, render_gains, settings_of
from localspec.core.errors import ConfigError, ModelError
from localspec.core.options import LoadOptions
from localspec.formats.fingerprint import NOTE, fingerprint
from localspec.machine.trained import Artifact
from tests.kit.tiny import tiny_llama

PLACE = Path("place")


@pytest.fixture(scope="module")
def heads_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "t"
    tiny_llama().save_pretrained(folder)
    return folder


def note(target: Path | None, kind: str, **changes: Any) -> Artifact:
    mark = "another" if target is None else fingerprint(target)
    values: dict[str, Any] = {"acceptance": (0.6, 0.4, 0.2), "before": None, "num_tokens": 1,
                              "num_steps": 1, "minutes": 1.0, **changes}  # fmt: skip
    return Artifact(kind, "t", mark, **values)


def trained(folder: Path, target: Path | None, kind: str) -> str:
    """A result by its note and its kind alone. target: None for one of other weights."""
    folder.mkdir()
    (folder / NOTE).write_text(json.dumps(asdict(note(target, kind))))
    name = "config.json" if kind == "draft" else "head.json"
    (folder / name).write_text(json.dumps({"kind": kind}))
    return str(folder)


def named(target: Path, home: Path, *heads: str, draft: str | None = None) -> Any:
    options = LoadOptions(model=str(target), home=home, heads=heads, draft=draft)
    return named_results(options, pytest.fail)


def test_a_head_stays_a_head_and_a_draft_is_loaded_as_one(
    heads_target: Path, tmp_path: Path
) -> None:
    head = trained(tmp_path / "head", heads_target, "medusa")
    draft = trained(tmp_path / "draft", heads_target, "draft")
    options, found = named(heads_target, tmp_path, head, draft)
    assert (options.heads, options.draft) == ((head,), draft)
    assert [each.drafter for each in found] == ["medusa", "draft_model"]
    options, found = named(heads_target, tmp_path, draft=draft)
    assert (options.draft, found) == (draft, []), "a draft named as such is compared as ever"


def test_every_length_that_was_held_out_is_compared_with_the_chosen_one(heads_target: Path) -> None:
    results = [
        NamedResult(PLACE, "medusa", note(heads_target, "medusa")),
        NamedResult(PLACE, "mtp", None),
    ]
    arms = [arm.name for arm in parse_arms(settings_of(results, None).arms)]
    assert arms == [
        "off", "medusa@1", "medusa@2", "medusa@3", "medusa",
        "mtp@1", "mtp@2", "mtp@3", "mtp@4", "mtp", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "draft", "sentence"),
    [
        (("eagle", "eagle"), None, "both for eagle.*each by itself"),
        (("draft",), "else", "both name a draft"),
    ],
)
def test_two_of_a_kind_are_refused(
    kinds: tuple[str, ...], draft: str | None, sentence: str, heads_target: Path, tmp_path: Path
) -> None:
    heads = [trained(tmp_path / str(n), heads_target, kind) for n, kind in enumerate(kinds)]
    with pytest.raises(ConfigError, match=sentence):
        named(heads_target, tmp_path, *heads, draft=draft)


def test_a_result_for_other_weights_and_a_folder_without_one_are_refused(
    heads_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="other weights"):
        named(heads_target, tmp_path, trained(tmp_path / "head", None, "medusa"))
    with pytest.raises(ModelError, match="no head at"):
        named(heads_target, tmp_path, str(tmp_path / "gone"))


def row(arm: str, ratio: float | None, **changes: Any) -> dict[str, Any]:
    return {"arm": arm, "temperature": 0.0, "task": "all", "ratio_to_off": ratio,
            "ratio_low": None, "ratio_high": None, **changes}  # fmt: skip


def said(*rows: dict[str, Any], **changes: Any) -> tuple[dict[str, Any], str]:
    named = [NamedResult(PLACE, "medusa", note(None, "medusa", **changes))]
    (gain,) = gains({"rows": rows}, named)
    json.dumps(gain, allow_nan=False)
    return gain, render_gains([gain])


def test_the_best_arm_is_named_with_its_gain() -> None:
    best = row("medusa@2", 1.69, ratio_low=1.5, ratio_high=1.8)
    others = row("medusa", 1.6), row("medusa@3", None), row("ngram", 2.0)
    gain, words = said(best, *others, row("medusa@1", 3.0, task="code"), before=(0.3,))
    assert gain["pays"] and gain["best"]["arm"] == "medusa@2"
    assert "pays here: 1.69 times the speed of plain decoding (1.50 to 1.80) as medusa@2" in words
    assert "Accepted by position (held out): 60%, 40%, 20%" in words
    assert "Before the training (held out): 30%" in words


def test_a_loss_is_called_a_loss() -> None:
    gain, words = said(row("medusa@1", 0.9), row("medusa@2", 1.02, ratio_low=1.01, ratio_high=1.03))
    assert gain["pays"] is False and "does not pay here: at best 1.02 times" in words
    assert "Before the training" not in words


@pytest.mark.parametrize("limits", [(0.55, 1.89), (None, None)])
def test_a_gain_whose_interval_holds_plain_decoding_is_not_certain(
    limits: tuple[float | None, float | None],
) -> None:
    """The best of several lengths is partly luck, and of one prompt nothing but luck."""
    gain, words = said(row("medusa@2", 1.22, ratio_low=limits[0], ratio_high=limits[1]))
    assert gain["pays"] is None and "not certain: 1.22 times" in words and "--limit" in words


def test_the_arm_that_surely_gains_most_is_the_best() -> None:
    wild = row("medusa@3", 2.5, ratio_low=0.6, ratio_high=4.0)
    gain, _ = said(wild, row("medusa@1", 1.3, ratio_low=1.2, ratio_high=1.4))
    assert gain["best"]["arm"] == "medusa@1" and gain["pays"] is True


def test_a_gain_that_was_not_measured_is_unknown() -> None:
    gain, words = said(row("medusa", None))
    assert (gain["best"], gain["pays"]) == (None, None) and "is not known" in words
