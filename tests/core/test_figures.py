"""Every figure is measured, logged and named; the names that programs read stay."""

from __future__ import annotations

import pytest

from localspec.core.figures import FIGURES, Place, figure_names
from localspec.core.turn_stats import TurnStats

# What clients of the API and readers of `generate --json` rely on.
OUTSIDE_NAMES: dict[Place, str] = {
    "api": "drafter num_drafts num_draft_tokens num_accepted_tokens mean_num_draft_tokens "
    "acceptance_rate mean_accepted_length tokens_per_second ttft_ms speedup no_speedup "
    "least_speedup reason exact num_lenient_tokens",
    "command": "drafter num_output_tokens num_drafts num_draft_tokens num_accepted_tokens "
    "acceptance_rate draft_share mean_accepted_length tokens_per_second ttft_ms prefill_ms "
    "decode_ms reply_ms speedup decode_speedup no_speedup least_speedup exact num_lenient_tokens "
    "reason",
}


@pytest.mark.parametrize("place", OUTSIDE_NAMES)
def test_the_names_that_programs_read_stay(place: Place) -> None:
    assert set(OUTSIDE_NAMES[place].split()) <= set(figure_names(place))


def test_each_figure_is_one_of_a_turn_and_has_words_of_its_own() -> None:
    stats = TurnStats(num_prompt_tokens=1)
    for name in figure_names():
        stats.told(name)
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert len({figure.label for figure in FIGURES}) == len(FIGURES)
