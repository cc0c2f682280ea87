"""The process that fetches: `python -m localspec.machine.downloads.worker MODEL_ID [--survey]`.

Contract: one JSON object a line on stdout: {"survey"}, {"file", "bytes", "phase"}, and last
{"folder"} or {"fault"}; at most REPORTS_PER_S lines a second beside changes of phase. It ends as
soon as nobody reads them. --survey stops after the dry run. It imports neither torch nor the page.

The app itself runs with the hub's client offline; this process is started with it online, and
only because somebody asked for a model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from localspec.machine.downloads.faults import fault_of
from localspec.machine.downloads.fetch import fetch
from localspec.machine.downloads.listing import Survey, survey

REPORTS_PER_S = 5.0
# The client's own 10 MiB would show nothing for long on a slow line, and lose as much at a kill.
CHUNK_BYTES = 64 * 1024


def say(data: dict[str, Any]) -> None:
    try:
        print(json.dumps(data), flush=True)
    except OSError:  # the app is gone
        os._exit(1)


class Reporter:
    """Passes on progress, but not every piece of it."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._last: tuple[str, str] = ("", "")

    def __call__(self, name: str, num_bytes: int, phase: str) -> None:
        now = time.monotonic()
        if (name, phase) == self._last and now - self._last_s < 1.0 / REPORTS_PER_S:
            return
        self._last, self._last_s = (name, phase), now
        say({"file": name, "bytes": num_bytes, "phase": phase})


def run(model_id: str, is_survey_only: bool) -> int:
    """The exit code. Every failure is a fault that was said."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES

    def on_survey(found: Survey) -> None:
        say({"survey": found.as_dict()})

    try:
        if is_survey_only:
            on_survey(survey(model_id))
        else:
            say({"folder": str(fetch(model_id, on_survey, Reporter()))})
    except Exception as error:  # the edge of this process: the client raises many types
        timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        fault = fault_of(error, model_id, get_token() is not None, timeout_s)
        say({"fault": asdict(fault)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], "--survey" in sys.argv[2:]))
