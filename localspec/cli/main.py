"""The commands of `python -m localspec`.

Contract: each command parses flags, calls the wings and prints a result; with --json the last
line is one JSON object. A LocalspecError is one sentence on stderr and exit code 1; anything else
is a fault of ours and shows its traceback.

Not here: `generate`, `serve` and `keys`, `cluster`, and the commands of `bench` and `train`, which
have a file each. Heavy imports are inside the functions, so that --help answers at once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast, get_args

from localspec.cli import bench, serve, train
from localspec.cli.cluster import cluster
from localspec.cli.flags import Command, JsonFlag, run_app
from localspec.cli.generate import generate, open_log_of
from localspec.cli.output import finish
from localspec.core.decoding import LARGEST_INTEGER
from localspec.core.errors import ConfigError, StoreError
from localspec.core.flags import Flag, without
from localspec.core.options import HomeFlag, LoadOptions


def plan(
    options: Annotated[LoadOptions, without("heads", "kernels", "parallel")],
    vram_gib: Annotated[
        tuple[float, ...],
        Flag("Size of the card, of which a desktop takes 1.1; twice for two GPUs."),
    ] = (),
    ram_gib: Annotated[
        float | None, Flag("RAM that is free there. Default: that of this machine.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what fits on this machine, with which drafter, and why."""
    from localspec.controller.controller import measurements
    from localspec.core.config import settings_for
    from localspec.machine.memory import room_for
    from localspec.machine.plan_report import machine_for, make_plans, render
    from localspec.machine.plans import DEFAULT_CONTEXT
    from localspec.record.log_file import learnt_states

    hardware = machine_for(options.device, vram_gib, ram_gib=ram_gib)
    learnt = measurements(learnt_states(options.home), options.context or DEFAULT_CONTEXT)
    settings = settings_for(options.home)
    report = make_plans(options, settings, hardware, learnt)
    other_gib = min(vram_gib) if len(vram_gib) > 1 else None
    text = "" if as_json else render(report, room_for(hardware), other_gib=other_gib)
    finish(report.as_dict(), text, as_json)


def doctor(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Say what was found, what is missing, the fix, and what has never run here."""
    from localspec.core.config import settings_for
    from localspec.machine.doctor import doctor_report, render

    report = doctor_report(settings_for(home))
    finish(report, "" if as_json else render(report), as_json)


def export(
    out: Annotated[Path, Flag("The file to write.")],
    form: Annotated[str, Flag("csv, jsonl, markdown or sqlite.", name="format")] = "csv",
    session: Annotated[
        int | None, Flag("Only this session's turns.", least=1, most=LARGEST_INTEGER)
    ] = None,
    conversation: Annotated[
        int | None, Flag("Only this conversation.", least=1, most=LARGEST_INTEGER)
    ] = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Write what was logged to a file."""
    from localspec.record.contents import Scope, reading
    from localspec.record.export import Format
    from localspec.record.export import export as write

    if form not in get_args(Format):
        known = ", ".join(get_args(Format))
        raise ConfigError(f"{form!r} is no export format. Choose one of: {known}.")
    with closing(open_log_of(home)) as store:
        scope = Scope(session, conversation)
        with reading(store, scope) as found:
            if not found.conversations:
                raise StoreError(_nothing_there(session, conversation))
        write(store, scope, cast("Format", form), out)
    finish({"out": str(out), "format": form, "bytes": out.stat().st_size}, f"{out}", as_json)


def upgrade(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Convert a log from before November 2026, which no start opens any more."""
    from localspec.core.config import settings_for
    from localspec.record.older_log import upgrade_log

    path = settings_for(home).database
    result = upgrade_log(path)
    text = (
        f"{path} holds {result.num_conversations} chats and {result.num_turns} replies now. The "
        f"former file was kept as {result.former.name}."
    )
    finish(asdict(result) | {"former": str(result.former)}, text, as_json)


def _nothing_there(session: int | None, conversation: int | None) -> str:
    wanted = {"session": session, "conversation": conversation}
    named = " and ".join(f"{name} {number}" for name, number in wanted.items() if number)
    if named:
        return (
            f"There is no turn in {named}, so nothing was written. Name another, or leave it out."
        )
    return "The log holds no turn, so nothing was written. Chat first, or name another --home."


COMMANDS: dict[str, Command] = {
    "plan": plan,
    "generate": generate,
    "serve": serve.serve,
    "cluster": cluster,
    "export": export,
    "upgrade": upgrade,
    "doctor": doctor,
    "bench": bench.bench,
    "bench table": bench.table,
    **train.COMMANDS,
    "keys make": serve.make_key,
    "keys list": serve.list_keys,
    "keys revoke": serve.revoke_key,
}


def main() -> None:
    run_app(COMMANDS, "python -m localspec")
