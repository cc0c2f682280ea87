"""What was drafted for one reply, from the difference of a server's counters in /metrics.

Contract: a difference belongs to one reply only if nothing else ran on the server meanwhile: no
request before and after it, one finished in between, and as many output tokens as the reply had.
`drafts_between` gives None where that is not so. Names are vLLM's.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.core.errors import LocalspecError
from localspec.remote.servers import LOOK_S

if TYPE_CHECKING:
    from localspec.remote.connection import Connection

UPDATE_S = 1.0  # the counters follow the end of a reply after some ms
LOOK_AGAIN_S = 0.02


@dataclass(frozen=True)
class Counters:
    """The counters of all engines behind one server together, at one moment."""

    num_active: float
    num_finished: float
    num_output_tokens: float
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float


@dataclass(frozen=True)
class Drafts:
    """What was drafted for one reply. num_drafts: None where that is not told."""

    num_drafts: int | None
    num_draft_tokens: int
    num_accepted_tokens: int


# Field of Counters: samples that are added up. A server that does not speculate has none of the
# last three, which is 0.
SAMPLES = {
    "num_active": ("num_requests_running", "num_requests_waiting"),
    "num_finished": ("request_success_total",),
    "num_output_tokens": ("generation_tokens_total",),
    "num_drafts": ("spec_decode_num_drafts_total",),
    "num_draft_tokens": ("spec_decode_num_draft_tokens_total",),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
}


def read(connection: Connection, prefix: str) -> Counters | None:
    """None where the server shows none."""
    try:
        answer = connection.ask("GET", "/metrics", LOOK_S)
    except LocalspecError:
        return None
    return counters_in(answer.text, prefix) if answer.status == 200 else None


def counters_in(text: str, prefix: str) -> Counters | None:
    """From the text of /metrics; None where it is of another program."""
    from prometheus_client.parser import text_string_to_metric_families

    fields = {f"{prefix}:{name}": each for each, names in SAMPLES.items() for name in names}
    # Most lines are buckets of histograms; parsing them all takes longer than a decode step.
    lines = [line for line in text.splitlines() if line.partition("{")[0] in fields]
    if not any(line.startswith(f"{prefix}:generation_tokens_total") for line in lines):
        return None
    sums = dict.fromkeys(SAMPLES, 0.0)
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                if sample.name in fields:
                    sums[fields[sample.name]] += sample.value
    except ValueError:
        return None
    return Counters(**sums) if all(map(math.isfinite, sums.values())) else None


def read_after(connection: Connection, prefix: str, before: Counters) -> Counters | None:
    """Return the counters once they hold a reply that ended since `before` and nothing is active:
    a server counts a reply that a stop text ended before it lets go of it. Return them at once
    where others ran too."""
    until_s = time.monotonic() + UPDATE_S
    while True:
        after = read(connection, prefix)
        if after is None or before.num_active > 0 or time.monotonic() > until_s:
            return after
        num_ended = after.num_finished - before.num_finished
        if num_ended > 1 or (num_ended == 1 and after.num_active == 0):
            return after
        time.sleep(LOOK_AGAIN_S)


def drafts_between(before: Counters, after: Counters, num_output_tokens: int) -> Drafts | None:
    """Of the only reply in between; None where it was not the only one."""
    is_alone = (
        before.num_active == after.num_active == 0
        and after.num_finished - before.num_finished == 1
        and after.num_output_tokens - before.num_output_tokens == num_output_tokens
    )
    if not is_alone:
        return None
    return Drafts(
        int(after.num_drafts - before.num_drafts),
        int(after.num_draft_tokens - before.num_draft_tokens),
        int(after.num_accepted_tokens - before.num_accepted_tokens),
    )
