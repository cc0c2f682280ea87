"""The tokens that drafters of a loaded target choose among, by the replies of the log.

What stands in the log is counted at each load, so a reply that was deleted counts no more, and
nothing is written.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from localspec.chat.template import ChatTemplate
from localspec.core.backend import Report
from localspec.core.decoding import Drafter
from localspec.drafters.registry import DrafterInfo
from localspec.loading.fitting import SPENT_ON_SPEED
from localspec.loading.placement import Place
from localspec.machine.hardware import free_bytes_now

if TYPE_CHECKING:
    import torch

    from localspec.forward.model import LanguageModel
    from localspec.forward.output_head import DraftVocabulary

log = logging.getLogger(__name__)


def vocabulary_of_log(
    replies: Sequence[str] | None,
    template: ChatTemplate,
    target: LanguageModel,
    places: Sequence[Place],
    report: Report,
) -> DraftVocabulary:
    """Return the tokens that drafters choose among, by the replies of the log, None for no log.
    places: of target and draft."""
    from localspec.drafters.draft_vocabulary import chosen, refusal_of_size
    from localspec.forward.output_head import DraftVocabulary

    if replies is None or (why := refusal_of_size(target.vocab_size)):
        return DraftVocabulary(reason="" if replies is None else why)
    report("counting the tokens of earlier replies")
    choice = chosen(template.encoded_texts(replies), template.added_ids, target.vocab_size)
    log.info("drafts choose among %s tokens. %s", len(choice.ids) or "all", choice.reason)
    hardware = {place.device: place.hardware for place in places}

    def has_room(num_bytes: int, device: torch.device) -> bool:
        there = hardware.get(device, places[0].hardware)
        return num_bytes <= SPENT_ON_SPEED * free_bytes_now(there)

    return DraftVocabulary(choice.ids, choice.reason, has_room)


def tokens_note(info: DrafterInfo, drafter: Drafter, vocabulary: DraftVocabulary) -> str:
    """Return what a person should know of the tokens that a drafter chooses among."""
    from localspec.drafters.parts import DrafterBase

    if info.needs not in ("draft", "head") or not isinstance(drafter, DrafterBase):
        return ""
    note = "" if drafter.output is None else vocabulary.note(drafter.output)
    return f"; {note}" if note else ""
