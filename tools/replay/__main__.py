"""`python -m tools.replay`: logged rounds again under other controllers, offline."""

from __future__ import annotations

from typing import Annotated

import typer

from localspec.cli.flags import HomeFlag, JsonFlag, SeedFlag, finish, run_app, to_stderr
from localspec.core.config import settings_for
from localspec.core.flag_values import listed
from tools.replay.run import render, run_replay

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def replay(
    policies: Annotated[str, typer.Option(help="Comma-separated controllers.")] = "",
    seed: SeedFlag = 0,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Run logged rounds again under other controllers, offline."""
    result = run_replay(settings_for(home).database, listed(policies), seed, to_stderr)
    finish(result, render(result), as_json)


if __name__ == "__main__":
    run_app(app)
