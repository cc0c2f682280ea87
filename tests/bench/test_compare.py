"""A whole comparison on tiny models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.bench.arms import OtherArm, OtherEngines
from localspec.bench.cases import Case, Prompt
from localspec.bench.compare import compare_arms, run_bench
from localspec.bench.kept import KeptFile
from localspec.bench.runs import BenchEngine, EngineRunner, MeasuredReply
from localspec.bench.settings import BenchSettings
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import Costs
from localspec.core.backend import DrafterStatus
from localspec.core.decoding import SamplingParams, Sequence
from localspec.core.errors import ConfigError, ModelError, StoreError
from localspec.core.options import LoadOptions
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.engine import calibrate
from localspec.engine.engine import Engine
from tests.kit.tiny_bench import captured_engine, tiny_bench
from tests.kit.tracing import TracingPool

pytestmark = pytest.mark.slow  # every arm writes every reply
PROMPTS = [
    Prompt("a", "chat", "hello there"),
    Prompt("b", "code", "write a loop"),
    Prompt("c", "chat", "say it again, say it again"),
]


@pytest.fixture(scope="module")
def bench() -> BenchEngine:
    """Every reply begins with empty caches, so one serves all."""
    return tiny_bench()


@pytest.fixture
def unmeasured(bench: BenchEngine, monkeypatch: pytest.MonkeyPatch) -> BenchEngine:
    """Its costs are to be measured, in one round each: what they are does not matter here."""
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "QUICKLY_S", 0.0)
    return replace(bench, controller=Controller(bench.engine.drafters, Costs(), Acceptance()))


def silent(phrase: str) -> None:
    pass


def settings(**changes: Any) -> BenchSettings:
    plain = BenchSettings(max_tokens=8, temperatures=(0.0,), arms=("off", "auto"))
    return replace(plain, **changes)


def rows_of(result: dict[str, Any], arm: str, task: str = "all") -> list[dict[str, Any]]:
    return [row for row in result["rows"] if (row["arm"], row["task"]) == (arm, task)]


def test_every_arm_writes_what_plain_decoding_writes_and_has_its_rows(bench: BenchEngine) -> None:
    """One for each temperature and task."""
    arms = ("off", "ngram", "draft_model@3", "auto")
    wanted = settings(arms=arms, temperatures=(0.0, 1.0), max_tokens=16)
    result = compare_arms(bench, PROMPTS, wanted, silent)
    assert result["differences"] == [] and result["ending"] is None
    for arm in arms:
        for row in rows_of(result, arm):
            assert (row["num_prompts"], row["identical_to_off"]) == (3, 0)
            assert row["tokens_per_second"] > 0
    assert rows_of(result, "draft_model@3")[0]["acceptance_rate"] > 0
    json.dumps(result, allow_nan=False)
    found = {(row["arm"], row["temperature"], row["task"]) for row in result["rows"]}
    tasks = ("all", "all_not_repeating", "chat", "code")
    assert found == {(arm, t, task) for arm in arms for t in (0.0, 1.0) for task in tasks}
    assert len(result["rows"]) == len(found)


def test_a_planted_wrong_token_is_counted(
    bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EngineRunner.run

    def faulty(runner: EngineRunner, *arguments: Any) -> MeasuredReply:
        reply = run(runner, *arguments)
        if runner.drafter != "ngram":
            return reply
        wrong = (reply.tokens[0] + 1, *reply.tokens[1:])
        return replace(reply, tokens=wrong, decided=wrong)

    monkeypatch.setattr(EngineRunner, "run", faulty)
    result = compare_arms(bench, PROMPTS, settings(arms=("ngram",)), silent)
    assert rows_of(result, "ngram")[0]["identical_to_off"] == 3
    assert [each["position"] for each in result["differences"]] == [0, 0, 0]


def test_the_sides_take_turns(bench: BenchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    order, run = list[tuple[str, str]](), EngineRunner.run

    def noting(runner: EngineRunner, case: Case, *rest: Any) -> MeasuredReply:
        order.append((case.id, runner.drafter))
        return run(runner, case, *rest)

    monkeypatch.setattr(EngineRunner, "run", noting)
    wanted = settings(arms=("off", "ngram"), temperatures=(0.0, 0.7), max_tokens=2)
    compare_arms(bench, PROMPTS, wanted, silent)
    plain_first, plain_last = ["off", "ngram"], ["ngram", "off"]
    sides = {"a": plain_first, "b": plain_last, "c": plain_last}  # alike at each temperature
    measured = [(case, side) for case, both in sides.items() for side in both * 2]
    assert order[2:] == measured, "behind the first two, which warm up"


def test_a_missing_drafter_is_a_row_with_the_reason(bench: BenchEngine) -> None:
    statuses = (bench.statuses[0], DrafterStatus("draft_model", False, "no draft was chosen."))
    engine = Engine(bench.engine.target, {"ngram": NgramDrafter()})
    bare = replace(bench, statuses=statuses, engine=engine)
    result = compare_arms(bare, PROMPTS, settings(arms=("draft_model", "self_quant")), silent)
    assert rows_of(result, "draft_model")[0]["reason"] == "no draft was chosen."
    assert rows_of(result, "self_quant")[0]["num_prompts"] == 0
    assert rows_of(result, "off")[0]["num_prompts"] == 3


def test_an_arm_that_fails_leaves_the_others_standing(
    bench: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise ModelError("the draft broke.")

    monkeypatch.setattr(DraftModelDrafter, "signal", failing)
    result = compare_arms(bench, PROMPTS, settings(arms=("draft_model@3", "ngram")), silent)
    assert "the draft broke." in rows_of(result, "draft_model@3")[0]["reason"]
    assert rows_of(result, "ngram")[0]["num_prompts"] == 3


def test_a_prompt_that_does_not_fit_is_counted_and_not_cut(bench: BenchEngine) -> None:
    long = Prompt("long", "chat", "x" * 250)
    result = compare_arms(bench, [*PROMPTS, long], settings(), silent)
    assert [skip["prompt"] for skip in result["skipped"]] == ["long"]
    assert "250 tokens" in result["skipped"][0]["reason"]
    assert (result["machine"]["num_prompts"], result["machine"]["num_skipped"]) == (3, 1)


def test_stopping_by_hand_keeps_what_was_measured_whole(bench: BenchEngine) -> None:
    def stop(phrase: str) -> None:
        if phrase.startswith("[2/"):
            raise KeyboardInterrupt

    result = compare_arms(bench, PROMPTS, settings(), stop)
    assert result["ending"] is not None
    assert rows_of(result, "auto")[0]["num_prompts"] == 1


def test_a_comparison_whose_prompts_all_do_not_fit_is_refused(bench: BenchEngine) -> None:
    with pytest.raises(ConfigError, match=r"None of the prompts.*250 tokens"):
        compare_arms(bench, [Prompt("long", "chat", "x" * 250)], settings(), silent)


def test_arms_start_warm_from_what_was_learnt_earlier(bench: BenchEngine) -> None:
    phrases: list[str] = []
    result = compare_arms(bench, PROMPTS, settings(), phrases.append)
    assert result["machine"]["controller"].startswith("warm (learnt earlier")
    assert not any("learns" in phrase or "measuring" in phrase for phrase in phrases)


def test_without_earlier_state_costs_are_measured_and_the_arms_learn_first(
    unmeasured: BenchEngine,
) -> None:
    """From more prompts than there are, so in two passes."""
    phrases: list[str] = []
    result = compare_arms(unmeasured, PROMPTS, settings(warm_prompts=4), phrases.append)
    assert (
        result["machine"]["controller"] == "warm (unmeasured runs over 4 of the measured prompts)"
    )
    assert unmeasured.controller.costs.is_measured
    assert "auto learns from 4 of the measured prompts, T 0" in phrases


def test_arms_learn_from_prompts_that_are_not_measured(
    unmeasured: BenchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[tuple[int, ...]] = []
    start = unmeasured.engine.start

    def noted(prompt: tuple[int, ...], *rest: Any) -> Sequence:
        answered.append(prompt)
        return start(prompt, *rest)

    monkeypatch.setattr(unmeasured.engine, "start", noted)
    result = compare_arms(unmeasured, PROMPTS, settings(limit=1, warm_prompts=2), silent)
    assert result["machine"]["num_prompts"] == 1
    measured = tuple(unmeasured.render(PROMPTS[0].text))
    others = {tuple(unmeasured.render(one.text)) for one in PROMPTS[1:]}
    assert answered.count(measured) == 4, "by both arms: to warm up, and when it is measured"
    assert others & set(answered)


def test_rows_behind_those_to_measure_and_to_learn_from_are_not_read(
    bench: BenchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = "localspec.bench.compare.open_bench_engine"
    monkeypatch.setattr(opener, lambda *_: bench)
    rows = [json.dumps({"id": one.id, "task": one.task, "turns": [one.text]}) for one in PROMPTS]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*rows, "no prompt"]), encoding="utf-8")
    found = settings(prompts=path, limit=1, warm_prompts=2)
    result = run_bench(LoadOptions(), found, silent)
    assert result["machine"]["num_prompts"] == 1
    with pytest.raises(ConfigError, match="Line 4"):
        run_bench(LoadOptions(), replace(found, warm_prompts=3), silent)


@pytest.mark.parametrize("arms", [("off", "draft_model@2"), ("off", "auto")], ids=str)
def test_graphs_are_captured_before_anything_is_measured(
    arms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether costs are to be measured or not."""
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "QUICKLY_S", 0.0)
    pool, phrases = TracingPool(), list[str]()
    engine = captured_engine(pool)
    controller = Controller(engine.drafters, Costs(), Acceptance())
    bench = replace(tiny_bench(engine), controller=controller)
    compare_arms(bench, PROMPTS[:1], settings(arms=arms, warm_prompts=0), phrases.append)
    assert phrases[0].startswith("preparing steps of 1 ")
    assert sum(phrase.startswith("preparing") for phrase in phrases) == pool.num_captures
    assert pool.num_replays > 3 * pool.num_captures, "beyond those that were compared"


def test_without_a_warm_pass_the_report_says_cold(unmeasured: BenchEngine) -> None:
    result = compare_arms(unmeasured, PROMPTS, settings(arms=("ngram@2",), warm_prompts=0), silent)
    assert result["machine"]["controller"] == "cold"


# -- results while they grow -------------------------------------------------------------------


def kept_in(folder: Path) -> KeptFile:
    return KeptFile(folder / "out.json", pytest.fail)


def test_what_was_measured_is_kept_while_the_comparison_runs(
    bench: BenchEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the second prompt plain decoding fails, which ends everything."""
    run = EngineRunner.run

    def failing(runner: EngineRunner, case: Case, *rest: Any) -> MeasuredReply:
        if case.id == "b":
            raise RuntimeError("the machine broke")
        return run(runner, case, *rest)

    monkeypatch.setattr(EngineRunner, "run", failing)
    with pytest.raises(RuntimeError, match="the machine broke"):
        compare_arms(bench, PROMPTS, settings(arms=("off",)), silent, out=kept_in(tmp_path))
    result = json.loads((tmp_path / "out.json").read_text())
    assert rows_of(result, "off")[0]["num_prompts"] == 1
    assert result["ending"] == "it is not finished."


def test_a_whole_comparison_of_one_prompt_a_task_has_a_result(bench: BenchEngine) -> None:
    """Replies that end at once have no rate; what cannot be made of them is None."""
    ends = frozenset(range(64))
    result = compare_arms(replace(bench, end_ids=ends), PROMPTS, settings(), silent)
    assert rows_of(result, "auto")[0]["tokens_per_second"] is None and result["cells"] == []


def test_growing_results_are_kept_seldom_and_a_full_disk_does_not_end_the_comparison(
    tmp_path: Path,
) -> None:
    said, made = list[str](), list[int]()
    (tmp_path / "out.json").mkdir()
    out = KeptFile(tmp_path / "out.json", said.append)
    for _ in range(3):
        out.offer(lambda: made.append(1) or {})  # type: ignore[func-returns-value]
    assert len(said) == len(made) == 1 and "out.json cannot be written" in said[0]
    with pytest.raises(StoreError, match="cannot be written"):
        out.write({})


# -- other engines -----------------------------------------------------------------------------


class Counting:
    """Another engine that counts upwards, 2 ms a token."""

    note = "counts"

    def __init__(self, fails_at: str = "") -> None:
        self._fails_at, self.is_closed = fails_at, False

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        if case.id == self._fails_at:
            raise ModelError("it ended by itself.")
        tokens = tuple(range(max_tokens))
        return MeasuredReply(tokens, tokens, 2.0 * max_tokens)

    def close(self) -> None:
        self.is_closed = True


def others_of(engine: Counting) -> OtherEngines:
    def missing(*_: Any) -> Counting:
        raise ModelError("it is not installed. Install it.")

    arms = {"other": OtherArm(lambda *_: engine, True), "missing": OtherArm(missing, False)}
    return OtherEngines(arms, ("other",), lambda _: (), lambda *_: ([], {}))


def compare_others(
    bench: BenchEngine, engine: Counting, home: Path, report: Any = silent, **changes: Any
) -> dict[str, Any]:
    wanted = settings(arms=("other@2", "missing", "ngram@2"), home=home, **changes)
    return compare_arms(bench, PROMPTS, wanted, report, others_of(engine))


def test_another_engine_is_compared_like_any_other_arm(bench: BenchEngine, tmp_path: Path) -> None:
    engine = Counting()
    result = compare_others(bench, engine, tmp_path)
    (row,) = rows_of(result, "other@2")
    assert (row["num_prompts"], row["identical_to_off"]) == (3, 3)  # it counts, it cannot write
    assert row["tokens_per_second"] == pytest.approx(500.0)
    assert result["machine"]["peers"] == {"other@2": "counts"} and engine.is_closed


def test_sampled_replies_of_another_engine_may_differ(bench: BenchEngine, tmp_path: Path) -> None:
    result = compare_others(bench, Counting(), tmp_path, temperatures=(0.7,))
    assert rows_of(result, "other@2")[0]["identical_to_off"] is None
    assert rows_of(result, "ngram@2")[0]["identical_to_off"] == 0
    assert "is not installed" in rows_of(result, "missing")[0]["reason"]
    json.dumps(result, allow_nan=False)


def test_another_engine_that_ends_leaves_the_others_standing(
    bench: BenchEngine, tmp_path: Path
) -> None:
    result = compare_others(bench, Counting("b"), tmp_path)
    assert "it failed on b: it ended by itself." in rows_of(result, "other@2")[0]["reason"]
    assert rows_of(result, "ngram@2")[0]["num_prompts"] == 3


def test_ctrl_c_closes_every_engine(bench: BenchEngine, tmp_path: Path) -> None:
    def stop(phrase: str) -> None:
        if phrase.startswith("[1/"):
            raise KeyboardInterrupt

    engine = Counting()
    result = compare_others(bench, engine, tmp_path, stop)
    assert "stopped by hand" in str(result["ending"]) and engine.is_closed


def test_an_unknown_arm_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opener = "localspec.bench.compare.open_bench_engine"
    monkeypatch.setattr(opener, lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="no arm called 'draft_modl'"):
        run_bench(LoadOptions(), settings(arms=("off", "draft_modl")), silent)
