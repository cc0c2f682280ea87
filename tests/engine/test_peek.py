"""Guesses of drafters that are not used: scored where guessing is free, and never counted twice."""

from __future__ import annotations

from typing import Any

import torch

from localspec.bench.play import RIGHT, WRONG
from localspec.core import SamplingParams, Sequence
from localspec.engine.acceptance import Situation
from localspec.engine.adaptive_policy import SECOND_LOOKS
from localspec.engine.controller import Peek
from localspec.engine.options import Option
from tests.engine.simulation import PLAIN_MS, Simulated, World

COLD = SamplingParams()


def test_a_free_guess_is_scored_without_being_used() -> None:
    """It guesses exactly what comes, and so is known to be good though it is too dear to use."""
    free = Simulated(20.0, 1.0, is_free=True)
    free.guess = (RIGHT,) * 4
    world = World({"free": free})
    world.run(60, COLD)
    assert sum(step.drafter == "free" for step in world.steps) <= SECOND_LOOKS
    assert world.controller.acceptance.rates("free", "s", Situation(0))[0] > 0.85


def test_a_free_guess_that_is_wrong_is_scored_as_wrong() -> None:
    free = Simulated(20.0, 1.0, is_free=True)
    free.guess = (WRONG, RIGHT, RIGHT, RIGHT)
    world = World({"free": free})
    world.run(60, COLD)
    assert world.controller.acceptance.rates("free", "s", Situation(0))[0] < 0.15


def test_own_rounds_are_not_counted_twice() -> None:
    free = Simulated(0.1, 0.9, is_free=True)
    free.guess = (RIGHT,) * 4
    world = World({"free": free})
    world.run(30, COLD)
    used = sum(s.drafter == "free" for s in world.steps)
    known = world.controller.acceptance.estimate("free", "s", Situation(0))
    assert known.evidence <= used + 1


def test_a_guess_of_a_drafter_that_was_then_used_is_not_scored_as_well() -> None:
    free = Simulated(0.1, 0.9, is_free=True)
    free.guess = (RIGHT,) * 4
    world = World({"free": free})
    option = option_in(world, "free")
    turn: Any = Sequence((1, 2), COLD, 100, frozenset(), torch.Generator())
    peek = Peek(world.controller, Situation(0))
    for was_used in (True, False):
        peek.at(turn, [option])
        if was_used:
            peek.forget("free")
        turn.append([RIGHT] * 4)
        peek.at(turn, [option])
        known = world.controller.acceptance.estimate("free", "s", Situation(0))
        assert (known.evidence > 0.0) == (not was_used)


def test_a_round_that_explores_forgets_the_guess_of_its_drafter() -> None:
    free = Simulated(1.0, 1.0, is_free=True)
    free.guess = (RIGHT,)
    world = World({"free": free})
    world.controller.budget(0, PLAIN_MS).drafted(-100 * PLAIN_MS, PLAIN_MS)  # so it only explores
    world.run(4, COLD)
    assert world.steps[0].is_probe and world.steps[0].drafter == "free"
    num_drafts = sum(step.drafter == "free" for step in world.steps)
    assert world.controller.acceptance.revisions["free"] == num_drafts


def option_in(world: World, name: str) -> Option:
    prices = world.controller.costs.at(0)
    assert prices is not None
    option = world.controller.option(name, "s", Situation(0), prices)
    assert option is not None
    return option


def test_a_drafter_without_a_guess_is_asked_again_in_the_next_turn() -> None:
    free = Simulated(20.0, 1.0, is_free=True)
    world = World({"free": free})
    world.run(60, COLD)
    free.guess = (RIGHT,) * 4
    world.run(60, COLD)
    assert world.controller.acceptance.rates("free", "s", Situation(0))[0] > 0.85
