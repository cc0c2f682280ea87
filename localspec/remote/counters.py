"""What was drafted for one reply, from the difference of a server's counters in /metrics.

Contract: a difference belongs to one reply only if nothing else ran on the server meanwhile: no
request before and after it, one finished in between, and as many output tokens as the reply had.
`drafts_between` gives None where that is not so. Names are vLLM's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx2

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


def read(client: httpx2.Client, prefix: str) -> Counters | None:
    """None where the server shows none."""
    import httpx2

    try:
        answer = client.get("/metrics")
    except httpx2.HTTPError:
        return None
    return counters_in(answer.text, prefix) if answer.status_code == 200 else None


def counters_in(text: str, prefix: str) -> Counters | None:
    """From the text of /metrics; None where it is of another program."""
    from prometheus_client.parser import text_string_to_metric_families

    fields = {f"{prefix}:{name}": each for each, names in SAMPLES.items() for name in names}
    # Most lines are buckets of histograms; parsing them all takes longer than a decode step.
    lines = [line for line in text.splitlines() if line.partition("{")[0] in fields]
    if not any(line.startswith(f"{prefix}:generation_tokens_total") for line in lines):
        return None
    sums = dict.fromkeys(SAMPLES, 0.0)
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name in fields:
                sums[fields[sample.name]] += sample.value
    return Counters(**sums)


def read_after(client: httpx2.Client, prefix: str, before: Counters) -> Counters | None:
    """Once the counters hold a reply that ended since `before`."""
    until_s = time.monotonic() + UPDATE_S
    while True:
        found = read(client, prefix)
        is_there = found is not None and found.num_finished > before.num_finished
        if found is None or is_there or time.monotonic() > until_s:
            return found
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
