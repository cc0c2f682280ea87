"""A multi-token-prediction module drafts token by token from the target's last state.

The module's cache holds one row for each pair of neighbouring tokens, made of the target's state of
the first and the embedding of the second. Rows that a draft made of the module's own states are
erased when the draft is done, also where its tokens are accepted: the target's states replace them.

Source: multi-token prediction for drafting, DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from localspec.drafters.head_drafter import ChainDrafter, pool_for
from localspec.drafters.parts import Parts
from localspec.forward.heads.chain_static import ChainHead
from localspec.forward.heads.mtp_files import read_mtp


class MtpDrafter(ChainDrafter):
    name = "mtp"

    @classmethod
    def build(cls, parts: Parts) -> MtpDrafter:
        folder, target = parts.head(cls.name, "multi-token-prediction module"), parts.target
        module = parts.once(
            cls.name, lambda: read_mtp(folder, target, parts.bits).narrowed(parts.vocabulary)
        )
        head = ChainHead(module, target.cache.shape.capacity)
        pool = pool_for(parts, module.output, module.network.layer.reads_host)
        return cls(target, head, pool=pool)
