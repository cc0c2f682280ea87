"""`python -m tools.identity --prompts FILE.jsonl`: is a reply the same, whatever drafts it?

For every prompt and temperature a reply is written without drafting, then with `auto`, with every
drafter that is ready, and with a random drafter, length and rule in every round, all with the seed
of the prompt. Arms come in a random order and share the caches, so each meets what other turns
left; in three cases of ten the caches are emptied first. --out keeps a digest of every reply while
the run goes on; --against compares with the digests of an earlier run, so that a restart lies
between the two. `--order` draws another order of arms, and so another history.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, Any

from localspec.bench.cases import OWN_PROMPTS, Case, fitting_cases, load_prompts
from localspec.bench.runs import (
    BenchEngine,
    empty_caches,
    open_bench_engine,
    own_controller,
)
from localspec.cli.flags import MAX_TOKENS, TEMPERATURES, JsonFlag, LimitFlag, run_app
from localspec.cli.output import finish, to_stderr
from localspec.controller.policy import policy_of
from localspec.core.decoding import (
    AUTO,
    OFF,
    DraftPlan,
    Growth,
    Outcome,
    Policy,
)
from localspec.core.decoding import Sequence as Turn
from localspec.core.errors import ConfigError
from localspec.core.files import read_json
from localspec.core.filling import Filler, Filling
from localspec.core.flags import Flag, listed_numbers, only, require_temperatures
from localspec.core.options import LoadOptions
from localspec.engine.calibrate import calibrate

RANDOM = "a random drafter every round"
EMPTIED_SHARE = 0.3  # of the replies that start from empty caches
LONGEST_DRAFT = 12
FILLED_SHARE = 0.5  # of the rounds of a random drafter, in which a lookup may append to its chain


class RandomPolicy:
    """Another drafter, length and stopping rule in every round. filler: the name of a drafter that
    may append to chains, None: nothing is appended."""

    def __init__(self, names: Sequence[str], random: Random, filler: str | None = None) -> None:
        self._names, self._random, self._filler = names, random, filler

    def plan(self, sequence: Turn) -> DraftPlan:
        pick = self._random
        bar, price, power = pick.random(), pick.choice((0.0, 0.05, 0.2)), pick.choice((0.3, 1.0))
        prices = tuple(price * place for place in range(1, LONGEST_DRAFT + 1))
        growth = Growth(lambda confidence: confidence**power, prices, price)
        filling = None
        if self._filler is not None and pick.random() < FILLED_SHARE:
            filling = Filling(self._filler, LONGEST_DRAFT, growth.chance, growth)
        return DraftPlan(
            pick.choice(self._names),
            pick.randint(1, LONGEST_DRAFT),
            keep_drafting=pick.choice((None, lambda index, confidence: confidence > bar)),
            growth=pick.choice((None, growth)),
            filling=filling,
        )

    def observe(self, sequence: Turn, outcome: Outcome) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class Written:
    """One reply. key: of its prompt and temperature. num_accepted_tokens: by its drafts."""

    key: str
    arm: str
    tokens: tuple[int, ...]
    num_accepted_tokens: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.tokens).encode("ascii")).hexdigest()[:16]


def identity(
    options: Annotated[
        LoadOptions, only("profile", "model", "draft", "heads", "context", "dtype", "kernels")
    ],
    prompts: Annotated[Path, Flag("JSON lines as `bench` reads them.")] = OWN_PROMPTS,
    limit: LimitFlag = None,
    max_tokens: Annotated[int, MAX_TOKENS] = 12,
    temperatures: Annotated[str, TEMPERATURES] = "0,0.7,1",
    order: Annotated[int, Flag("Seed of the order of arms.")] = 0,
    out: Annotated[Path | None, Flag("Keep the digests here.")] = None,
    against: Annotated[Path | None, Flag("Digests of an earlier run.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Count the replies that differ from plain decoding, and from an earlier run."""
    asked = listed_numbers(temperatures, float)
    require_temperatures(asked)
    earlier = {} if against is None else digests_of(against)
    options = replace(options, parallel=1)
    bench = open_bench_engine(options, None, to_stderr)
    for phrase in calibrate(bench.engine, bench.controller):
        to_stderr(phrase)
    rows = load_prompts(prompts, limit)
    cases, skipped = fitting_cases(rows, bench.render, max_tokens, bench.context_length)
    count, started_s = Count(earlier), perf_counter()
    for number, case in enumerate(cases, 1):
        for temperature in asked:
            for written in replies(bench, case, temperature, max_tokens, order):
                count.take(written)
        taken_s = perf_counter() - started_s
        to_stderr(f"[{number}/{len(cases)}] {count.sentence()} {taken_s:.0f} s.")
        if out is not None:
            out.write_text(json.dumps(count.digests, indent=0), encoding="utf-8")
    result = {**count.as_json(), "num_prompts": len(cases), "num_skipped": len(skipped)}
    finish({**result, "machine": bench.machine}, table(result), as_json)
    if count.num_differing or count.num_other_than_earlier:
        sys.exit(1)


def digests_of(path: Path) -> Mapping[str, str]:
    """Of an earlier run. Raises ConfigError."""
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise ConfigError(f"{path} holds no digests. Name a file that --out has written.")
    return found


def replies(
    bench: BenchEngine, case: Case, temperature: float, max_tokens: int, order: int
) -> Iterator[Written]:
    """Of all arms, plain decoding among them."""
    pick = Random(f"{order} {case.id} {temperature}")
    arms = [OFF, AUTO, RANDOM, *bench.engine.drafters]
    pick.shuffle(arms)
    for arm in arms:
        if pick.random() < EMPTIED_SHARE:
            empty_caches(bench.engine, case.prompt)
        yield reply(bench, case, temperature, max_tokens, arm, pick)


def reply(
    bench: BenchEngine, case: Case, temperature: float, max_tokens: int, arm: str, pick: Random
) -> Written:
    turn = bench.begin(case, case.sampling(temperature), max_tokens)
    policy = _policy(bench, case, temperature, arm, pick)
    steps = [each.step for each in bench.engine.decode(turn, policy, threading.Event())]
    tokens = tuple(turn.tokens[turn.prompt_length :])
    accepted = sum(step.num_accepted_tokens for step in steps)
    return Written(f"{case.id} T {temperature:g}", arm, tokens, accepted)


def _policy(bench: BenchEngine, case: Case, temperature: float, arm: str, pick: Random) -> Policy:
    if arm == RANDOM:
        drafters = bench.engine.drafters
        filler = next((name for name, one in drafters.items() if isinstance(one, Filler)), None)
        return RandomPolicy((OFF, *drafters), pick, filler)
    sampling = case.sampling(temperature)
    return policy_of(own_controller(bench), sampling, arm, None, kind=case.workload)


class Count:
    """What differs, of the replies so far. digests: of plain decoding, by prompt, temperature."""

    def __init__(self, earlier: Mapping[str, str]) -> None:
        self.digests = dict[str, str]()
        self.num_replies = 0
        self.num_differing = 0
        self.num_other_than_earlier = 0
        self._earlier = earlier
        self._written = list[Written]()  # of the prompt and temperature under way
        self._by_arm = Counter[str]()
        self._accepted = Counter[str]()

    def take(self, written: Written) -> None:
        """Replies of one prompt and temperature come one after the other."""
        if self._written and self._written[-1].key != written.key:
            self._written.clear()
        self._written.append(written)
        self.num_replies += 1
        self._accepted[written.arm] += written.num_accepted_tokens
        first = self._earlier.get(written.key)
        self.num_other_than_earlier += first is not None and written.digest != first
        plain = next((each for each in self._written if each.arm == OFF), None)
        if plain is None:
            return
        self.digests[written.key] = plain.digest
        # The replies that came before plain decoding wait for it.
        for each in self._written if written.arm == OFF else (written,):
            if each.tokens != plain.tokens:
                self.num_differing += 1
                self._by_arm[each.arm] += 1

    def sentence(self) -> str:
        said = f"{self.num_differing} of {self.num_replies} replies differ from plain decoding"
        earlier = f", {self.num_other_than_earlier} from the earlier run" if self._earlier else ""
        return f"{said}{earlier}."

    def as_json(self) -> dict[str, Any]:
        return {
            "num_replies": self.num_replies,
            "num_differing": self.num_differing,
            "num_other_than_earlier": self.num_other_than_earlier if self._earlier else None,
            "differing_by_arm": {arm: self._by_arm[arm] for arm in sorted(self._accepted)},
            "accepted_by_arm": dict(sorted(self._accepted.items())),
        }


def table(result: Mapping[str, Any]) -> str:
    lines = ["| arm | draft tokens accepted | replies that differ |", "|---|---|---|"]
    for arm, accepted in result["accepted_by_arm"].items():
        lines.append(f"| {arm} | {accepted} | {result['differing_by_arm'][arm]} |")
    earlier = result["num_other_than_earlier"]
    return "\n".join(
        (
            *lines,
            "",
            f"{result['num_prompts']} prompts, {result['num_replies']} replies: "
            f"{result['num_differing']} differ from plain decoding"
            + (f", {earlier} from the earlier run." if earlier is not None else "."),
        )
    )


if __name__ == "__main__":
    run_app({"": identity}, "python -m tools.identity")
