"""A model: its names, where its files are, its shape, its bytes as stored and what goes with it.

Everything in this wing that knows of a model knows it as a Model: a profile's entry, a folder that
was named, the hub's cache, another program's file, a result of a search, a draft. A model that
another one names may be known by its id alone; `sources` finds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.core.errors import ModelError
from localspec.machine.compatibility import UNKNOWN, Compatibility
from localspec.machine.head_shapes import HeadShape
from localspec.machine.shapes import ModelShape

# Bytes of the tokenizer and the configurations beside the weights, of a usual model.
SMALL_FILES_BYTES = 12_000_000


@dataclass(frozen=True)
class Model:
    """A model, on this machine or not.

    id: an id of a profile or of the hub, or a path. title: the name to show where it is not the id.
    path: its folder or GGUF file; None while it is not on this machine. known_shape: None where
    nothing says it. num_bytes: of its files, as they are on disk or as the hub says; None where
    that is unknown. num_params: as the hub counts them, of a result of a search. fault: why it
    cannot be loaded, as sentences; empty where nothing is known against it. origin: the program
    that keeps it, or where else it was found. page: on the hub; None for a model that is not from
    there. license, terms: name of the licence and its page. is_gated: True if the hub hands it out
    only to those who agreed to its terms; None where that is not known. note: a sentence that a
    person should know before choosing it.

    drafts: models and published heads that may draft for it, best first. head: the shape of a
    published head; None for a model that writes by itself. compatibility: of a draft model's
    vocabulary with that of the model that names it. foreign: drafts with a vocabulary of their own.
    heads: folders of heads trained on it, one a kind. accepted: a file of what drafts of these very
    models were accepted. packed: the same model published in 4 bits; copy_of: of that one, the
    model's id.
    is_current: True if its profile is of the newest generation, which is offered before older ones.
    """

    id: str
    title: str = ""
    path: Path | None = None
    known_shape: ModelShape | None = None
    num_bytes: int | None = None
    num_params: int | None = None
    fault: str = ""
    origin: str = ""
    page: str | None = None
    license: str | None = None
    terms: str | None = None
    is_gated: bool | None = None
    note: str = ""
    drafts: tuple[Model, ...] = ()
    head: HeadShape | None = None
    compatibility: Compatibility = UNKNOWN
    foreign: tuple[Model, ...] = ()
    heads: tuple[Path, ...] = ()
    accepted: Path | None = None
    packed: Model | None = None
    copy_of: str = ""
    is_current: bool = False

    @property
    def name(self) -> str:
        return self.title or self.id

    @property
    def model_name(self) -> str:
        """The name of the model itself, whichever copy of it this is."""
        return self.copy_of or self.name

    @property
    def shape(self) -> ModelShape:
        """Its shape. Raises ModelError where it is not known."""
        if self.known_shape is None:
            unread = f"The shape of {self.name} is not known. Fetch the model, or name its folder."
            raise ModelError(self.fault or unread)
        return self.known_shape

    @property
    def folder(self) -> Path:
        """Its folder or GGUF file. Raises ModelError where it is not on this machine."""
        if self.path is None:
            raise ModelError(f"{self.name} is not on this machine. Fetch it in the Models tab.")
        return self.path

    @property
    def draft(self) -> Model | None:
        """The first of its drafts, if it is a model that is on this machine."""
        first = self.drafts[0] if self.drafts else None
        return first if first is not None and first.is_here and first.head is None else None

    @property
    def is_here(self) -> bool:
        return self.path is not None

    @property
    def place(self) -> str:
        """Where other programs find it: its folder or file, else its id on the hub."""
        return self.id if self.path is None else str(self.path)

    @property
    def is_exact(self) -> bool:
        """True if `stored_bytes` is no estimate."""
        return self.num_bytes is not None or self.is_here

    @property
    def stored_bytes(self) -> int:
        """Bytes of its files; an estimate by its shape where they were not counted."""
        if self.num_bytes is not None:
            return self.num_bytes
        if self.head is not None:
            return self.head.published_bytes
        return self.shape.published_bytes + SMALL_FILES_BYTES


def page_of(hub_id: str) -> str:
    """Return the address of a model on the hub: its terms are read and accepted there."""
    return f"https://huggingface.co/{hub_id}"


def on_this_machine(
    model: Model, cached: Mapping[str, Model], hub_bytes: Mapping[str, int]
) -> Model:
    """Return the model, its drafts and its copy in 4 bits with their files where the hub's cache
    has them, else with the bytes that the hub says. A model in the cache needs no copy."""
    if model.path is None and model.id in cached:
        here = cached[model.id]
        model = replace(model, path=here.path, num_bytes=here.num_bytes, packed=None)
    elif model.path is None:
        model = replace(model, num_bytes=hub_bytes.get(model.id))
    packed = model.packed and on_this_machine(model.packed, cached, hub_bytes)
    drafts = tuple(on_this_machine(draft, cached, hub_bytes) for draft in model.drafts)
    return replace(model, drafts=drafts, packed=packed)
