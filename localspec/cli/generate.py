"""The command generate: one message answered without a page, or a logged reply made again.

Contract: the result is plain JSON data. Costs are measured first where the controller chooses and
some were never measured, with progress on stderr. The learnt state is read from the home and
written back, so the next run measures nothing again. Nothing else is logged. `--replay` takes
everything but the drafter from the log and says whether the reply is identical, token for token; it
writes nothing.

Not here: the other commands (cli), what a replay is (chat.audit). Heavy imports are inside the
functions, so that --help answers at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

from localspec.cli.flags import MAX_TOKENS, JsonFlag
from localspec.cli.output import finish, to_stderr
from localspec.core.config import with_server
from localspec.core.errors import ConfigError, RequestError, StoreError
from localspec.core.figures import figure_names
from localspec.core.flags import Flag, without
from localspec.core.options import LoadOptions, RemoteFlags
from localspec.core.units import clock, counted

if TYPE_CHECKING:
    from localspec.chat.local import LocalBackend
    from localspec.core.backend import Backend, Request
    from localspec.core.turn_stats import TurnStats
    from localspec.core.workloads import Decision
    from localspec.record.store import Store

ALL_THOUGHT = (
    "\n[The model thought and gave no answer. --json shows the thought; a larger --max-tokens "
    "leaves room for an answer.]"
)


@dataclass(frozen=True)
class GenerateFlags:
    """What is to be answered or made again, and how."""

    prompt: Annotated[
        str | None, Flag("The only message of the conversation.", is_positional=True)
    ] = None
    replay: Annotated[
        int | None,
        Flag(
            "Make the reply of this turn of the log again, as it was asked for, and say whether it "
            "is identical. --drafter off or a name changes what drafts.",
            "TURN",
        ),
    ] = None
    num_draft_tokens: Annotated[int | None, Flag("Fixed draft length.")] = None
    temperature: Annotated[float, Flag()] = 0.0
    top_p: Annotated[float, Flag()] = 1.0
    top_k: Annotated[int, Flag()] = 0
    min_p: Annotated[float, Flag()] = 0.0
    seed: Annotated[int | None, Flag("Default: a new one.")] = None
    max_tokens: Annotated[int, MAX_TOKENS] = 256
    stop: Annotated[
        tuple[str, ...], Flag("End the reply before this text; repeatable.", "TEXT")
    ] = ()
    workload: Annotated[
        str, Flag("Kind of text: chat, code, json, rework, story; auto recognises it.", "KIND")
    ] = "auto"
    lenient: Annotated[
        str | None,
        Flag(
            "Not exact any more: threshold[:VALUE] (alone: the kind of text's own), "
            "typical[:EPSILON,DELTA] or factor[:VALUE]. exact: even where your profile is lenient.",
            "RULE",
        ),
    ] = None
    raw: Annotated[
        bool, Flag("Continue the message as a text, without the model's chat template.")
    ] = False


def generate(
    asked: GenerateFlags,
    options: Annotated[LoadOptions, without("parallel")],
    remote: RemoteFlags,
    as_json: JsonFlag = False,
) -> None:
    """Answer one message, or make a logged reply again."""
    from localspec.core.workloads import EXACT

    options = replace(with_server(options, remote), raw=asked.raw, parallel=1)
    if (asked.prompt is None) is (asked.replay is None):
        raise ConfigError("generate needs a message to answer, or --replay with a turn of the log.")
    if asked.replay is not None:
        if asked != GenerateFlags(replay=asked.replay):
            raise ConfigError(
                "--replay takes the settings of the reply from the log, so other flags of a reply "
                "have no effect. Leave them out."
            )
        result = replayed(options, asked.replay)
        finish(result, f"{result['text']}\n[{result['sentence']}]", as_json, is_exact=True)
        return
    request, decision = request_of(asked, options)
    result = labelled(answer(options, request), decision)
    note = note_of(result, asked.lenient not in (None, EXACT))
    finish(result, f"{result['text']}{note}", as_json, is_exact=True)
    to_stderr(*speed_lines(result["stats"]))


def request_of(asked: GenerateFlags, options: LoadOptions) -> tuple[Request, Decision]:
    """The request for a message, and the settings of its kind of text. Raises RequestError."""
    from localspec.chat.turn import seeded
    from localspec.core.backend import Message, Request
    from localspec.core.config import settings_for
    from localspec.core.decoding import AUTO, SamplingParams
    from localspec.core.workloads import AS_SET, decide, load_workloads, workload_folders

    prompt = asked.prompt or ""
    if not prompt.strip():
        raise RequestError("The message is empty. Write one between quotation marks.")
    workloads = load_workloads(workload_folders(settings_for(options.home)))
    decision = decide(workloads, asked.workload, asked.lenient or AS_SET, prompt)
    sampling = SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seed=asked.seed,
        leniency=decision.leniency,
    )
    request = Request(
        messages=(Message("user", prompt),),
        sampling=seeded(sampling),
        max_tokens=asked.max_tokens,
        stop=asked.stop,
        drafter=options.drafter or AUTO,
        num_draft_tokens=asked.num_draft_tokens,
        first_num_draft_tokens=decision.workload.first_num_draft_tokens,
        workload=decision.workload.name,
        is_raw=asked.raw and options.remote is not None,
    )
    return request, decision


def answer(options: LoadOptions, request: Request) -> dict[str, Any]:
    """The reply to `request` as plain JSON data. Raises LocalspecError."""
    from localspec.core.config import settings_for
    from localspec.loading.local_backend import open_local_backend
    from localspec.record.log_file import learnt_states
    from localspec.remote.server import ServerBackend

    if options.remote is not None:
        with closing(ServerBackend(options.remote)) as server:
            to_stderr(*server.describe().notices)
            return collect(server, request)
    home = settings_for(options.home).home
    backend = open_local_backend(options, learnt_states(home), lambda phrase: None)
    to_stderr(*backend.describe().notices)
    if backend.lacks_costs(request):
        measure(backend)
    result = collect(backend, request)
    keep_learnt(home, backend)
    return result


def keep_learnt(home: Path, backend: LocalBackend) -> None:
    """Write what a backend learnt into the log of a home. A log that cannot be written is told, for
    the reply is there."""
    from localspec.core.config import settings_for
    from localspec.record.rows import MOST_OTHERS
    from localspec.record.store import STATE_KEY, Store

    try:
        with closing(Store.open(settings_for(home).database)) as store:
            to_stderr(*store.notices)
            store.save_state(STATE_KEY, backend.snapshot(), MOST_OTHERS)
    except StoreError as error:
        to_stderr(f"{error} What was measured is measured again the next time.")


def collect(backend: Backend, request: Request) -> dict[str, Any]:
    """Run the turn to its end. Raises LocalspecError when it ended in an error."""
    from localspec.core.backend import chunks_of

    chunks = list(chunks_of(backend, request, threading.Event()))
    last = chunks[-1]
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "thinking": "".join(chunk.thinking for chunk in chunks),
        "tokens": [token for chunk in chunks for token in chunk.tokens],
        "provenance": [name for chunk in chunks for name in chunk.provenance],
        "finish_reason": last.finish_reason,
        "seed": request.sampling.seed,
        "stats": statistics_json(last.stats),
    }


def statistics_json(stats: TurnStats) -> dict[str, Any]:
    return {name: stats.told(name) for name in figure_names("command")}


def speed_lines(stats: Mapping[str, Any]) -> list[str]:
    """Return how fast a reply came, as a line; none where it was too short to tell."""
    rate = stats["tokens_per_second"]
    if rate is None:
        return []
    return [f"[{counted(stats['num_output_tokens'], 'token')}, {rate:.1f} tokens/s]"]


def labelled(result: dict[str, Any], decision: Decision) -> dict[str, Any]:
    """The result with the kind of text, the rule of checking and its label ("exact", what was
    lenient, or None where a server checked)."""
    from localspec.core.leniency import as_data, label

    stats, rule = result["stats"], decision.leniency
    rule_words = "exact" if stats["exact"] else None  # of a server it is not known
    if rule is not None:
        rule_words = label(stats["num_lenient_tokens"], stats["num_output_tokens"])
    return {
        **result,
        "workload": decision.workload.name,
        "is_workload_recognised": decision.is_recognised,
        "leniency": None if rule is None else as_data(rule),
        "label": rule_words,
    }


def note_of(result: dict[str, Any], is_leniency_asked: bool) -> str:
    """The lines below a reply: that it is all thought, which is not shown; and how it was checked,
    where that was not exactly or not as asked."""
    said = ALL_THOUGHT if result["thinking"] and not result["text"] else ""
    if result["leniency"] is not None:
        return f"{said}\n[{result['label']}; kind of text: {result['workload']}]"
    return f"{said}\n[exact: {result['workload']} has no threshold]" if is_leniency_asked else said


# -- a logged reply, made again -----------------------------------------------------------------


def replayed(options: LoadOptions, turn_id: int) -> dict[str, Any]:
    """A logged reply made again as plain JSON data; a drafter of None is the one asked for then.
    Raises LocalspecError, also where it cannot be made again."""
    from localspec.chat.audit import replay_of, sentence
    from localspec.core.decoding import AUTO
    from localspec.loading.local_backend import open_local_backend
    from localspec.record.store import STATE_KEY

    if options.remote is not None:
        raise ConfigError(
            "--replay compares tokens, which a server does not tell. Leave --remote out."
        )
    with closing(open_log_of(options.home)) as store:
        row = next((row for row in store.turn_rows() if row["turn_id"] == turn_id), None)
        if row is None:
            raise StoreError(f"The log has no turn {turn_id}. `export --format csv` lists them.")
        asked = options.drafter or row["drafter_requested"] or AUTO
        replay = replay_of(store, row["message_id"], asked)
        state = store.load_state(STATE_KEY)
    backend = open_local_backend(_as_logged(options, row), state, lambda phrase: None)
    to_stderr(*backend.describe().notices)
    if backend.lacks_costs(replay.request):
        measure(backend)
    replay.run(backend, threading.Event())
    if replay.finding is None:
        raise RequestError(replay.refusal or "The reply was not made again.")
    found = replay.finding
    return {
        "turn_id": turn_id,
        "drafter": asked,
        "text": replay.text,
        "outcome": found.outcome,
        "num_compared": found.num_compared,
        "changes": found.changes,
        "sentence": sentence(replay),
    }


def _as_logged(options: LoadOptions, row: dict[str, Any]) -> LoadOptions:
    """What is not asked for otherwise is loaded as it was. A model's folder is not in the log."""
    is_named = options.model is not None or options.profile is not None
    logged = row["model"] if not is_named and "/" in (row["model"] or "") else None
    return replace(
        options,
        model=options.model or logged,
        dtype=options.dtype or row["dtype"],
        context=options.context or row["context_length"],
        kernels=options.kernels or row["kernels"],
        fetches=options.fetches and logged is None,
    )


def open_log_of(home: Path | None) -> Store:
    """The log of a home, which must be there. Raises StoreError."""
    from localspec.core.config import settings_for
    from localspec.record.store import Store

    database = settings_for(home).database
    if not database.is_file():
        raise StoreError(f"There is no log at {database}. Chat first, or name its --home.")
    store = Store.open(database)
    to_stderr(*store.notices)
    return store


def measure(backend: LocalBackend) -> None:
    """Measure the costs that are not known, with a line of progress before each part, which a
    terminal shows in place of the one before."""
    to_stderr("Measuring what each way of drafting costs here. This is done once for these models.")
    started, shown = perf_counter(), ""
    for phrase in backend.calibrate(threading.Event()):
        if phrase != shown:
            line = f"  {clock(perf_counter() - started):>5}  {phrase}"
            is_terminal = sys.stderr.isatty()
            print(f"\r{line:<78}" if is_terminal else line, file=sys.stderr, flush=True,
                  end="" if is_terminal else "\n")  # fmt: skip
            shown = phrase
    to_stderr(*[""] * sys.stderr.isatty(), f"Measured in {clock(perf_counter() - started)}.")
