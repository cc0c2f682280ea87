"""`bench --heads DIR`: what a trained draft or head gains on this machine, by draft length.

The folders that were named become arms beside plain decoding and `auto`: each drafter at every
length that its held-out answers know, and at the length that the controller chooses. The gain of a
drafter is that of the arm whose interval begins highest, on the prompts of the comparison. It pays
where that interval lies above plain decoding, and is unknown where plain decoding lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec.bench.results import ALL
from localspec.bench.settings import BenchSettings, suite_settings
from localspec.bench.tables import interval
from localspec.core.backend import Report
from localspec.core.decoding import AUTO, OFF
from localspec.core.errors import ConfigError
from localspec.core.options import NO_DRAFT, LoadOptions
from localspec.formats.fingerprint import NOTE, require_trained_for
from localspec.formats.head_folder import head_kind
from localspec.machine.sources import resolve
from localspec.machine.trained import DRAFT, Artifact, read_artifact

MIN_SPEEDUP = 1.03  # times plain decoding; smaller gains are within the error of measuring
USUAL_LENGTHS = 4  # draft lengths to compare of a head without a note of its training


@dataclass(frozen=True)
class NamedResult:
    """A folder that was named. drafter: what drafts with it. note: of its training, None of a
    published head."""

    folder: Path
    drafter: str
    note: Artifact | None

    @property
    def arms(self) -> tuple[str, ...]:
        known = 0 if self.note is None else len(self.note.acceptance)
        return (f"{self.drafter}@1-{known or USUAL_LENGTHS}", self.drafter)


def named_results(options: LoadOptions, report: Report) -> tuple[LoadOptions, list[NamedResult]]:
    """Return what `--heads` names, and the options that load it: a draft is loaded as one. report:
    called with what is fetched of the target. Raises ConfigError for two of a kind, ModelError for
    a folder that is none or another target's."""
    results = [_named_result(Path(folder).expanduser()) for folder in options.heads]
    by_drafter = dict[str, NamedResult]()
    for result in results:
        other = by_drafter.setdefault(result.drafter, result)
        if other is not result:
            raise ConfigError(
                f"{other.folder} and {result.folder} are both for {result.drafter}, and one can be "
                "loaded at a time. Compare each by itself with plain decoding."
            )
    drafts = [str(result.folder) for result in results if result.drafter == "draft_model"]
    if drafts and options.draft not in (None, NO_DRAFT):
        raise ConfigError(f"--draft and --heads {drafts[0]} both name a draft. Leave one out.")
    heads = tuple(str(result.folder) for result in results if result.drafter != "draft_model")
    options = replace(options, heads=heads, draft=next(iter(drafts), options.draft))
    if results:
        target = resolve(options, report).folder
        for result in results:
            require_trained_for(result.folder, target)
    return options, results


def _named_result(folder: Path) -> NamedResult:
    note = read_artifact(folder) if (folder / NOTE).is_file() else None
    if note is not None and note.kind == DRAFT:
        return NamedResult(folder, "draft_model", note)
    return NamedResult(folder, head_kind(folder), note)


def settings_of(results: Sequence[NamedResult], home: Path | None) -> BenchSettings:
    """Return what is compared where nothing else was asked for: few prompts, greedily."""
    arms = (arm for result in results for arm in result.arms)
    return replace(suite_settings("quick", home), arms=(OFF, *arms, AUTO))


def gains(comparison: Mapping[str, Any], results: Sequence[NamedResult]) -> list[dict[str, Any]]:
    """Return for each folder its held-out acceptance and its best arm, as JSON data. best: None
    where no arm could be measured. pays: None where that is not known."""
    return [
        {
            "folder": str(result.folder),
            "drafter": result.drafter,
            "target": None if result.note is None else result.note.target,
            "acceptance": None if result.note is None else result.note.acceptance,
            "before": None if result.note is None else result.note.before,
            "best": (best := _best(comparison, result.drafter)),
            "pays": None if best is None else _pays(best),
        }
        for result in results
    ]


def _best(comparison: Mapping[str, Any], drafter: str) -> dict[str, Any] | None:
    """Of all temperatures. A single prompt has no interval and counts by its ratio alone."""
    rows = (
        row
        for row in comparison["rows"]
        if row["arm"].partition("@")[0] == drafter and row["task"] == ALL
    )
    known = [row for row in rows if row["ratio_to_off"] is not None]
    names = ("arm", "temperature", "ratio_to_off", "ratio_low", "ratio_high")
    best = max(known, key=lambda row: (row["ratio_low"] or 0.0, row["ratio_to_off"]), default=None)
    return None if best is None else {name: best[name] for name in names}


def _pays(best: Mapping[str, Any]) -> bool | None:
    if best["ratio_to_off"] < MIN_SPEEDUP:
        return False
    return True if (best["ratio_low"] or 0.0) > 1.0 else None


def render_gains(all_gains: Sequence[Mapping[str, Any]]) -> str:
    """Return what is said of each folder below the tables of the comparison."""
    return "\n".join(line for gain in all_gains for line in ("", *_lines(gain)))


def _lines(gain: Mapping[str, Any]) -> list[str]:
    lines = [f"{gain['drafter']} in {gain['folder']}"]
    for name, words in (("acceptance", "Accepted by position"), ("before", "Before the training")):
        if gain[name]:
            lines.append(f"{words} (held out): " + ", ".join(f"{rate:.0%}" for rate in gain[name]))
    best = gain["best"]
    if best is None:
        lines.append("What it gains here is not known: it wrote no reply that can be compared.")
        return lines
    limits = interval(best["ratio_low"], best["ratio_high"])
    speed = f"{best['ratio_to_off']:.2f} times the speed of plain decoding ({limits})"
    if gain["pays"]:
        lines.append(f"It pays here: {speed} as {best['arm']}, T {best['temperature']:g}.")
    elif gain["pays"] is None:
        lines.append(
            f"Whether it pays here is not certain: {speed} as {best['arm']}. Measure more prompts "
            "with --limit."
        )
    else:
        lines.append(
            f"It does not pay here: at best {speed}, as {best['arm']}. Automatic choice will leave "
            "it off."
        )
    return lines
