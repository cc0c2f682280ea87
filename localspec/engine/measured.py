"""What earlier runs measured on this machine, as measurements for the planner.

Contract: reads the learnt states that the log keeps (one for each combination of models, precision
and machine) and gives a Measurement for each that can be read; acceptance is that of the
temperature with the most evidence. A state that cannot be read is skipped; it is learnt again.
No torch.

Not here: the form of the state (controller), planning (machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.engine.acceptance import Acceptance
from localspec.speculation import Measurement

NO_DRAFT = "no draft"
# The loader's names of precisions, and the planner's.
PRECISIONS = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "8-bit": "8-bit",
    "4-bit": "4-bit",
}


def identity(target: str, draft: str | None, precision: str, *machine: str) -> str:
    """The name of one combination; what is learnt on it serves no other."""
    return " | ".join((target, draft or NO_DRAFT, precision, *machine))


def measurements(states: Mapping[str, Any], context_length: int) -> tuple[Measurement, ...]:
    """One Measurement for each learnt state that can be read, its costs taken at the measured
    context nearest to `context_length`."""
    found = (_measurement(name, state, context_length) for name, state in states.items())
    return tuple(each for each in found if each is not None)


def _measurement(name: str, state: Any, context_length: int) -> Measurement | None:
    def near(points: Mapping[str, float]) -> float:
        return points[min(points, key=lambda at: abs(int(at) - context_length))]

    target, draft, precision, *_ = [*name.split(" | "), "", "", ""]
    try:
        costs, learnt = state["costs"], Acceptance.restored(state["acceptance"])
        return Measurement(
            target=target,
            precision=PRECISIONS[precision],
            verify_ms={int(width): near(points) for width, points in costs["verify_ms"].items()},
            draft_step_ms={name: near(points) for name, points in costs["draft_step_ms"].items()},
            acceptance={name: tuple(rates) for name, rates in learnt.best_known().items()},
            draft=None if draft == NO_DRAFT else draft,
        )
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError):
        return None
