"""What earlier runs measured reaches the planner."""

from __future__ import annotations

from localspec.engine.acceptance import Acceptance, Situation
from localspec.engine.controller import Controller
from localspec.engine.costs import Costs
from localspec.engine.measured import identity, measurements

NAME = identity("a/target", "a/draft", "bfloat16", "a processor", "torch 2")


def learnt(step_ms: float) -> dict[str, object]:
    costs, acceptance = Costs(), Acceptance()
    for width, verify_ms in ((1, 10.0), (2, 10.5), (4, 11.0), (8, 12.0), (16, 15.0)):
        costs.set_verify(width, 128, verify_ms)
    costs.set_draft_step("draft_model", 128, step_ms)
    for _ in range(40):
        acceptance.tick()
        acceptance.observe("draft_model", "model", Situation(3), 4, 3, 12.0)
    return Controller({}, costs, acceptance).snapshot()


def test_a_learnt_state_becomes_a_measurement_of_its_models() -> None:
    (found,) = measurements({NAME: learnt(1.0)}, 4096)
    assert (found.target, found.draft, found.precision) == ("a/target", "a/draft", "bf16")
    assert found.verify_ms[1] == 10.0
    assert found.acceptance["draft_model"][0] > 0.9


def test_a_dearer_draft_lowers_the_expected_speedup() -> None:
    cheap, dear = (measurements({NAME: learnt(ms)}, 4096)[0] for ms in (1.0, 8.0))
    cheap_speedup = cheap.expected_speedup("draft_model")
    dear_speedup = dear.expected_speedup("draft_model")
    assert cheap_speedup is not None and dear_speedup is not None
    assert cheap_speedup.value > 1.5 > dear_speedup.value


def test_a_state_that_cannot_be_read_is_passed_over() -> None:
    assert measurements({NAME: {"version": 0}, "": None, "x | y | no precision": {}}, 4096) == ()
