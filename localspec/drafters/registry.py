"""Every drafter: where its class is, and what the rest of the program must know before it is built.

Contract: imports nothing heavy, so that the page, the planner, the tune-up and the bench read the
declarations before torch is loaded. No other list names drafters. `drafter_class` imports the class
when it is asked for.

To add a drafter: a file with a class that meets core.Drafter and has a `build(parts)` class
method, and one entry here. The contract tests then cover it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from localspec.core.decoding import OFF

Family = Literal["model", "lookup", "self", "head", "foreign"]
Needs = Literal["nothing", "draft", "copy", "head", "foreign"]
TokenKind = Literal["draft", "self", "ngram"]

PLAIN, PLAIN_COLOUR = "without drafting", "#879696"  # of plain decoding
UNKNOWN = "unknown"  # as a server may leave who drafted


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter declares of itself.

    where: "module:Class". label: its name in a sentence. summary: what it drafts with, as a noun
    phrase. family: the tune-up tries one drafter of each family, in the order of the registry.
    colour: in plots, with a contrast of at least 3 to 1 on a light and on a dark page.
    needs: what must be loaded for it (a draft model, a quantised copy of the target, a trained
    head, a draft with another vocabulary). token_kind: how the page marks its tokens.
    shares: drafters with the same word here use one model together.
    reads_nothing: its first round of a reply takes no longer than others, since it drafts on what
    the target has read. The first layers do too, but compare their exits first.
    plan_rank: its place among the planner's plans while nothing is measured; None: not planned.
    needs_trees: it is of no use for a target that checks one chain of tokens at a time.
    """

    name: str
    where: str
    label: str
    summary: str
    family: Family
    colour: str
    needs: Needs = "nothing"
    token_kind: TokenKind = "draft"
    shares: str | None = None
    reads_nothing: bool = False
    plan_rank: int | None = None
    needs_trees: bool = False

    @property
    def reads_layers(self) -> bool:
        """True if it runs layers of the target or reads their hidden states."""
        return self.family in ("self", "head")


REGISTRY: dict[str, DrafterInfo] = {
    info.name: info
    for info in (
        DrafterInfo(
            name="ngram",
            where="localspec.drafters.ngram:NgramDrafter",
            label="word lookup",
            summary="word lookup: a copy of what followed the same words before",
            family="lookup",
            colour="#a500ff",
            token_kind="ngram",
            plan_rank=2,  # waits for repetition
        ),
        DrafterInfo(
            name="lookahead",
            where="localspec.drafters.lookahead:LookaheadDrafter",
            label="lookahead",
            summary="n-grams that the model would have written next to its reply",
            family="lookup",
            colour="#b478f0",
            token_kind="self",
            needs_trees=True,
        ),
        DrafterInfo(
            name="draft_model",
            where="localspec.drafters.draft_model:DraftModelDrafter",
            label="the small model",
            summary="a smaller model of the same family",
            family="model",
            colour="#007896",
            needs="draft",
            shares="draft model",
            plan_rank=0,  # guesses most text well
        ),
        DrafterInfo(
            name="chained",
            where="localspec.drafters.chained:ChainedDrafter",
            label="word lookup with the small model",
            summary="word lookup that a smaller model checks and continues",
            family="model",
            colour="#00a500",
            needs="draft",
            shares="draft model",
        ),
        DrafterInfo(
            name="draft_tree",
            where="localspec.drafters.draft_tree:DraftTreeDrafter",
            label="the small model's tree",
            summary="several continuations at once from a smaller model of the same family",
            family="model",
            colour="#2d5aff",
            needs="draft",
            shares="draft model",
            needs_trees=True,
        ),
        DrafterInfo(
            name="self_quant",
            where="localspec.drafters.self_quant:SelfQuantDrafter",
            label="the compressed copy",
            summary="a compressed copy of the model itself",
            family="self",
            colour="#e17800",
            needs="copy",
            token_kind="self",
            reads_nothing=True,
            plan_rank=3,  # guesses well, but each step is costly
        ),
        DrafterInfo(
            name="early_exit",
            where="localspec.drafters.early_exit:EarlyExitDrafter",
            label="the model's first layers",
            summary="the first layers of the model itself",
            family="self",
            colour="#876900",
            token_kind="self",
        ),
        DrafterInfo(
            name="eagle",
            where="localspec.drafters.eagle:EagleDrafter",
            label="the EAGLE head",
            summary="a one-layer head on the model's hidden states",
            family="head",
            colour="#e1000f",
            needs="head",
            token_kind="self",
        ),
        DrafterInfo(
            name="medusa",
            where="localspec.drafters.medusa:MedusaDrafter",
            label="Medusa",
            summary="heads that guess several tokens at once from the model's last state",
            family="head",
            colour="#ff4b96",
            needs="head",
            token_kind="self",
            reads_nothing=True,
        ),
        DrafterInfo(
            name="mtp",
            where="localspec.drafters.mtp:MtpDrafter",
            label="multi-token prediction",
            summary="a module that predicts token after token from the model's last state",
            family="head",
            colour="#a54b96",
            needs="head",
            token_kind="self",
            plan_rank=1,  # ships with a model and guesses most of its text well
        ),
        DrafterInfo(
            name="assistant",
            where="localspec.drafters.assistant:AssistantDrafter",
            label="the assistant",
            summary="a few layers that read the model's own keys and values",
            family="head",
            colour="#96962d",
            needs="head",
            token_kind="self",
            reads_nothing=True,
        ),
        DrafterInfo(
            name="block",
            where="localspec.drafters.block:BlockDrafter",
            label="the block drafter",
            summary="a published drafter that guesses a block of tokens at once",
            family="head",
            colour="#2d8c78",
            needs="head",
            token_kind="self",
        ),
        DrafterInfo(
            name="cross_tokenizer",
            where="localspec.drafters.cross_tokenizer:CrossTokenizerDrafter",
            label="a small model of another family",
            summary="a smaller model of another family, with another vocabulary",
            family="foreign",
            colour="#ff00ff",
            needs="foreign",
        ),
    )
}


def drafter_class(name: str) -> Any:
    """The class registered under `name`, imported now. KeyError for an unknown name."""
    module, _, attribute = REGISTRY[name].where.partition(":")
    return getattr(import_module(module), attribute)


def label_of(name: str | None) -> str:
    """The drafter's label, or what writes without one; the name itself where the log holds one that
    is not registered, UNKNOWN where it holds none."""
    if name is None:
        return UNKNOWN
    return PLAIN if name == OFF else REGISTRY[name].label if name in REGISTRY else name


@lru_cache(maxsize=256)  # the engine says the same in most rounds of a reply
def labelled(sentence: str) -> str:
    """A sentence of the engine's, which knows drafters by name, with each by its label. Not for
    other sentences: a name may also be a command or a part of a path."""
    return re.sub(rf"\b({'|'.join(REGISTRY)})\b", lambda found: label_of(found[1]), sentence)


def colour_of(name: str | None) -> str | None:
    """None for a name that is not known or not registered: the plot then takes one of its own."""
    if name == OFF:
        return PLAIN_COLOUR
    return REGISTRY[name].colour if name in REGISTRY else None


def published_heads() -> list[str]:
    """Return the names of the drafters that run published heads, which are planned where a target
    has such a head."""
    return [
        info.name for info in REGISTRY.values() if info.needs == "head" and info.plan_rank is None
    ]


def planned() -> list[DrafterInfo]:
    """The drafters that the planner plans with for every target, the one it prefers unmeasured
    first."""
    ranked = [(info.plan_rank, info) for info in REGISTRY.values() if info.plan_rank is not None]
    return [info for _, info in sorted(ranked, key=lambda each: each[0])]
