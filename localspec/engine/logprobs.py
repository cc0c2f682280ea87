"""How likely the target found the tokens of a round, for who asks for it.

Contract: by the target's own logits, before penalties, temperature and cuts, so the same whatever
drafted. Read from the rows that verification made: it costs no forward.

Not here: the choice of a token (sampling).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from localspec.core import Outcome, TokenLogprob


def logprobs_of(outcome: Outcome, kept: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Of the tokens kept of a round. count: of the likeliest tokens at each place."""
    if not kept:
        return ()
    rows = [0, *(node + 1 for node in outcome.verdict.path)][: len(kept)]
    found = outcome.logits[rows].float().log_softmax(dim=-1)  # [n, V]
    own = found.gather(1, torch.tensor(kept, device=found.device)[:, None])[:, 0].tolist()
    best = found.topk(min(count, found.shape[-1]), dim=-1)
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(tokens, values, strict=True)))
        for token, logprob, (tokens, values) in zip(kept, own, tops, strict=True)
    )
