"""The commands: plan, generate, export, doctor, and the groups bench and train.

Contract: each command parses flags, calls the wings and prints a result; with --json the last
line is one JSON object. A LocalspecError is one sentence on stderr and exit code 1; anything else
is a fault of ours and shows its traceback.

`generate` answers one message without a page. It measures costs first where the controller chooses
and some were never measured. With --home the learnt state is read from there and written back;
without one the run starts cold. Nothing else is logged.

Not here: the commands of `bench` and `train` (bench.commands, training.commands). Heavy imports
are inside the functions, so that --help answers at once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from localspec.bench.commands import app as bench_app
from localspec.errors import ConfigError, LocalspecError, StoreError
from localspec.flags import (
    ContextFlag,
    DrafterFlag,
    DraftFlag,
    DtypeFlag,
    HeadsFlag,
    HomeFlag,
    JsonFlag,
    ModelFlag,
    ProfileFlag,
    finish,
    run_app,
)
from localspec.options import LoadOptions
from localspec.record.rows import LARGEST_INTEGER
from localspec.training.commands import app as train_app

if TYPE_CHECKING:
    from localspec.backend import Chunk, Request, TurnStats
    from localspec.chat.local import LocalBackend
    from localspec.workloads import Decision

STATISTICS = (
    "drafter", "num_output_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
    "acceptance_rate", "draft_share", "mean_accepted_length", "tokens_per_second", "ttft_ms",
    "prefill_ms", "decode_ms", "reply_ms", "speedup", "decode_speedup", "no_speedup", "exact",
    "num_lenient_tokens", "reason",
)  # fmt: skip

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Chat with exact speculative decoding, measured on this machine.",
)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The only message of the conversation.")],
    num_draft_tokens: Annotated[int | None, typer.Option(help="Fixed draft length.")] = None,
    temperature: Annotated[float, typer.Option()] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    max_tokens: Annotated[int, typer.Option()] = 256,
    workload: Annotated[
        str, typer.Option(help="Kind of text: chat, code, json, rework, story; auto recognises it.")
    ] = "auto",
    lenient: Annotated[
        str | None,
        typer.Option(
            help="Not exact any more: threshold[:VALUE,FLOOR] (alone: the kind of text's own), "
            "typical[:EPSILON,DELTA] or factor[:VALUE]. exact: even where your profile is lenient."
        ),
    ] = None,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    heads: HeadsFlag = None,
    drafter: DrafterFlag = None,
    context: ContextFlag = None,
    dtype: DtypeFlag = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer one message."""
    from localspec.backend import Message, Request
    from localspec.config import settings_for
    from localspec.core import AUTO, SamplingParams
    from localspec.workloads import AS_SET, EXACT, decide, load_workloads, workload_folders

    workloads = load_workloads(workload_folders(settings_for(home)))
    decision = decide(workloads, workload, lenient or AS_SET, prompt)
    leniency = decision.leniency
    request = Request(
        messages=(Message("user", prompt),),
        sampling=SamplingParams(temperature, top_k, top_p, min_p, seed=seed, leniency=leniency),
        max_tokens=max_tokens,
        drafter=drafter or AUTO,
        num_draft_tokens=num_draft_tokens,
        first_num_draft_tokens=decision.workload.first_num_draft_tokens,
        workload=decision.workload.name,
    )
    options = LoadOptions(profile, model, draft, drafter, context, dtype, tuple(heads or ()), home)
    result = labelled(answer(options, request, home), decision)
    finish(result, f"{result['text']}{note_of(result, lenient not in (None, EXACT))}", as_json)


def answer(options: LoadOptions, request: Request, home: Path | None) -> dict[str, Any]:
    """The reply to `request` as plain JSON data. Raises LocalspecError."""
    from localspec.config import settings_for
    from localspec.load import open_local_backend
    from localspec.record.store import STATE_KEY, Store

    with ExitStack() as stack:
        store = state = None
        if home is not None:
            store = stack.enter_context(closing(Store.open(settings_for(home).database)))
            state = store.load_state(STATE_KEY)
            _notify(store.notices)
        backend = open_local_backend(options, state, lambda phrase: None)
        _notify(backend.describe().notices)
        if backend.lacks_costs(request):
            for _ in backend.calibrate(threading.Event()):
                pass
        result = collect(backend, request)
        if store is not None:
            store.save_state(STATE_KEY, backend.snapshot())
        return result


def collect(backend: LocalBackend, request: Request) -> dict[str, Any]:
    """Run the turn to its end. Raises LocalspecError when it ended in an error."""
    chunks: list[Chunk] = list(backend.generate(request, threading.Event()))
    last = chunks[-1]
    if last.finish_reason == "error":
        raise LocalspecError(last.error or "The engine stopped without saying why.")
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": [token for chunk in chunks for token in chunk.tokens],
        "provenance": [name for chunk in chunks for name in chunk.provenance],
        "finish_reason": last.finish_reason,
        "stats": statistics_json(last.stats),
    }


def statistics_json(stats: TurnStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in STATISTICS}


def labelled(result: dict[str, Any], decision: Decision) -> dict[str, Any]:
    """The result with the kind of text, the rule of checking and its label ("exact" or what was
    lenient)."""
    from localspec.leniency import as_data, label

    stats, rule = result["stats"], decision.leniency
    lenient = label(stats["num_lenient_tokens"], stats["num_output_tokens"])
    return {
        **result,
        "workload": decision.workload.name,
        "is_workload_recognised": decision.is_recognised,
        "leniency": None if rule is None else as_data(rule),
        "label": "exact" if rule is None else lenient,
    }


def note_of(result: dict[str, Any], is_leniency_asked: bool) -> str:
    """The line below a reply: how it was checked, where that was not exactly or not as asked."""
    if result["leniency"] is not None:
        return f"\n[{result['label']}; kind of text: {result['workload']}]"
    return f"\n[exact: {result['workload']} has no threshold]" if is_leniency_asked else ""


def _notify(notices: Iterable[str]) -> None:
    for notice in notices:
        print(notice, file=sys.stderr)


@app.command()
def plan(
    vram_gib: Annotated[float | None, typer.Option(help="Free memory to plan for.")] = None,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    heads: HeadsFlag = None,
    drafter: DrafterFlag = None,
    context: ContextFlag = None,
    dtype: DtypeFlag = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what fits on this machine, with which drafter, and why."""
    from localspec.config import settings_for
    from localspec.engine.controller import measurements
    from localspec.machine.hardware import probe
    from localspec.machine.plan_report import make_plans, render
    from localspec.machine.plans import DEFAULT_CONTEXT, room_for
    from localspec.record.log_file import learnt_states

    options = LoadOptions(profile, model, draft, drafter, context, dtype, tuple(heads or ()), home)
    hardware = probe()
    learnt = measurements(learnt_states(home), context or DEFAULT_CONTEXT)
    report = make_plans(options, settings_for(home), vram_gib, hardware, learnt)
    text = "" if as_json else render(report, room_for(hardware, vram_gib).free_bytes)
    finish(report.as_dict(), text, as_json)


@app.command()
def doctor(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Say what was found, what is missing, the fix, and what has never run here."""
    from localspec.config import settings_for
    from localspec.machine.doctor import doctor_report, render

    report = doctor_report(settings_for(home))
    finish(report, "" if as_json else render(report), as_json)


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    form: Annotated[str, typer.Option("--format", help="csv, jsonl, markdown or sqlite.")] = "csv",
    session: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_INTEGER, help="Only this session's turns.")
    ] = None,
    conversation: Annotated[
        int | None, typer.Option(min=1, max=LARGEST_INTEGER, help="Only this conversation.")
    ] = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Write what was logged to a file."""
    from localspec.config import settings_for
    from localspec.record.contents import Scope, read_contents
    from localspec.record.export import Format
    from localspec.record.export import export as write
    from localspec.record.store import Store

    if form not in get_args(Format):
        known = ", ".join(get_args(Format))
        raise ConfigError(f"{form!r} is no export format. Choose one of: {known}.")
    database = settings_for(home).database
    if not database.is_file():
        raise StoreError(f"There is no log at {database}. Chat first, or name its --home.")
    store = Store.open(database)
    try:
        _notify(store.notices)
        scope = Scope(session, conversation)
        if not (store.turn_rows(session, conversation) or read_contents(store, scope).messages):
            raise StoreError(_nothing_there(session, conversation))
        write(store, scope, cast("Format", form), out)
    finally:
        store.close()
    finish({"out": str(out), "format": form, "bytes": out.stat().st_size}, f"{out}", as_json)


def _nothing_there(session: int | None, conversation: int | None) -> str:
    wanted = {"session": session, "conversation": conversation}
    named = " and ".join(f"{name} {number}" for name, number in wanted.items() if number)
    if named:
        return (
            f"There is no turn in {named}, so nothing was written. Name another, or leave it out."
        )
    return "The log holds no turn, so nothing was written. Chat first, or name another --home."


def main() -> None:
    run_app(app)
