"""A whole comparison on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.backend import DrafterStatus
from localspec.bench import contest
from localspec.bench.prompts import Prompt
from localspec.bench.reference import Modules, transformers_peer
from localspec.bench.stage import Case, Stage, forget, own_controller, run_engine
from localspec.bench.suite import (
    BenchSettings,
    compare,
    listed,
    listed_numbers,
    repeated,
    run_bench,
)
from localspec.core import Proposal, SamplingParams
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.acceptance import Acceptance, Situation
from localspec.engine.controller import Controller
from localspec.engine.costs import WIDTHS, Costs
from localspec.engine.engine import Engine
from localspec.errors import ConfigError, ModelError, RequestError
from localspec.options import LoadOptions
from tests.tiny import END_ID, VOCAB_SIZE, agreeing_draft, on_transformers, tiny_llama, with_cache

PROMPTS = [
    Prompt("a", "chat", "hello there"),
    Prompt("b", "code", "write a loop"),
    Prompt("c", "chat", "say it again, say it again"),
]


def measured_costs() -> Costs:
    """A table such as calibration leaves behind, so that tests need not take the time."""
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 128, 10.0 + 0.1 * width)
    for name in ("ngram", "draft_model"):
        costs.set_draft_step(name, 128, 0.5)
    return costs


@pytest.fixture
def stage() -> Stage:
    target = tiny_llama()
    draft = DraftModelDrafter(with_cache(agreeing_draft(target)), VOCAB_SIZE)
    engine = Engine(with_cache(target), {"ngram": NgramDrafter(), "draft_model": draft})
    return Stage(
        engine=engine,
        controller=Controller(engine.drafters, measured_costs(), Acceptance()),
        render=lambda text: [1 + ord(character) % (VOCAB_SIZE - 2) for character in text],
        end_ids=frozenset({END_ID}),
        statuses=(
            DrafterStatus("ngram", True, "ready"),
            DrafterStatus("draft_model", True, "ready"),
        ),
        context_length=256,
        precision="float32",
        machine={"target": "tiny"},
    )


@pytest.fixture
def module_stage(stage: Stage) -> Stage:
    """The same models, run by transformers' own modules."""
    target = tiny_llama()
    draft = DraftModelDrafter(on_transformers(agreeing_draft(target)), VOCAB_SIZE)
    return replace(stage, engine=Engine(on_transformers(target), {"draft_model": draft}))


@pytest.fixture
def folder_stage(stage: Stage, tmp_path: Path) -> Stage:
    """The same models on our own forward, with the folders they came from."""
    target = tiny_llama()
    target.save_pretrained(tmp_path / "target")
    agreeing_draft(target).save_pretrained(tmp_path / "draft")
    return replace(stage, target_folder=tmp_path / "target", draft_folder=tmp_path / "draft")


def silent(phrase: str) -> None:
    pass


def settings(**changes: Any) -> BenchSettings:
    arms = ("off", "ngram", "draft_model@3", "auto")
    plain = BenchSettings(max_tokens=16, temperatures=(0.0,), arms=arms)
    return replace(plain, **changes)


def rows_of(result: dict[str, Any], arm: str, task: str = "all") -> list[dict[str, Any]]:
    return [row for row in result["rows"] if (row["arm"], row["task"]) == (arm, task)]


def test_every_arm_writes_what_plain_decoding_writes(stage: Stage) -> None:
    result = compare(stage, PROMPTS, settings(), silent)
    assert result["differences"] == [] and result["ending"] is None
    for arm in ("off", "ngram", "draft_model@3", "auto"):
        (row,) = rows_of(result, arm)
        assert (row["num_prompts"], row["identical_to_off"]) == (3, 0)
        assert row["tokens_per_second"] > 0
    assert rows_of(result, "draft_model@3")[0]["acceptance_rate"] > 0
    json.dumps(result, allow_nan=False)


TRANSFORMERS_ARMS = (
    "transformers", "transformers_draft", "transformers_draft@3", "transformers_lookup",
    "transformers_lookup@2",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["module_stage", "folder_stage"])
def test_transformers_runs_the_same_weights_to_the_same_tokens(
    request: pytest.FixtureRequest, kind: str
) -> None:
    stage: Stage = request.getfixturevalue(kind)
    result = compare(stage, PROMPTS, settings(arms=TRANSFORMERS_ARMS), silent)
    assert result["differences"] == []
    for arm in TRANSFORMERS_ARMS:
        (row,) = rows_of(result, arm)
        assert row["identical_to_off"] == 0
        assert row["num_tokens"] == rows_of(result, "off")[0]["num_tokens"] > 0
        assert row["tokens_per_second"] > 0 and row["acceptance_rate"] is None
        assert row["ttft_ms"] > 0 and row["peak_memory_bytes"] > 0


def test_transformers_samples_too_and_is_then_not_compared(module_stage: Stage) -> None:
    wanted = settings(arms=TRANSFORMERS_ARMS, temperatures=(0.7,))
    result = compare(module_stage, PROMPTS, wanted, silent)
    for arm in TRANSFORMERS_ARMS:
        (row,) = rows_of(result, arm)
        assert row["num_tokens"] > 0 and row["identical_to_off"] is None


def test_assisted_transformers_really_takes_draft_tokens(module_stage: Stage) -> None:
    peer = transformers_peer(Modules(module_stage, 1), "draft", 4)
    run = peer.run(Case("a", "chat", (3, 9, 14, 27, 5), 0), SamplingParams(), 16)
    assert run.num_rounds is not None and 0 < run.num_rounds < len(run.decided)


def test_the_drafts_own_settings_are_put_back(module_stage: Stage) -> None:
    modules = Modules(module_stage, 1)
    before = modules.draft.generation_config
    peer = transformers_peer(modules, "draft", 4)
    peer.run(Case("a", "chat", (3, 9, 14), 0), SamplingParams(), 4)
    assert modules.draft.generation_config is before


def test_transformers_has_its_own_number_of_threads_while_it_runs(
    module_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, seen = torch.get_num_threads(), list[int]()
    modules = Modules(module_stage, own + 1)
    generate = modules.target.generate

    def noting(**arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return generate(**arguments)

    monkeypatch.setattr(modules.target, "generate", noting)
    peer = transformers_peer(modules, "plain", None)
    peer.run(Case("a", "chat", (3, 9, 14), 0), SamplingParams(), 4)
    assert (seen, torch.get_num_threads()) == ([own + 1], own)


def test_transformers_without_a_module_or_a_folder_is_a_reason(stage: Stage) -> None:
    result = compare(stage, PROMPTS, settings(arms=("transformers",)), silent)
    assert "does not run on transformers" in rows_of(result, "transformers")[0]["reason"]


def test_a_quantised_target_is_not_loaded_a_second_time(folder_stage: Stage) -> None:
    quantised = replace(folder_stage, precision="4-bit")
    result = compare(quantised, PROMPTS, settings(arms=("transformers",)), silent)
    assert "4-bit" in rows_of(result, "transformers")[0]["reason"]


def test_there_is_a_row_for_each_arm_temperature_and_task(stage: Stage) -> None:
    result = compare(stage, PROMPTS, settings(temperatures=(0.0, 0.7)), silent)
    found = {(row["arm"], row["temperature"], row["task"]) for row in result["rows"]}
    tasks = ("all", "all_not_repeating", "chat", "code")
    arms = ("off", "ngram", "draft_model@3", "auto")
    assert found == {(arm, t, task) for arm in arms for t in (0.0, 0.7) for task in tasks}
    assert len(result["rows"]) == len(found)


def test_a_planted_wrong_token_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*arguments: Any) -> Any:
        run = run_engine(*arguments)
        if arguments[2] != "ngram":
            return run
        wrong = (run.tokens[0] + 1, *run.tokens[1:])
        return replace(run, tokens=wrong, decided=wrong)

    monkeypatch.setattr(contest, "run_engine", faulty)
    result = compare(stage, PROMPTS, settings(arms=("ngram",)), silent)
    assert rows_of(result, "ngram")[0]["identical_to_off"] == 3
    assert [each["position"] for each in result["differences"]] == [0, 0, 0]


def test_the_sides_take_turns(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []

    def noting(*arguments: Any) -> Any:
        order.append((arguments[4].id, arguments[2]))
        return run_engine(*arguments)

    monkeypatch.setattr(contest, "run_engine", noting)
    compare(stage, PROMPTS, settings(arms=("off", "ngram")), silent)
    assert order[2:] == [  # the first two warm up
        ("a", "off"), ("a", "ngram"), ("b", "ngram"), ("b", "off"), ("c", "ngram"), ("c", "off"),
    ]  # fmt: skip


def test_a_missing_drafter_is_a_row_with_the_reason(stage: Stage) -> None:
    statuses = (stage.statuses[0], DrafterStatus("draft_model", False, "no draft was chosen."))
    engine = Engine(stage.engine.target, {"ngram": NgramDrafter()})
    bare = replace(stage, statuses=statuses, engine=engine)
    result = compare(bare, PROMPTS, settings(arms=("draft_model", "self_quant")), silent)
    assert rows_of(result, "draft_model")[0]["reason"] == "no draft was chosen."
    assert rows_of(result, "self_quant")[0]["num_prompts"] == 0
    assert rows_of(result, "off")[0]["num_prompts"] == 3


def test_an_arm_that_fails_leaves_the_others_standing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise ModelError("the draft broke.")

    monkeypatch.setattr(DraftModelDrafter, "signal", failing)
    result = compare(stage, PROMPTS, settings(arms=("draft_model@3", "ngram")), silent)
    assert "the draft broke." in rows_of(result, "draft_model@3")[0]["reason"]
    assert rows_of(result, "ngram")[0]["num_prompts"] == 3


def test_a_prompt_that_does_not_fit_is_counted_and_not_cut(stage: Stage) -> None:
    long = Prompt("long", "chat", "x" * 250)
    result = compare(stage, [*PROMPTS, long], settings(), silent)
    assert [skip["prompt"] for skip in result["skipped"]] == ["long"]
    assert "250 tokens" in result["skipped"][0]["reason"]
    assert (result["machine"]["num_prompts"], result["machine"]["num_skipped"]) == (3, 1)


def test_when_nothing_fits_the_report_is_empty_and_says_so(stage: Stage) -> None:
    result = compare(stage, [Prompt("long", "chat", "x" * 250)], settings(), silent)
    assert result["machine"]["num_prompts"] == 0
    assert rows_of(result, "off")[0]["tokens_per_second"] is None


def test_stopping_by_hand_keeps_what_was_measured_whole(stage: Stage) -> None:
    def stop(phrase: str) -> None:
        if phrase.startswith("[2/"):
            raise KeyboardInterrupt

    result = compare(stage, PROMPTS, settings(), stop)
    assert result["ending"] is not None
    assert rows_of(result, "auto")[0]["num_prompts"] == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [(KeyboardInterrupt(), "stopped by hand"), (RuntimeError("no room"), "no room")],
)
def test_what_was_compared_is_kept_when_what_follows_ends_badly(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, fault: BaseException, said: str
) -> None:
    def fail(*_: object) -> None:
        raise fault

    monkeypatch.setattr("localspec.bench.opening.open_stage", lambda *_: stage)
    monkeypatch.setattr("localspec.bench.suite.extras", fail)
    monkeypatch.setattr("localspec.bench.suite.load_prompts", lambda *_: PROMPTS)
    result = run_bench(LoadOptions(), settings(), silent)
    assert said in str(result["ending"])
    assert rows_of(result, "auto")[0]["num_prompts"] == len(PROMPTS)


def test_a_command_whose_prompts_all_do_not_fit_is_refused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.bench.opening.open_stage", lambda *_: stage)
    monkeypatch.setattr(
        "localspec.bench.suite.load_prompts", lambda *_: [Prompt("long", "chat", "x" * 250)]
    )
    with pytest.raises(ConfigError, match=r"None of the prompts.*250 tokens"):
        run_bench(LoadOptions(), settings(), silent)


def test_the_time_limit_begins_no_new_prompt(stage: Stage) -> None:
    result = compare(stage, PROMPTS, settings(time_limit_s=-1.0), silent)
    assert "time limit" in str(result["ending"]) and result["machine"]["num_prompts"] == 0


def test_arms_start_warm_from_what_was_learnt_earlier(stage: Stage) -> None:
    phrases: list[str] = []
    result = compare(stage, PROMPTS, settings(), phrases.append)
    assert result["machine"]["controller"].startswith("warm (learnt earlier")
    assert not any("learns" in phrase or "measuring" in phrase for phrase in phrases)


def test_without_earlier_state_costs_are_measured_and_the_arms_learn_first(stage: Stage) -> None:
    fresh = replace(stage, controller=Controller(stage.engine.drafters, Costs(), Acceptance()))
    phrases: list[str] = []
    result = compare(fresh, PROMPTS, settings(arms=("auto",), warm_prompts=2), phrases.append)
    assert result["machine"]["controller"] == "warm (unmeasured runs over 2 prompts)"
    assert fresh.controller.costs.is_measured
    assert "auto learns from 2 prompts, T 0" in phrases


def test_more_prompts_to_learn_from_than_there_are_means_several_passes(stage: Stage) -> None:
    fresh = replace(stage, controller=Controller(stage.engine.drafters, Costs(), Acceptance()))
    phrases: list[str] = []
    compare(fresh, PROMPTS, settings(arms=("auto",), warm_prompts=2 * len(PROMPTS)), phrases.append)
    assert f"auto learns from {2 * len(PROMPTS)} prompts, T 0" in phrases


def test_repeats_are_measured_with_seeds_of_their_own(stage: Stage) -> None:
    cases = repeated([Case("a", "chat", (3, 9), 5, "chat"), Case("b", "qa", (3, 9), 7)], 2)
    assert [(c.id, c.seed) for c in cases] == [("a", 5), ("b", 7), ("a#1", 6), ("b#1", 8)]
    assert [c.workload for c in cases] == ["chat", "", "chat", ""]
    result = compare(stage, PROMPTS[:1], settings(arms=("off",), repeats=3), silent)
    assert result["rows"][0]["num_prompts"] == 3


def test_without_a_warm_pass_the_report_says_cold(stage: Stage) -> None:
    fresh = replace(stage, controller=Controller(stage.engine.drafters, Costs(), Acceptance()))
    result = compare(fresh, PROMPTS, settings(arms=("ngram@2",), warm_prompts=0), silent)
    assert result["machine"]["controller"] == "cold"


def test_an_arm_learns_apart_from_the_others(stage: Stage) -> None:
    one, other = own_controller(stage), own_controller(stage)
    case = Case("a", "chat", (3, 9, 14, 27, 5), 0)
    run_engine(stage, one, "draft_model", 3, case, SamplingParams(), 16)
    assert one.acceptance.num_rounds("draft_model", "model", Situation(0)) > 0
    assert other.acceptance.num_rounds("draft_model", "model", Situation(0)) == 0
    assert stage.controller.acceptance.num_rounds("draft_model", "model", Situation(0)) == 0


def test_forgetting_empties_every_cache(stage: Stage) -> None:
    case = Case("a", "chat", (3, 9, 14, 27, 5), 0)
    run_engine(stage, stage.controller, "draft_model", 3, case, SamplingParams(), 8)
    forget(stage.engine, case.prompt)
    draft = stage.engine.drafters["draft_model"]
    assert isinstance(draft, DraftModelDrafter)
    assert stage.engine.target.cache.length == 0
    draft.model.cache.reuse(list(case.prompt))
    assert draft.model.cache.length == 0


def test_a_drafter_that_shares_the_targets_cache_meets_it_at_the_root(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = stage.engine.target, list[int]()

    def sharing(self: NgramDrafter, sequence: Any, plan: Any) -> Proposal:
        assert target.cache.tokens == sequence.tokens[:-1]
        target.forward(sequence.tokens[-1:])  # scribbles, as a self-draft does
        seen.append(len(sequence.tokens))
        return Proposal()

    monkeypatch.setattr(NgramDrafter, "propose", sharing)
    forget(stage.engine, (3, 9, 14, 27, 5))
    assert seen and target.cache.length == 0


def test_a_sampled_run_can_be_made_again(stage: Stage) -> None:
    case = Case("a", "chat", (3, 9, 14, 27, 5), 11)
    one, two = (
        run_engine(stage, stage.controller, "draft_model", 3, case, case.sampling(0.7), 16)
        for _ in range(2)
    )
    assert one.decided == two.decided


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 0}, {"limit": 0}, {"temperatures": ()}, {"temperatures": (0.0, 0.0)},
     {"warm_prompts": -1}, {"peer_threads": 0}, {"peer_threads": 10**8}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchSettings(**changes)


def test_a_temperature_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="temperature"):
        BenchSettings(temperatures=(9.0,))


def test_flags_are_lists_and_a_bad_number_is_said() -> None:
    assert listed("off, ngram,") == ("off", "ngram")
    assert listed_numbers("0,0.7") == (0.0, 0.7)
    with pytest.raises(ConfigError, match="0;7"):
        listed_numbers("0;7")
