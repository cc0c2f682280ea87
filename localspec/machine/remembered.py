"""What earlier runs measured on this machine, as the planner's figures.

Contract: reads the learnt states that the log keeps (one for each combination of models, precision
and machine) and gives a Measurement for each that can be read; acceptance is that of the
temperature with the most evidence. A state that cannot be read is passed over: it is relearnt.

Not here: the form of the state (engine.controller), planning (planning).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.machine.planning import FULL_PRECISIONS, measurement_from_costs
from localspec.machine.shapes import Precision
from localspec.machine.speedup import Measurement

NO_DRAFT = "no draft"


def identity(target: str, draft: str | None, precision: str, *machine: str) -> str:
    """The name of one combination; what is learnt on it serves no other."""
    return " | ".join((target, draft or NO_DRAFT, precision, *machine))


def measurements(states: Mapping[str, Any], context_length: int) -> tuple[Measurement, ...]:
    """One Measurement for each learnt state that can be read."""
    found = (_measurement(name, state, context_length) for name, state in states.items())
    return tuple(each for each in found if each is not None)


def _measurement(name: str, state: Any, context_length: int) -> Measurement | None:
    from localspec.engine.acceptance import Acceptance

    target, draft, precision, *_ = [*name.split(" | "), "", "", ""]
    try:
        learnt = Acceptance.restored(state["acceptance"])
        return measurement_from_costs(
            target,
            _planned_precision(precision),
            state["costs"],
            {name: tuple(rates) for name, rates in learnt.best_known().items()},
            context_length,
            None if draft == NO_DRAFT else draft,
        )
    except (LookupError, ValueError, TypeError, AttributeError):
        return None


def _planned_precision(name: str) -> Precision:
    """The planner's word for the loader's."""
    if name == "4-bit":
        return "4-bit"
    return "8-bit" if name == "8-bit" else FULL_PRECISIONS[name]
