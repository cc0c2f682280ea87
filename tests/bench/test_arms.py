"""Names of arms, and which of them can run."""

from __future__ import annotations

import pytest

from localspec.bench.arms import Arm, OtherArm, parse_arms, refusals, require_known
from localspec.core.backend import DrafterStatus
from localspec.core.errors import ConfigError

OTHERS = {
    "vllm": OtherArm(lambda *_: pytest.fail("not opened"), takes_length=False),
    "vllm_draft": OtherArm(lambda *_: pytest.fail("not opened"), takes_length=True),
}
READY = (
    DrafterStatus("ngram", True, "ready"),
    DrafterStatus("draft_model", False, "no draft model was chosen."),
)


def test_off_comes_first_and_each_arm_once() -> None:
    names = [arm.name for arm in parse_arms(("auto", "ngram", "off", "auto"))]
    assert names == ["off", "auto", "ngram"]


def test_a_fixed_length_is_read_from_the_name() -> None:
    assert parse_arms(("draft_model@4",))[1] == Arm("draft_model@4", "draft_model", 4)


@pytest.mark.parametrize(
    "name",
    [
        "off@2",
        "vllm@2",
        "ngram@",
        "ngram@x",
        "ngram@0",
        "ngram@65",
        "ngram@3-2",
        "ngram@0-2",
        "ngram@1-",
        "ngram@-3",
    ],
)
def test_a_length_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_arms((name,), OTHERS)


def test_a_range_of_lengths_is_spelt_out_in_its_place() -> None:
    names = [arm.name for arm in parse_arms(("auto", "draft_model@1-3", "draft_model@2", "vllm"))]
    assert names == ["off", "auto", "draft_model@1", "draft_model@2", "draft_model@3", "vllm"]


def test_a_range_beyond_the_limit_names_the_first_that_is_too_long() -> None:
    with pytest.raises(ConfigError, match=r"'ngram@65' asks for 65"):
        parse_arms(("ngram@60-70000000",))


def test_a_range_may_reach_the_limit() -> None:
    assert [arm.num_draft_tokens for arm in parse_arms(("ngram@63-64",))] == [None, 63, 64]


def test_other_engines_that_draft_may_have_a_length_and_none_of_them_learns() -> None:
    arms = parse_arms(("vllm", "vllm_draft", "vllm_draft@5"), OTHERS)
    assert arms[-1] == Arm("vllm_draft@5", "vllm_draft", 5, is_other_engine=True)
    assert [arm.is_other_engine for arm in arms] == [False, True, True, True]
    assert not any(arm.is_learning for arm in arms)


def test_only_arms_that_choose_a_drafter_or_a_length_learn() -> None:
    arms = parse_arms(("off", "auto", "auto@3", "ngram", "ngram@3", "vllm"), OTHERS)
    assert [arm.name for arm in arms if arm.is_learning] == ["auto", "auto@3", "ngram"]


def test_an_unavailable_drafter_is_refused_with_its_reason() -> None:
    arms = parse_arms(("ngram", "draft_model", "draft_model@4", "auto", "vllm"), OTHERS)
    reason = "no draft model was chosen."
    assert refusals(arms, READY) == {"draft_model": reason, "draft_model@4": reason}


def test_a_drafter_that_only_the_stage_knows_can_be_an_arm() -> None:
    statuses = (*READY, DrafterStatus("chain", True, "ready"))
    assert refusals(parse_arms(("chain", "chain@4")), statuses) == {}


def test_a_known_drafter_that_this_version_lacks_is_a_reason_and_not_an_error() -> None:
    assert "self_quant" in refusals(parse_arms(("self_quant",)), READY)["self_quant"]


def test_an_unknown_name_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'ngramm'\. Choose from: off, auto, ngram.*vllm_draft"):
        require_known(parse_arms(("vllm", "ngramm"), OTHERS), OTHERS)
