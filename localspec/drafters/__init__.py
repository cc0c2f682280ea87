"""Ways of guessing. One file each; the registry names them and imports on use.

To add one: a file with a class that meets core.Drafter and a `build(parts)` class method, a
line here, and it is covered by the contract tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

REGISTRY = {
    "ngram": "localspec.drafters.ngram:NgramDrafter",
    "lookahead": "localspec.drafters.lookahead:LookaheadDrafter",
    "draft_model": "localspec.drafters.draft_model:DraftModelDrafter",
    "draft_tree": "localspec.drafters.draft_tree:DraftTreeDrafter",
    "chained": "localspec.drafters.chained:ChainedDrafter",
    "self_quant": "localspec.drafters.self_quant:SelfQuantDrafter",
    "early_exit": "localspec.drafters.early_exit:EarlyExitDrafter",
    "medusa": "localspec.drafters.medusa:MedusaDrafter",
    "mtp": "localspec.drafters.mtp:MtpDrafter",
    "eagle": "localspec.drafters.eagle:EagleDrafter",
    "cross_tokenizer": "localspec.drafters.cross_tokenizer:CrossTokenizerDrafter",
}


def drafter_class(name: str) -> Any:
    """The class registered under `name`, imported now. KeyError for an unknown name."""
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(import_module(module), attribute)
