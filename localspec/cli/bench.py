"""The commands `bench` and `bench table`.

Contract: parse flags, call one function, print its result. `bench` without a further word
compares; --suite chooses what, and flags beside it replace single values. `bench_with` makes the
same command with the arms of other engines for `tools.peers`. Heavy imports stand inside the
commands, so that --help answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from localspec.bench.kept import KeptFile
from localspec.cli.flags import MAX_TOKENS, TEMPERATURES, JsonFlag, LimitFlag
from localspec.cli.output import finish, to_stderr
from localspec.core.config import with_server
from localspec.core.errors import ConfigError, SetupError
from localspec.core.files import read_json, why_not_writable
from localspec.core.flags import Flag, listed, listed_numbers, option, without
from localspec.core.options import LoadOptions, RemoteFlags, RemoteServer

if TYPE_CHECKING:
    from localspec.bench.arms import OtherEngines
    from localspec.bench.settings import BenchSettings

ARMS_HELP = (
    "Comma-separated: off, auto, a drafter, NAME@LENGTH or NAME@FROM-TO. With python -m "
    "tools.peers also transformers, llama_cpp and vllm, each also with _draft and _lookup."
)
SETUP_HELP = "python -m tools.peers: install llama.cpp and vLLM, and end."
THREADS_HELP = "python -m tools.peers: threads of other engines; default: as many as ours."
OTHER_ENGINES = ("transformers", "llama_cpp", "vllm")
ONLY_HERE = ("suite", "arms", "warm", "peer_threads")
ONLY_REMOTE = ("plain", "concurrency")


@dataclass(frozen=True)
class BenchFlags:
    """What to compare, as it was asked for; None takes the suite's."""

    suite: Annotated[str | None, Flag("quick, drafters or full.")] = None
    setup_peers: Annotated[bool, Flag(SETUP_HELP)] = False
    cold_starts: Annotated[
        str | None,
        Flag(
            gone="--cold-starts was removed. Run `bench --arms off,auto --warm 0` as often as you "
            "want starts: each run is a new process with nothing learnt."
        ),
    ] = None
    prompts: Annotated[Path | None, Flag("A .jsonl; default: our prompts.")] = None
    limit: LimitFlag = None
    max_tokens: Annotated[int | None, Flag(f"{MAX_TOKENS.help} Default: 64.")] = None
    temperatures: Annotated[str | None, TEMPERATURES] = None
    arms: Annotated[str | None, Flag(ARMS_HELP)] = None
    warm: Annotated[
        int | None,
        Flag("Prompts that arms learn from first, behind the limit; default: 24."),
    ] = None
    repeats: Annotated[int | None, Flag("How often each prompt is measured; seeds differ.")] = None
    peer_threads: Annotated[int | None, Flag(THREADS_HELP)] = None
    out: Annotated[Path | None, Flag("Write the JSON to this file too, while it grows.")] = None
    plot: Annotated[
        str | None,
        Flag(
            gone="--plot was removed. The page's Stats tab draws gains, waits and the cost of a "
            "round of your own chats; `bench table FILE` prints what --out FILE kept."
        ),
    ] = None
    plain: Annotated[
        str | None,
        Flag(
            "With --remote: the same server without speculation; a localspec server is asked for "
            "both."
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        Flag("With --remote: requests at the same time; default: 1,4,16."),
    ] = None

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """The temperatures as numbers. Raises ConfigError."""
        return None if self.temperatures is None else listed_numbers(self.temperatures, float)

    def changed(self, suite: BenchSettings, arms: tuple[str, ...] | None) -> BenchSettings:
        """The settings of a suite with what was asked for otherwise. Raises ConfigError."""
        same = ("prompts", "limit", "max_tokens", "repeats", "peer_threads")
        others = {"temperatures": self.speeds, "arms": arms, "warm_prompts": self.warm}
        given: dict[str, Any] = {**{name: getattr(self, name) for name in same}, **others}
        return replace(suite, **{name: one for name, one in given.items() if one is not None})


def bench_with(open_others: Callable[[], OtherEngines] | None) -> Callable[..., None]:
    """Return the command `bench`. open_others: makes the other engines, for a caller that has any;
    called when the command runs."""

    def bench(
        asked: BenchFlags,
        options: Annotated[LoadOptions, without("parallel")],
        remote: RemoteFlags,
        as_json: JsonFlag = False,
    ) -> None:
        """Compare ways of drafting on this machine, or measure a server as its users meet it."""
        _bench(asked, with_server(options, remote), open_others, as_json)

    return bench


bench = bench_with(None)


def _bench(
    asked: BenchFlags,
    options: LoadOptions,
    open_others: Callable[[], OtherEngines] | None,
    as_json: bool,
) -> None:
    _refuse_without_effect(asked, options.remote is not None)
    _refuse_unwritable(asked.out)
    kept = KeptFile(asked.out, to_stderr)
    if options.remote is not None:
        _measure_servers(asked, options.remote, kept, as_json)
        return
    arms = _arms(asked.arms, options.drafter)
    others = _other_engines(
        open_others, asked.setup_peers or asked.peer_threads is not None, arms or ()
    )
    if asked.setup_peers and others is not None:
        _set_up(others, options.home, as_json)
        return
    from localspec.bench.compare import run_bench
    from localspec.bench.heads import gains, named_results, render_gains, settings_of
    from localspec.bench.report import render
    from localspec.bench.settings import suite_settings

    options, named = named_results(replace(options, parallel=1), to_stderr)
    is_of_heads = bool(named) and arms is None and asked.suite is None
    usual = suite_settings(asked.suite, options.home, others)
    settings = asked.changed(settings_of(named, options.home) if is_of_heads else usual, arms)
    result = run_bench(options, settings, to_stderr, others, kept)
    if named:
        result["heads"] = gains(result, named)
    text = "\n".join([render(result), render_gains(result.get("heads", ()))])
    _tell(result, text.rstrip(), kept, as_json)


def _arms(named: str | None, drafter: str | None) -> tuple[str, ...] | None:
    """Those that were asked for, None: the suite's. Raises ConfigError."""
    if drafter is not None:
        if named is not None:
            raise ConfigError("--drafter and --arms both name what to compare. Leave one out.")
        return ("off", drafter)
    arms = None if named is None else listed(named)
    if arms == ():
        raise ConfigError("--arms names no arm. Write them like off,auto,draft_model.")
    return arms


def _tell(result: dict[str, Any], text: str, kept: KeptFile, as_json: bool) -> None:
    finish(result, text, as_json)  # first: what follows may fail
    kept.write(result)


def _measure_servers(
    asked: BenchFlags, server: RemoteServer, kept: KeptFile, as_json: bool
) -> None:
    """A server as its users meet it, and the same without speculation where it was named."""
    from localspec.bench.cases import OWN_PROMPTS, load_prompts
    from localspec.bench.remote import run_remote
    from localspec.bench.remote_report import render_remote
    from localspec.bench.settings import suite_settings

    settings = asked.changed(suite_settings(None, None), None)
    if len(settings.temperatures) > 1:
        raise ConfigError("With --remote one temperature is measured. Name one, like 0.7.")
    plain = [] if asked.plain is None else [replace(server, url=asked.plain)]
    at_once = listed_numbers(asked.concurrency or "1,4,16", int)
    cases = load_prompts(settings.prompts or OWN_PROMPTS, settings.limit)
    limit, temperature = settings.max_tokens, settings.temperatures[0]
    measured = run_remote(
        [server, *plain], cases, at_once, limit, temperature, to_stderr, settings.repeats
    )
    _tell(measured, render_remote(measured), kept, as_json)


def table(result: Annotated[Path, Flag("A file that --out wrote.", is_positional=True)]) -> None:
    """Print a kept comparison as Markdown: every way of drafting, and every task."""
    from localspec.bench.report import markdown

    try:
        text = markdown(read_json(result))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{result} is no result of `bench --out`: {error}. Name a file that it wrote."
        ) from error
    finish({}, text, False)


def _other_engines(
    open_others: Callable[[], OtherEngines] | None, are_flags_given: bool, arms: tuple[str, ...]
) -> OtherEngines | None:
    """None where there are none to compare with. Raises ConfigError where one was named then."""
    if open_others is not None:
        return open_others()
    named = [arm for arm in arms if arm.startswith(OTHER_ENGINES)]
    if are_flags_given or named:
        what = ", ".join(named) if named else "--setup-peers and --peer-threads"
        raise ConfigError(
            f"Other engines ({what}) are compared by a tool beside the program now, since they are "
            "not part of it. Use the same flags with: python -m tools.peers"
        )
    return None


def _set_up(others: OtherEngines, home: Path | None, as_json: bool) -> None:
    from localspec.core.config import settings_for

    folder = settings_for(home).home
    ready, failed = others.set_up(folder, to_stderr)
    text = f"Ready in {folder / 'peers'}: {', '.join(ready)}." if ready else ""
    finish({"ready": ready, "failed": dict(failed)}, text, as_json)
    if failed:
        raise SetupError(f"Not installed: {', '.join(failed)}. The reasons stand above.")


def _refuse_without_effect(asked: BenchFlags, is_remote: bool) -> None:
    """Raises ConfigError for a flag of the other kind of measurement."""
    for name in ONLY_HERE if is_remote else ONLY_REMOTE:
        if getattr(asked, name) is not None:
            when = "with" if is_remote else "without"
            raise ConfigError(f"{option(name)} has no effect {when} --remote. Leave it out.")


def _refuse_unwritable(out: Path | None) -> None:
    """Raises ConfigError before a comparison that may take an hour."""
    if out is None:
        return
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {out.absolute().parent}. Make it, or change --out.")
    if why := why_not_writable(out):
        raise ConfigError(f"{out} cannot be written ({why}). Change --out.")
