"""Policies in the made-up worlds, beside plain decoding and the best fixed arm of each.

`run_contest` returns plain JSON data: for each world and seed one row for each policy, with its
ratio to the best fixed arm in hindsight, over every drafter and FIXED_LENGTHS whether it was named
or not; for each policy the mean and the least ratios over all of them; and the same for each world.
The same policies and seeds give the same result on any machine under any load.

Policies: `auto`, `off`, a drafter (the controller chooses its length), a drafter at a fixed length
("draft_model@4"). Rates are of decoding alone, by the world's costs, with the host's time.

`compared` holds one result against an earlier one, world by world, and says where the rule is
broken: no world's mean falls by more than MOST_LOST_IN_MEAN, and no world's worst seed by more than
MOST_LOST_IN_LEAST.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from localspec.bench.tables import aligned, number, text
from localspec.core.arithmetic import ratio
from localspec.core.config import nearest
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from tests.worlds.fixed_arms import FixedArms
from tests.worlds.made_up import all_worlds
from tests.worlds.play import Played, play_adaptive, play_fixed
from tests.worlds.world import World

FIXED_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15)
MAX_LENGTH = 15  # The widest forward whose cost is measured checks 15 draft tokens.
MOST_LOST_IN_MEAN = 0.01  # The share of the best fixed arm that a change may cost one world.
MOST_LOST_IN_LEAST = 0.03  # The share of the best fixed arm that it may cost a world's worst seed.
RATIOS = ("ratio_to_off", "ratio_to_best_fixed")
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
SUMMARY_COLUMNS = (
    text("policy"),
    text("worlds", "num_plays"),
    number("to off, mean", "mean_ratio_to_off", ".3f"),
    number("least", "least_ratio_to_off", ".3f"),
    number("to best fixed, mean", "mean_ratio_to_best_fixed", ".3f"),
    number("least", "least_ratio_to_best_fixed", ".3f"),
    number("host µs a round", "mean_host_us", ".0f"),
)
BY_WORLD_COLUMNS = (text("world"), *SUMMARY_COLUMNS)
COMPARED_COLUMNS = (
    text("world"),
    text("policy"),
    number("mean before", "mean_before", ".3f"),
    number("after", "mean_after", ".3f"),
    number("least before", "least_before", ".3f"),
    number("after", "least_after", ".3f"),
    text("broken"),
)


def run_contest(
    policies: Sequence[str],
    num_seeds: int,
    names: Sequence[str],
    report: Callable[[str], None],
    reviews: bool = False,
) -> dict[str, Any]:
    """Play the worlds of seeds 0 to `num_seeds` - 1 whose name contains one of `names`, or all
    worlds without names. reviews: see play_adaptive. Raises ConfigError before anything is
    played."""
    worlds = [(seed, world) for seed in range(num_seeds) for world in all_worlds(seed)]
    chosen = [
        (seed, world)
        for seed, world in worlds
        if not names or any(name in world.name for name in names)
    ]
    if not chosen:
        known = "; ".join(dict.fromkeys(world.name for _, world in worlds))
        raise ConfigError(f"No world is called so. Name a part of: {known}.")
    for _, world in chosen:
        for policy in policies:
            _check(policy, world)
    played = [_play_all(world, policies, seed, report, reviews) for seed, world in chosen]
    return {
        "num_seeds": num_seeds,
        "worlds": played,
        "by_world": by_world(played),
        "summary": _summary(played),
    }


def by_world(played: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each world and policy the mean and the least ratio over the seeds."""
    rows = []
    for name in dict.fromkeys(world["name"] for world in played):
        own = [world for world in played if world["name"] == name]
        rows += [{"world": name, **row} for row in _summary(own)]
    return rows


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each world and policy of both results its ratios, over the seeds of `after`, and
    what breaks the rule. Raises ConfigError where the earlier result lacks seeds."""
    if before["num_seeds"] < after["num_seeds"]:
        raise ConfigError(
            f"The earlier result has {before['num_seeds']} seeds and this one "
            f"{after['num_seeds']}. "
            "Play no more seeds than the earlier one."
        )
    same_seeds = [world for world in before["worlds"] if world["seed"] < after["num_seeds"]]
    earlier = {(row["world"], row["policy"]): row for row in by_world(same_seeds)}
    pairs = [(earlier.get((row["world"], row["policy"])), row) for row in after["by_world"]]
    return [_comparison(old, new) for old, new in pairs if old is not None]


def _comparison(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    row = {"world": after["world"], "policy": after["policy"]}
    broken = []
    for kind, most_lost in (("mean", MOST_LOST_IN_MEAN), ("least", MOST_LOST_IN_LEAST)):
        old, new = (each[f"{kind}_ratio_to_best_fixed"] for each in (before, after))
        row |= {f"{kind}_before": old, f"{kind}_after": new}
        if new < old - most_lost:
            broken.append(f"{kind} {new - old:+.3f}")
    return row | {"broken": ", ".join(broken)}


def _play_all(
    world: World,
    policies: Sequence[str],
    seed: int,
    report: Callable[[str], None],
    reviews: bool,
) -> dict[str, Any]:
    """Return the rows of one world."""
    arms = FixedArms(world)
    rates = {OFF: arms.rate(OFF, 0)} | {
        f"{name}@{length}": arms.rate(name, length)
        for name in world.priced
        for length in FIXED_LENGTHS
    }
    best = max(rates, key=lambda name: rates[name])
    rows = [
        _row(name, _play(world, name, seed, reviews), rates[OFF], rates[best])
        for name in dict.fromkeys(policies)
    ]
    ratios = ", ".join(f"{row['policy']} {row['ratio_to_best_fixed']:.3f}" for row in rows)
    report(f"{world.name}, seed {seed}: {ratios} of {best}")
    return {
        "name": world.name,
        "seed": seed,
        "num_turns": len(world.turns),
        "num_tokens": world.num_tokens,
        "temperature": world.temperature,
        "best_fixed": best,
        "best_fixed_tokens_per_second": rates[best],
        "rows": rows,
    }


def _play(world: World, name: str, seed: int, reviews: bool) -> Played:
    drafter, at, length = name.partition("@")
    if drafter == OFF or at:
        return play_fixed(world, drafter, int(length) if at else 0)
    return play_adaptive(world, drafter, seed, charges_host=True, reviews=reviews)


def _check(name: str, world: World) -> None:
    """Raise ConfigError for a policy that the world has not."""
    drafter, at, length = name.partition("@")
    known = (AUTO, OFF, *world.priced)
    if drafter not in known:
        raise ConfigError(
            f"There is no policy '{name}' for {world.name}. Did you mean '{nearest(name, known)}'?"
        )
    is_length = length.isdigit() and 1 <= int(length) <= MAX_LENGTH
    if at and (drafter in (AUTO, OFF) or not is_length):
        raise ConfigError(
            f"'{name}' is no policy. A fixed length is written like draft_model@4, for a drafter, "
            f"from 1 to {MAX_LENGTH}."
        )


def _row(name: str, played: Played, off_rate: float, best_rate: float) -> dict[str, Any]:
    return {
        "policy": name,
        "tokens_per_second": played.tokens_per_second,
        "ratio_to_off": played.tokens_per_second / off_rate,
        "ratio_to_best_fixed": played.tokens_per_second / best_rate,
        "num_rounds": played.num_rounds,
        "num_probes": played.num_probes,
        "acceptance_rate": ratio(played.num_accepted_tokens, played.num_draft_tokens),
        "host_us": played.host_us,
    }


def _summary(worlds: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [row for world in worlds for row in world["rows"]]
    summary = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        figures: dict[str, Any] = {"policy": policy, "num_plays": len(own)}
        host_us = [row["host_us"] for row in own if row["host_us"] is not None]
        figures["mean_host_us"] = mean(host_us) if host_us else None
        for name in RATIOS:
            figures[f"mean_{name}"] = mean(row[name] for row in own)
            figures[f"least_{name}"] = min(row[name] for row in own)
        summary.append(figures)
    return summary


def render(result: Mapping[str, Any]) -> str:
    """Return a table for each world and seed, best rate first; of several seeds one table of all
    worlds instead; and the summary."""
    if result["num_seeds"] > 1:
        lines = [*aligned(BY_WORLD_COLUMNS, result["by_world"]), ""]
    else:
        lines = [line for world in result["worlds"] for line in _world_lines(world)]
    return "\n".join([*lines, *aligned(SUMMARY_COLUMNS, result["summary"])])


def render_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all worlds and a sentence that names those which break the rule."""
    broken = [f"{row['world']} ({row['broken']})" for row in rows if row["broken"]]
    rule = f"mean -{MOST_LOST_IN_MEAN:g}, worst seed -{MOST_LOST_IN_LEAST:g}"
    verdict = f"No world breaks the rule ({rule})."
    if broken:
        verdict = f"{len(broken)} of {len(rows)} break the rule ({rule}): {'; '.join(broken)}."
    means = [mean(row[f"mean_{when}"] for row in rows) for when in ("before", "after")]
    sentence = f"Mean over worlds {means[0]:.4f} before, {means[1]:.4f} after. {verdict}"
    return "\n".join([*aligned(COMPARED_COLUMNS, rows), "", sentence])


def _world_lines(world: Mapping[str, Any]) -> list[str]:
    ordered = sorted(world["rows"], key=lambda row: -row["tokens_per_second"])
    return [
        f"{world['name']}, seed {world['seed']}: {world['num_tokens']} tokens in "
        f"{world['num_turns']} turns, best fixed {world['best_fixed']}",
        *aligned(COLUMNS, ordered),
        "",
    ]
