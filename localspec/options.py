"""What a person asked to be loaded: plain values from flags or the page, checked by load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SAME_BITS, FASTEST = "same-bits", "fastest"
KERNELS = (SAME_BITS, FASTEST)
USUAL_PARALLEL = 4
MOST_PARALLEL = 64


@dataclass(frozen=True)
class LoadOptions:
    """None means "decide for me". model and draft: a folder or a hub id; the draft may have a
    vocabulary of its own. heads: folders of heads, before those of the profile. home: where the
    person's own profiles are, None: the usual place. anyway: load even where the plan says that
    it does not fit, at the person's own risk. fetches: whether a model that is not on this machine
    may be fetched while loading; the page downloads by itself and says False. kernels: of KERNELS,
    same bits for one row and several on a processor, or what is fastest at plain decoding; None:
    same bits. raw: the messages are one text that the model continues, whatever its template.
    parallel: replies that are decoded together, at most; None: as many as fit, up to USUAL_PARALLEL
    on a processor, else 1.
    device: "cpu", "cuda", "cuda:N" as `doctor` counts GPUs, or "mps"; None: the GPU with the most
    free memory, else the processor."""

    profile: str | None = None
    model: str | None = None
    draft: str | None = None
    drafter: str | None = None
    context: int | None = None
    dtype: str | None = None
    heads: tuple[str, ...] = ()
    home: Path | None = None
    anyway: bool = False
    fetches: bool = True
    kernels: str | None = None
    raw: bool = False
    device: str | None = None
    parallel: int | None = None


@dataclass(frozen=True)
class Offer:
    """Something else to load, with the reason as a sentence."""

    text: str
    options: LoadOptions
