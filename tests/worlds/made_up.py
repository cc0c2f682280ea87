"""Made-up worlds: drafters of a known acceptance on texts of a known kind, at known costs.

A draft model's confidence in a token is the chance it was drawn with: chances are spread around
the mean rate by a Beta distribution, which is what the demo draft's confidences follow on its
target's own text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from localspec.controller.acceptance import Acceptance, Situation, temperature_bucket
from localspec.drafters.lookup import MIN_MATCH
from localspec.drafters.ngram import discount_of, match_class
from tests.worlds.world import Stretch, Track, World

NUM_TOKENS = 12_000
# Of the Beta distribution of a draft model's chances. The demo draft's confidences follow it at 0.9
# over 945 greedy tokens of its target, and are calibrated within the error.
CONCENTRATION = 1.0
SHIPPED_ROUNDS = 100  # behind the shipped acceptance of a world, of each drafter and kind
TURN_TOKENS = 200
PROMPT_TOKENS = 100
SWITCH_EVERY = 40
TURN_EVERY = 1000
LOOKUP, MODEL = "ngram", "draft_model"

# A 346 M target on two cores with packed bf16 weights, a one-layer draft and a lookup.
FLAT: Mapping[str, Any] = {
    "verify_ms": {
        "1": {"128": 21.4}, "2": {"128": 21.4}, "4": {"128": 21.6}, "8": {"128": 24.4},
        "16": {"128": 29.7},
    },
    "draft_step_ms": {MODEL: {"128": 1.4}, LOOKUP: {"128": 0.01}},
}  # fmt: skip
# The same where checking more than one token is dear and the draft is half as deep as its target.
STEEP: Mapping[str, Any] = {
    "verify_ms": {
        "1": {"128": 17.3}, "2": {"128": 20.8}, "4": {"128": 24.6}, "8": {"128": 30.1},
        "16": {"128": 40.3},
    },
    "draft_step_ms": {MODEL: {"128": 2.6}, LOOKUP: {"128": 0.01}},
}  # fmt: skip
PRICES: Mapping[str, Mapping[str, Any]] = {"flat": FLAT, "steep": STEEP}
RATES = (0.2, 0.5, 0.8, 0.95)


@dataclass(frozen=True)
class Voice:
    """How one drafter does in one kind of text. rate: chance to be right. share: of positions
    where it has something to propose. is_sure: whether it says how sure it is of a token."""

    rate: float
    signal: str = "model"
    share: float = 1.0
    is_sure: bool = True


Kind = Mapping[str, Voice]
CODE_LOOKUP, PROSE_LOOKUP = Voice(0.85, "5-8", 0.7, False), Voice(0.15, "2", 0.3, False)


def confidence_of(random: Random, rate: float) -> float:
    """The chance of one token where the mean is `rate`."""
    low, high = max(1e-3, rate * CONCENTRATION), max(1e-3, (1.0 - rate) * CONCENTRATION)
    return random.betavariate(low, high)


def turns_of(num_tokens: int) -> tuple[Stretch, ...]:
    starts = [*range(0, num_tokens, TURN_TOKENS), num_tokens]
    return tuple(Stretch(a, b - a, PROMPT_TOKENS) for a, b in pairwise(starts))


def made_up(
    name: str, kinds: Callable[[int], Kind], costs: Mapping[str, Any], seed: int,
    num_tokens: int = NUM_TOKENS,
) -> World:  # fmt: skip
    """A text whose kind at each position is `kinds(position)`."""
    names = sorted(set(kinds(0)) | set(kinds(SWITCH_EVERY)))
    tracks = {each: _track(each, kinds, Random(f"{seed}/{each}"), num_tokens) for each in names}
    return World(name, tracks, turns_of(num_tokens), costs)


def _track(name: str, kinds: Callable[[int], Kind], random: Random, num_tokens: int) -> Track:
    signals, is_right, confidences = list[Hashable](), list[bool](), list[float]()
    for position in range(num_tokens):
        voice = kinds(position)[name]
        chance = confidence_of(random, voice.rate) if voice.is_sure else voice.rate
        signals.append(voice.signal if random.random() < voice.share else None)
        is_right.append(random.random() < chance)
        confidences.append(chance)
    said = tuple(confidences) if kinds(0)[name].is_sure else None
    return Track(tuple(signals), tuple(is_right), said)


def stationary(price: str, rate: float, seed: int, is_sure: bool = True) -> World:
    """One draft model that is right as often everywhere."""
    kind = {MODEL: Voice(rate, is_sure=is_sure)}
    name = f"{price}, {rate:g} everywhere{'' if is_sure else ', silent'}"
    return made_up(name, lambda _: kind, PRICES[price], seed)


def alternating(price: str, seed: int, is_sure: bool = True) -> World:
    """Code and prose by turns of SWITCH_EVERY tokens, with a draft model and a lookup."""
    code = {MODEL: Voice(0.95, is_sure=is_sure), LOOKUP: CODE_LOOKUP}
    prose = {MODEL: Voice(0.4, is_sure=is_sure), LOOKUP: PROSE_LOOKUP}

    def kinds(position: int) -> Kind:
        return prose if position // SWITCH_EVERY % 2 else code

    name = f"{price}, code and prose{'' if is_sure else ', silent'}"
    return made_up(name, kinds, PRICES[price], seed)


def adversarial(price: str, seed: int) -> World:
    """Drafters that are nearly always wrong."""
    kind = {MODEL: Voice(0.05), LOOKUP: Voice(0.05, "2", 0.5, False)}
    return made_up(f"{price}, always wrong", lambda _: kind, PRICES[price], seed)


def copying(
    price: str, seed: int, copied: float = 0.5, num_tokens: int = NUM_TOKENS, fills: bool = True
) -> World:
    """Passages of 6 to 40 tokens, of which a share is copied from earlier text. The lookup knows a
    copy after two tokens of it and is then right at 0.95; elsewhere it has nothing to propose.
    fills: the lookup may append to the chains of the draft model."""
    random = Random(f"copying/{price}/{seed}")
    signals, is_right, said = list[Hashable](), list[bool](), list[float]()
    while len(signals) < num_tokens:
        is_copy = random.random() < copied
        for place in range(random.randint(6, 40)):
            is_known = is_copy and place >= MIN_MATCH
            signals.append(match_class(place) if is_known else None)
            is_right.append(is_known and random.random() < 0.95)
            said.append(1.0 - discount_of(place, 1) if is_known else 0.0)
    columns = (tuple(column[:num_tokens]) for column in (signals, is_right, said))
    made = made_up("", lambda _: {MODEL: Voice(0.8)}, PRICES[price], seed, num_tokens)
    return replace(
        made,
        name=f"{price}, {copied:g} of the text copied",
        tracks={**made.tracks, LOOKUP: Track(*columns)},
        lookups=frozenset({LOOKUP} if fills else ()),
    )


def turning(price: str, seed: int) -> World:
    """A draft model that is good for TURN_EVERY tokens and then bad for as many."""
    good, bad = {MODEL: Voice(0.9, is_sure=False)}, {MODEL: Voice(0.1, is_sure=False)}

    def kinds(position: int) -> Kind:
        return bad if position // TURN_EVERY % 2 else good

    return made_up(f"{price}, good and bad turns, silent", kinds, PRICES[price], seed)


def misjudged(price: str, factor: float, seed: int) -> World:
    """Costs of checking several tokens were measured `factor` times what they are."""
    made = stationary(price, 0.5, seed, is_sure=False)
    true = PRICES[price]["verify_ms"]
    wrong = {
        width: {at: ms * (1.0 if width == "1" else factor) for at, ms in points.items()}
        for width, points in true.items()
    }
    name = f"{price}, checking misjudged by {factor:g}, silent"
    return replace(made, name=name, believed={**PRICES[price], "verify_ms": wrong})


LONGEST_REACH = 15
SHARES_OF_PLAIN = (0.01, 0.05, 0.1, 0.2, 0.3)  # that one step of a made-up drafter takes
# Of a plain step: what verifying more than one token costs besides, and each further token.
# "two threads" is the demo target on two cores, "one thread" on one.
SLOPES = {
    "flat": (0.0, 0.02), "steep": (0.0, 0.12), "one thread": (0.1, 0.035),
    "two threads": (0.68, 0.03),
}  # fmt: skip
MODEL_SHARES = (0.15, 0.2, 0.25)  # of the demo models
KINDS = ("chat", "code", "story")


def many_ways(
    seed: int,
    num_ways: int,
    price: str,
    plain_ms: float,
    num_turns: int,
    turn_tokens: int = 60,
    best_rate: float = 0.8,
    fade: float = 1.0,
    spread: float = 0.1,
    shares: tuple[float, ...] = SHARES_OF_PLAIN,
) -> World:
    """Drafters that differ by cost and kind of text; turns of three kinds alternate. best_rate: the
    highest acceptance of any. fade: by which acceptance falls with each position of a draft.
    spread: of a drafter's acceptance from turn to turn. shares: of a plain step, that one step of
    a drafter may take."""
    random = Random(f"{seed}/{num_ways}/{price}")
    (jump, slope), turns = SLOPES[price], list[Stretch]()
    for index in range(num_turns):
        kind = KINDS[index % len(KINDS)]
        turns.append(Stretch(index * turn_tokens, turn_tokens, PROMPT_TOKENS, kind))
    widths = {n: plain_ms * (1.0 + jump * (n > 0) + slope * n) for n in range(LONGEST_REACH + 1)}
    steps, tracks = dict[str, Any](), dict[str, Track]()
    for way in range(num_ways):
        name = f"way {way}"
        steps[name] = {"128": plain_ms * random.choice(shares)}
        means = {kind: random.uniform(0.1, best_rate) for kind in KINDS}
        reach = list[int]()
        for turn in turns:
            rate = min(0.97, max(0.02, random.gauss(means[turn.workload], spread)))
            reach += [_reach(random, rate, fade) for _ in range(turn.length)]
        tracks[name] = Track(("s",) * len(reach), (), None, tuple(reach))
    costs = {
        "verify_ms": {str(n + 1): {"128": ms} for n, ms in widths.items()},
        "draft_step_ms": steps,
    }
    name = f"{num_ways} ways, {price}, {num_turns} turns of {turn_tokens}, {plain_ms:g} ms"
    return World(name, tracks, tuple(turns), costs)


def _reach(random: Random, rate: float, fade: float) -> int:
    reach = 0
    while reach < LONGEST_REACH and random.random() < rate * fade**reach:
        reach += 1
    return reach


def misjudging(world: World, factor: float) -> World:
    """The same world, where checking several tokens was measured as `factor` of what it costs."""
    wrong = {
        width: {at: ms * (1.0 if width == "1" else factor) for at, ms in points.items()}
        for width, points in world.costs["verify_ms"].items()
    }
    name = f"{world.name}, checking misjudged by {factor:g}"
    return replace(world, name=name, believed={**world.costs, "verify_ms": wrong})


def hopeful(world: World, more: float) -> World:
    """The same world at a first start, with models whose shipped acceptance was measured on texts
    where every drafter is accepted more often than here."""
    random, found, bucket = Random(0), Acceptance(), temperature_bucket(world.temperature)
    for name, track in world.tracks.items():
        for kind, mean in _means(world, track).items():
            rate = min(0.95, mean + more)
            for _ in range(SHIPPED_ROUNDS):
                found.tick(kind)
                right = next((n for n in range(8) if random.random() >= rate), 8)
                found.observe(name, "s", Situation(bucket, kind), 8, right)
    name = f"{world.name}, shipped too high by {more:g}"
    return replace(world, name=name, shipped=found.snapshot())


def _means(world: World, track: Track) -> dict[str, float]:
    """By kind: how often the first token is right."""
    places = defaultdict[str, list[int]](list)
    for turn in world.turns:
        places[turn.workload] += range(turn.start, turn.start + turn.length)
    return {
        kind: sum(track.num_right(place, 1) for place in found) / len(found)
        for kind, found in sorted(places.items())
    }


def slowed(world: World, times: float) -> World:
    """The same world on a machine that is busy during the second quarter of the text."""
    quarter = world.num_tokens // 4
    name = f"{world.name}, {times:g} times slower for a while"
    return replace(world, name=name, slow=(quarter, 2 * quarter, times))


def contest_worlds(seed: int) -> tuple[World, ...]:
    """The worlds that controllers are compared in."""
    flat, steep = ("flat", 20.0), ("steep", 3.0)
    return (
        many_ways(seed, 11, *flat, 24),
        many_ways(seed, 11, *steep, 24),
        many_ways(seed, 11, *flat, 120),
        many_ways(seed, 11, *steep, 120),
        many_ways(seed, 11, "flat", 2.0, 60),
        many_ways(seed, 3, *flat, 60),
        many_ways(seed, 3, *steep, 60),
        many_ways(seed, 3, "steep", 2.0, 120, turn_tokens=20),
        _named("falling", many_ways(seed, 11, *flat, 60, fade=0.85)),
        _named("falling", many_ways(seed, 3, *steep, 60, fade=0.85)),
        _named("all lose", many_ways(seed, 11, *steep, 60, best_rate=0.12, spread=0.02)),
        _named("all lose", many_ways(seed, 11, "steep", 20.0, 60, best_rate=0.12, spread=0.02)),
        misjudging(many_ways(seed, 3, *flat, 60), 0.7),
        misjudging(many_ways(seed, 11, *steep, 60), 0.7),
        slowed(many_ways(seed, 11, *flat, 60), 1.5),
        slowed(many_ways(seed, 3, *steep, 60), 1.5),
        *first_starts(seed),
    )


def all_worlds(seed: int) -> tuple[World, ...]:
    """Return every world: steady and changing texts, the contest's, long prompts and two tasks."""
    steady = [stationary(price, rate, seed) for price in PRICES for rate in RATES]
    changing = [make(price, seed) for price in PRICES for make in (alternating, turning, copying)]
    hostile = [adversarial(price, seed) for price in PRICES]
    believed_wrong = [misjudged(price, 0.7, seed) for price in PRICES]
    long = [summaries(seed, price) for price in ("one thread", "flat", "two threads")]
    rest = (*contest_worlds(seed), *long, two_tasks(seed))
    return (*steady, *changing, *hostile, *believed_wrong, *rest)


@cache
def first_starts(seed: int) -> tuple[World, ...]:
    """The first 24 short replies after an installation: the costs of the demo models, whose shipped
    acceptance promises more than the texts hold, and in the last also a machine that was busy while
    plain decoding was measured."""

    def start(price: str, plain_ms: float, best_rate: float) -> World:
        made = many_ways(
            seed, 11, price, plain_ms, 24, 40, best_rate, 0.95, 0.15, shares=MODEL_SHARES
        )
        return replace(hopeful(made, 0.3), catch_up=0.03)

    one_thread, two_threads = start("one thread", 4.2, 0.45), start("two threads", 2.6, 0.6)
    return one_thread, two_threads, misjudging(one_thread, 0.8)


def summaries(seed: int, price: str = "one thread", num_turns: int = 48) -> World:
    """Long prompts with replies of 4 to 64 tokens, of which half have fewer than 16; the request
    allows 256. Reading takes a drafter 7 to 13 plain steps."""
    random = Random(f"summaries/{seed}")
    made = many_ways(seed, 5, price, 12.0, num_turns, 64, 0.8, 0.95, 0.15, shares=MODEL_SHARES)
    turns = tuple(
        replace(turn, length=int(4 * 16 ** random.random()), prompt_length=1000)
        for turn in made.turns
    )
    return replace(
        hopeful(made, 0.15), name=f"summaries, {price}", turns=turns, catch_up=0.05, max_tokens=256
    )


def two_tasks(seed: int, price: str = "one thread", long_rate: float = 0.15) -> World:
    """One kind of text with two tasks: short prompts whose drafts are accepted at 0.75, and every
    third prompt a long one whose drafts are accepted at `long_rate`, and have to be paid for by
    reading 1000 tokens. Replies have 8 to 64 tokens."""
    random, plain_ms = Random(f"two tasks/{seed}"), 4.2
    turns, place = list[Stretch](), 0
    for index in range(24):
        length = int(8 * 8 ** random.random())
        turns.append(Stretch(place, length, 1000 if is_long(index) else 60))
        place += length
    jump, slope = SLOPES[price]
    widths = {n: plain_ms * (1.0 + jump * (n > 0) + slope * n) for n in range(LONGEST_REACH + 1)}
    steps, tracks = dict[str, Any](), dict[str, Track]()
    for way in range(5):
        steps[f"way {way}"] = {"128": plain_ms * random.choice(MODEL_SHARES)}
        means = {True: random.gauss(long_rate, 0.08), False: random.gauss(0.75, 0.1)}
        reach = list[int]()
        for index, turn in enumerate(turns):
            rate = min(0.97, max(0.02, random.gauss(means[is_long(index)], 0.12)))
            reach += [_reach(random, rate, 0.95) for _ in range(turn.length)]
        tracks[f"way {way}"] = Track(("s",) * len(reach), (), None, tuple(reach))
    verify = {str(n + 1): {"128": ms} for n, ms in widths.items()}
    world = World(f"two tasks, {price}", tracks, tuple(turns),
                  {"verify_ms": verify, "draft_step_ms": steps})  # fmt: skip
    return replace(hopeful(world, 0.0), catch_up=0.02, max_tokens=64)


def is_long(index: int) -> bool:
    """Of the turns of `two_tasks`."""
    return index % 3 == 2


def _named(feature: str, world: World) -> World:
    return replace(world, name=f"{world.name}, {feature}")
