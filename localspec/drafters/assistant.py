"""The assistant of a Gemma 4 drafts token by token by the target's own keys and values.

It reads no prompt: a draft starts from the target's last state and the keys and values that stand
in the target's cache. Source: forward.heads.assistant.
"""

from __future__ import annotations

from localspec.core.decoding import Sequence
from localspec.drafters.head_drafter import ChainDrafter, pool_for
from localspec.drafters.parts import Parts
from localspec.forward.decoder import Decoder
from localspec.forward.heads.assistant import KIND, Assistant, read_assistant


class AssistantDrafter(ChainDrafter):
    name = KIND

    @classmethod
    def build(cls, parts: Parts) -> AssistantDrafter:
        folder = parts.head(KIND, "assistant, as Gemma 4 has them,")
        assistant = parts.once(
            KIND, lambda: read_assistant(folder, parts.target).narrowed(parts.vocabulary)
        )
        assert isinstance(parts.target, Decoder), "`read_assistant` refused other targets"
        head = Assistant(assistant, parts.target)
        return cls(parts.target, head, pool=pool_for(parts, head.output))

    def review(self, sequence: Sequence) -> None:
        """It attends to all that the target has cached, so it cannot stand at an earlier place."""
