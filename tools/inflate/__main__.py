"""`python -m tools.inflate --size 350M --out DIR`: enlarge a pair; its text stays the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from localspec.cli.flags import JsonFlag, run_app
from localspec.cli.output import finish, to_stderr
from localspec.core.flags import Flag, SeedFlag, only
from localspec.core.options import LoadOptions
from localspec.machine.sources import resolve
from tools.inflate.pair import inflate


def inflate_pair(
    options: Annotated[LoadOptions, only("profile", "model", "draft")],
    size: Annotated[str, Flag("350M, 1B or 8B.")],
    out: Annotated[Path, Flag("Where target/ and draft/ are written.")],
    noise: Annotated[float, Flag("More makes target and draft agree less.")] = 0.0,
    seed: SeedFlag = 0,
    as_json: JsonFlag = False,
) -> None:
    """Enlarge a pair to the shape of a bigger one; its text stays the same."""
    source = resolve(options)
    draft = None if source.draft is None else source.draft.path
    written = inflate(source.folder, draft, size, out, noise, seed, to_stderr)
    finish(written, f"The pair is in {out}. Use it with --model and --draft.", as_json)


if __name__ == "__main__":
    run_app({"": inflate_pair}, "python -m tools.inflate")
