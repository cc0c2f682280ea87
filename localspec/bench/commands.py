"""`bench` and what stands beside it: inflate a pair, replay logged rounds, install the peers.

Contract: as of localspec.cli: parse flags, call one function, print its result. `bench`
without a further word compares; --suite chooses what, and flags beside it replace single values.

Not here: logic. Heavy imports stand inside the commands.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from localspec.errors import ConfigError, SetupError, StoreError
from localspec.files import replacing, why_not_writable
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
    SeedFlag,
    finish,
)
from localspec.options import LoadOptions

app = typer.Typer(
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    help="Compare ways of drafting with plain decoding, side by side on this machine.",
)

ARMS_HELP = (
    "Comma-separated: off, auto, a drafter or a peer (transformers, llama_cpp, vllm, each also "
    "with _draft and _lookup), NAME@LENGTH or NAME@FROM-TO."
)


@app.callback(invoke_without_command=True)
def bench(
    context_of_command: typer.Context,
    suite: Annotated[str | None, typer.Option(help="quick, drafters or full.")] = None,
    setup_peers: Annotated[
        bool, typer.Option("--setup-peers", help="Install llama.cpp and vLLM apart, and end.")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="A .jsonl of prompts; none: ours.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first so many prompts.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="A reply's; 64 unless told.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    arms: Annotated[str | None, typer.Option(help=ARMS_HELP)] = None,
    warm: Annotated[
        int | None, typer.Option(help="Prompts that arms learn from first; 24 unless told.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Measure each prompt so often, with seeds of its own.")
    ] = None,
    peer_threads: Annotated[
        int | None, typer.Option(help="The peers'; as ours unless told.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for plots.")] = None,
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
    """Compare ways of drafting with plain decoding, side by side on this machine."""
    if context_of_command.invoked_subcommand is not None:
        return
    if setup_peers:
        _set_up_peers(home, as_json)
        return
    from localspec.bench.presets import preset
    from localspec.bench.report import render
    from localspec.bench.suite import listed, listed_numbers, run_bench, to_stderr

    wanted = ("off", drafter) if drafter is not None else None if arms is None else listed(arms)
    if wanted == ():
        raise ConfigError("--arms names no arm. Write them like off,auto,draft_model.")
    given: dict[str, Any] = {
        "prompts": prompts,
        "limit": limit,
        "max_tokens": max_tokens,
        "temperatures": None if temperatures is None else listed_numbers(temperatures),
        "arms": wanted,
        "warm_prompts": warm,
        "repeats": repeats,
        "peer_threads": peer_threads,
    }
    told = {name: value for name, value in given.items() if value is not None}
    settings = replace(preset(suite, home), **told)
    _refuse_unwritable(out, plot)
    options = LoadOptions(profile, model, draft, drafter, context, dtype, tuple(heads or ()), home)
    result = run_bench(options, settings, to_stderr)
    finish(result, render(result), as_json)  # first: what follows may fail
    _keep(result, out, plot)


@app.command()
def inflate(
    size: Annotated[str, typer.Option(help="350M, 1B or 8B.")],
    out: Annotated[Path, typer.Option(help="Where target/ and draft/ are written.")],
    noise: Annotated[float, typer.Option(help="More makes target and draft agree less.")] = 0.0,
    seed: SeedFlag = 0,
    profile: ProfileFlag = None,
    model: ModelFlag = None,
    draft: DraftFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Enlarge a pair to the shape of a bigger one; its text stays the same."""
    from localspec.bench.inflate import inflate as run
    from localspec.bench.suite import to_stderr
    from localspec.machine.sources import resolve

    source = resolve(LoadOptions(profile=profile, model=model, draft=draft))
    made = run(source.target, source.draft, size, out, noise, seed, to_stderr)
    finish(made, f"The pair is in {out}. Use it with --model and --draft.", as_json)


@app.command()
def table(
    result: Annotated[Path, typer.Argument(help="A file that --out wrote.")],
) -> None:
    """Print a kept comparison as Markdown: every way of drafting, and every task."""
    from localspec.bench.by_drafter import markdown

    try:
        kept = json.loads(result.read_text(encoding="utf-8"))
        text = markdown(kept)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{result} is no result of `bench --out`: {error}. Name a file that it wrote."
        ) from error
    print(text)


@app.command()
def replay(
    policies: Annotated[str, typer.Option(help="Comma-separated controllers.")] = "",
    seed: SeedFlag = 0,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Run logged rounds again under other controllers, offline."""
    from localspec.bench.replay import render, run_replay
    from localspec.bench.suite import listed, to_stderr
    from localspec.config import settings_for

    database = settings_for(home).database
    if not database.is_file():
        raise StoreError(f"There is no log at {database}. Chat first, or name its --home.")
    result = run_replay(database, listed(policies), seed, to_stderr)
    finish(result, render(result), as_json)


def _set_up_peers(home: Path | None, as_json: bool) -> None:
    from localspec.bench.peers.environments import RECIPES, set_up_all
    from localspec.bench.suite import to_stderr
    from localspec.config import settings_for

    folder = settings_for(home).home
    failed = set_up_all(folder, to_stderr)
    ready = [name for name in RECIPES if name not in failed]
    told = f"Ready in {folder / 'peers'}: {', '.join(ready)}." if ready else ""
    finish({"ready": ready, "failed": failed}, told, as_json)
    if failed:
        raise SetupError(f"Not installed: {', '.join(failed)}. The reasons stand above.")


def _refuse_unwritable(out: Path | None, plot: Path | None) -> None:
    """Said before a comparison of an hour, not after it."""
    from localspec.bench.plots import is_drawing

    if out is not None and not out.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {out.absolute().parent}. Make it, or change --out.")
    drawing = None if plot is None else plot if is_drawing(plot) else plot / "speedup.png"
    for option, wanted, path in (("--out", out, out), ("--plot", plot, drawing)):
        if path is not None and (why := why_not_writable(path)):
            raise ConfigError(f"{wanted} cannot be written ({why}). Change {option}.")


def _keep(result: dict[str, Any], out: Path | None, plot: Path | None) -> None:
    """Raises StoreError; the table was printed before."""
    try:
        if out is not None:
            with replacing(out) as part:
                text = json.dumps(result, ensure_ascii=False, indent=1) + "\n"
                part.write_text(text, encoding="utf-8")
        if plot is not None:
            from localspec.bench.plots import save_plots  # matplotlib
            from localspec.bench.suite import to_stderr

            for path in save_plots(result, plot):
                to_stderr(f"wrote {path}")
    except OSError as error:
        raise StoreError(
            f"{error.filename or out or plot} cannot be written ({error.strerror or error}). The "
            "table stands above; copy it from there."
        ) from error
