"""A drafter is one file and one registry entry: what is declared there is seen everywhere else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.bench.arms import default_arms
from localspec.bench.settings import suite_settings
from localspec.chat.tune_up import TuneUp, TuneUpRun, in_words, one_of_each_family
from localspec.core.config import SHIPPED_PROFILES
from localspec.core.decoding import OFF
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY, DrafterInfo, colour_of, drafter_class, planned
from localspec.engine.engine import Engine
from localspec.loading.drafters import build_drafters
from localspec.machine.memory import GIB, Room
from localspec.machine.planner import plan
from localspec.machine.plans import PlanRequest
from localspec.machine.profiles import load_profiles
from localspec.web.models.models_controller import PAGE
from localspec.web.proof.tokens import kind_of
from tests.kit.tiny import Plans, play, tiny_llama, with_cache

FILE = """
    from localspec.core.decoding import chain

    class Sevens:
        name = "sevens"
        shapes_itself = False
        memory_bytes = 0

        @classmethod
        def build(cls, parts):
            return cls()

        def signal(self, sequence):
            return "always"

        def propose(self, sequence, plan):
            return chain((7,) * plan.num_draft_tokens)

        def observe(self, sequence, outcome):
            pass
"""
SEVENS = DrafterInfo(
    name="sevens",
    where="localspec_sevens:Sevens",
    label="the row of sevens",
    summary="the number seven, again and again",
    family="self",
    colour="#123456",
    token_kind="self",
    plan_rank=3,
)


@pytest.fixture
def sevens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A drafter of one file and one entry."""
    (tmp_path / "localspec_sevens.py").write_text(textwrap.dedent(FILE))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(REGISTRY, SEVENS.name, SEVENS)
    return SEVENS.name


def test_a_new_drafter_is_built_and_drafts(sevens: str) -> None:
    target = with_cache(tiny_llama())
    built, statuses = build_drafters(Parts(target), lambda phrase: None)
    assert [one.name for one in statuses if one.is_available][-1] == sevens
    plain = play(Engine(target, {}), (1, 2, 3), Plans((OFF, 0)), 12).tokens
    drafted = play(Engine(target, built), (1, 2, 3), Plans((sevens, 3)), 12).tokens
    assert drafted == plain


def test_a_new_drafter_has_its_name_and_colour_on_the_page(sevens: str) -> None:
    runs = (TuneUpRun("code", 0.0, OFF, 10, 200.0, 0), TuneUpRun("code", 0.0, sevens, 10, 100.0, 5))
    result = TuneUp(runs, 2)
    assert "The row of sevens: 2.0x faster than without drafting on code." in in_words(result)
    assert "<th>the row of sevens</th>" in PAGE.tuned(result, is_running=False)
    assert kind_of(sevens) == "self" and colour_of(sevens) == "#123456"


def test_a_new_drafter_is_planned(sevens: str) -> None:
    entry = load_profiles((SHIPPED_PROFILES,))["qwen3"].models["Qwen/Qwen3-0.6B"]
    report = plan(PlanRequest(replace(entry, drafts=(), packed=None), Room("cpu", 64 * GIB)))
    found = next(each for each in report.plans if each.drafter == sevens)
    assert found.reason.startswith("The number seven, again and again.")


def test_a_new_drafter_is_tuned_and_benched(sevens: str, tmp_path: Path) -> None:
    assert one_of_each_family((sevens, "ngram")) == [sevens, "ngram"]
    assert one_of_each_family(("self_quant", sevens)) == ["self_quant"], "one of its family"
    assert sevens in default_arms()
    assert sevens in suite_settings("drafters", tmp_path).arms
    assert f"{sevens}@1-8" in suite_settings("full", tmp_path).arms


@pytest.mark.parametrize("name", REGISTRY)
def test_an_entry_names_a_class_of_its_name(name: str) -> None:
    assert drafter_class(name).name == name == REGISTRY[name].name


def test_each_place_among_the_plans_is_taken_once() -> None:
    assert [info.name for info in planned()] == ["draft_model", "mtp", "ngram", "self_quant"]
    assert [info.plan_rank for info in planned()] == [0, 1, 2, 3]


def test_the_declarations_are_read_without_torch() -> None:
    code = "import sys, localspec.drafters.registry; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr
