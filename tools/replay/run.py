"""Replays a log under any policy, offline.

Contract: `run_replay` returns plain JSON data: for each world (a combination of models and machine
of the log) one row for each policy, with its rate, its ratio to plain decoding and its ratio to
the best fixed arm in hindsight, which is found over every drafter and FIXED_LENGTHS whether it
was asked for or not. Same log, policies and seed: same rows, but for the host's time.

Policies: `auto`, `off`, a drafter (the controller chooses its length), a drafter at a fixed
length (`draft_model@4`). None given: auto, off and every fixed arm.

Rates are of decoding alone, by the world's costs; what they leave out, prefill and the host's
own time, is the same for all.

Not here: what is right where (logged, worlds), the rounds (play).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec.bench.tables import aligned, number, shown, text
from localspec.core.arithmetic import ratio
from localspec.core.backend import Report
from localspec.core.config import nearest
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from localspec.record.log_file import read_states
from tools.replay.logged import read_turns, worlds_of
from tools.replay.play import Played, play_adaptive, play_fixed
from tools.replay.worlds import World

FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
MAX_LENGTH = 15  # of the widths that costs are measured at
COLUMNS = (
    text("policy"),
    number("tokens/s", "tokens_per_second", ".1f"),
    number("to off", "ratio_to_off", ".3f"),
    number("to best fixed", "ratio_to_best_fixed", ".3f"),
    text("rounds", "num_rounds"),
    text("probes", "num_probes"),
    number("accepted", "acceptance_rate", ".2f"),
    number("host µs a round", "host_us", ".0f"),
)
ASSUMED = "Drawn, not logged: a drafter's guesses where it did not draft, and its confidences."


def run_replay(
    database: Path, policies: tuple[str, ...], seed: int, report: Report
) -> dict[str, Any]:
    """Replay every turn of a log. Raises StoreError, ConfigError."""
    turns, states = read_turns(database), read_states(database)
    report(f"{len(turns)} turns with {sum(len(turn.steps) for turn in turns)} rounds")
    worlds, left_out = worlds_of(turns, states, seed)
    return {
        "database": database.name,
        "seed": seed,
        "worlds": [_play_all(each, policies, seed, report) for each in worlds],
        "left_out": left_out,
        "assumed": ASSUMED,
    }


def _play_all(world: World, policies: tuple[str, ...], seed: int, report: Report) -> dict[str, Any]:
    arms = fixed_arms(world)
    wanted = [_checked(name, world) for name in policies] or [AUTO, *arms]
    report(f"{world.name}: {world.num_tokens} tokens, {len(arms)} fixed arms")
    fixed = {name: _play(world, name, seed) for name in arms}
    best = max(fixed, key=lambda name: fixed[name].tokens_per_second)
    rows = list[dict[str, Any]]()
    for name in dict.fromkeys(wanted):
        played = fixed[name] if name in fixed else _play(world, name, seed)
        rows.append(_row(name, played, fixed[OFF], fixed[best]))
        report(f"{world.name}: {name} {rows[-1]['tokens_per_second']:.1f} tokens/s")
    return {
        "name": world.name,
        "num_turns": len(world.turns),
        "num_tokens": world.num_tokens,
        "temperature": world.temperature,
        "best_fixed": best,
        "best_fixed_tokens_per_second": fixed[best].tokens_per_second,
        **world.facts,
        "rows": rows,
    }


def fixed_arms(world: World) -> list[str]:
    return [OFF, *(f"{name}@{length}" for name in world.priced for length in FIXED_LENGTHS)]


def _play(world: World, name: str, seed: int) -> Played:
    drafter, at, length = name.partition("@")
    if drafter == OFF or at:
        return play_fixed(world, drafter, int(length) if at else 0)
    return play_adaptive(world, drafter, seed)


def _checked(name: str, world: World) -> str:
    drafter, at, length = name.partition("@")
    known = (AUTO, OFF, *world.priced)
    if drafter not in known:
        raise ConfigError(
            f"There is no policy '{name}' for {world.name}. Did you mean '{nearest(name, known)}'?"
        )
    if not at:
        return name
    if drafter in (AUTO, OFF) or not length.isdigit() or not 1 <= int(length) <= MAX_LENGTH:
        raise ConfigError(
            f"'{name}' is no policy. A fixed length is written like draft_model@4, for a drafter, "
            f"from 1 to {MAX_LENGTH}."
        )
    return name


def _row(name: str, played: Played, off: Played, best: Played) -> dict[str, Any]:
    return {
        "policy": name,
        "tokens_per_second": played.tokens_per_second,
        "ratio_to_off": played.tokens_per_second / off.tokens_per_second,
        "ratio_to_best_fixed": played.tokens_per_second / best.tokens_per_second,
        "num_rounds": played.num_rounds,
        "num_probes": played.num_probes,
        "acceptance_rate": ratio(played.num_accepted_tokens, played.num_draft_tokens),
        "host_us": played.host_us,
    }


def render(result: Mapping[str, Any]) -> str:
    """The result for people: a table for each world, best rate first."""
    lines = [line for world in result["worlds"] for line in _world_lines(world)]
    lines += [f"Left out: {sentence}" for sentence in result["left_out"]]
    return "\n".join([*lines, result["assumed"]])


def _world_lines(world: Mapping[str, Any]) -> list[str]:
    logged = shown(world["logged_tokens_per_second"], ".1f")
    ordered = sorted(world["rows"], key=lambda row: -row["tokens_per_second"])
    return [
        f"{world['name']}: {world['num_tokens']} tokens in {world['num_turns']} turns, "
        f"best fixed {world['best_fixed']}",
        f"costs: {world['costs_from']}; as logged {logged} tokens/s",
        *aligned(COLUMNS, ordered),
        "",
    ]
