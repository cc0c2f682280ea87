"""Runs the arms of one comparison: opens the peers, warms up, lets arms learn, alternates.

Contract: every prompt is run by every arm that can, in a turning order; arms that learn each have
a controller of their own, so none profits from what another tried. An arm that fails is taken
out with its reason and the others go on; only plain decoding is indispensable. `close` ends the
peers and may be called whatever happened.

Not here: loading and the report (suite), one run (stage, peers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from localspec.bench.arms import Arm, rotated
from localspec.bench.exactness import Difference, judge
from localspec.bench.peers.room import PeerRoom
from localspec.bench.report import Found, Measured
from localspec.bench.stage import Case, Run, Stage, own_controller, run_engine
from localspec.core import OFF
from localspec.engine.calibrate import calibrate
from localspec.engine.controller import Controller
from localspec.errors import LocalspecError

if TYPE_CHECKING:  # suite calls this module
    from localspec.bench.suite import BenchSettings

Report = Callable[[str], None]
WARM_UP_TOKENS = 16  # the first forwards of a process pay for its set-up


class Contest:
    """One comparison under way. found: gathers refusals and why it ended early."""

    def __init__(
        self, stage: Stage, settings: BenchSettings, found: Found, room: PeerRoom, report: Report
    ) -> None:
        self._stage = stage
        self._settings = settings
        self._found = found
        self._room = room
        self._report = report
        self._controllers: dict[str, Controller] = {}
        knows_more = stage.controller.elsewhere is not None
        self.controller_state = "cold, but for what comes with the models" if knows_more else "cold"

    def prepare(self, cases: Sequence[Case]) -> None:
        """Open the peers, measure costs, give each arm its controller, warm up, let arms learn."""
        self._open_peers()
        is_restored = self._stage.controller.costs.is_measured
        learning = [arm for arm in self._usable() if arm.is_learning]
        if learning and not is_restored:
            for phrase in calibrate(self._stage.engine, self._stage.controller):
                self._report(phrase)
        engine_arms = [arm for arm in self._usable() if not arm.is_peer]
        self._controllers = {arm.name: own_controller(self._stage) for arm in engine_arms}
        for arm in self._usable() if cases else []:
            self._report(f"warming up {arm.name}")
            self._attempt(arm, cases[0], self._settings.temperatures[0], WARM_UP_TOKENS)
        if is_restored:
            self.controller_state = "warm (learnt earlier, from the home)"
        elif self._settings.warm_prompts and cases:
            self._learn(cases)

    def _open_peers(self) -> None:
        for arm in self._usable():
            if not arm.is_peer:
                continue
            self._report(f"opening {arm.name}")
            try:
                self._report(f"{arm.name}: {self._room.open(arm).note}")
            except (LocalspecError, RuntimeError, MemoryError) as error:
                self._found.refused[arm.name] = _first_line(error)
                self._report(f"{arm.name}: {_first_line(error)}")

    def _learn(self, cases: Sequence[Case]) -> None:
        """Unmeasured runs over prompts spread through the file, so that every task is met."""
        count = self._settings.warm_prompts
        passes = -(-count // len(cases))
        chosen = [
            cases[index * passes * len(cases) // count % len(cases)] for index in range(count)
        ]
        for temperature in self._settings.temperatures:
            for arm in self._usable():
                if arm.is_learning:
                    self._report(f"{arm.name} learns from {count} prompts, T {temperature:g}")
                    for case in chosen:
                        self._attempt(arm, case, temperature, self._settings.max_tokens)
        self.controller_state = f"warm (unmeasured runs over {count} prompts)"

    def measure(self, cases: Sequence[Case]) -> Iterator[Measured]:
        """Every prompt at every temperature, the arms in a turning order."""
        started = monotonic()
        jobs = [(position, case, t) for position, case in enumerate(cases)
                for t in self._settings.temperatures]  # fmt: skip
        for number, (position, case, temperature) in enumerate(jobs, 1):
            limit_s = self._settings.time_limit_s
            if limit_s is not None and monotonic() - started > limit_s:
                self._found.ending = f"the time limit came before step {number} of {len(jobs)}."
                return
            runs = self._side_by_side(case, temperature, position)
            differences = self._differences(case, runs) if temperature == 0.0 else ()
            self._report(_progress(number, len(jobs), temperature, case, runs, differences))
            yield Measured(case, temperature, runs, differences)

    def _side_by_side(self, case: Case, temperature: float, position: int) -> dict[str, Run]:
        runs = dict[str, Run]()
        for arm in rotated(self._usable(), position):
            run = self._attempt(arm, case, temperature, self._settings.max_tokens)
            if run is not None:
                runs[arm.name] = run
        return runs

    def _usable(self) -> list[Arm]:
        return [arm for arm in self._found.arms if arm.name not in self._found.refused]

    def _attempt(self, arm: Arm, case: Case, temperature: float, max_tokens: int) -> Run | None:
        """The run; None when the arm fails, which takes it out of the comparison."""
        try:
            return self._run(arm, case, temperature, max_tokens)
        except (LocalspecError, RuntimeError, MemoryError) as error:
            if arm.drafter == OFF:
                raise  # without plain decoding nothing can be compared
            self._found.refused[arm.name] = f"it failed on {case.id}: {_first_line(error)}"
            self._report(f"{arm.name} failed on {case.id}: {_first_line(error)}")
            return None

    def _run(self, arm: Arm, case: Case, temperature: float, max_tokens: int) -> Run:
        sampling = case.sampling(temperature)
        if arm.is_peer:
            return self._room.run(arm, case, sampling, max_tokens)
        controller = self._controllers[arm.name]
        return run_engine(
            self._stage, controller, arm.drafter, arm.num_draft_tokens, case, sampling, max_tokens
        )

    def _differences(self, case: Case, runs: dict[str, Run]) -> tuple[Difference, ...]:
        plain, engine = runs[OFF].decided, self._stage.engine
        judged = (
            judge(engine, case.id, arm, case.prompt, plain, run.decided)
            for arm, run in runs.items()
            if arm != OFF
        )
        return tuple(difference for difference in judged if difference is not None)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _progress(
    number: int,
    total: int,
    temperature: float,
    case: Case,
    runs: dict[str, Run],
    differences: Sequence[Difference],
) -> str:
    rates = {arm: run.tokens_per_second for arm, run in sorted(runs.items())}
    shown = ", ".join(f"{arm} {rate:.0f}" if rate else f"{arm} -" for arm, rate in rates.items())
    told = "".join(
        f"; {each.arm} {'near-tie' if each.is_near_tie else 'DIFFERS'} at {each.position}"
        for each in differences
    )
    return f"[{number}/{total}] T {temperature:g} {case.id}: {shown} tokens/s{told}"
