"""Accept or reject a Proposal against the target. Knows nothing of models, caches or text.

Rule: the target's choice after each token is fixed by the seed (engine.sampling), and a draft token
is accepted when it is that choice. So the reply is the target's own, token for token, whatever was
drafted, in chains and trees, greedy and sampled. A request may ask for leniency: tokens that a rule
allows are then accepted as well (engine.lenient).

Source: the drafter-invariant coupling of arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Sequence

from localspec.core.decoding import Proposal, Verdict
from localspec.core.errors import NumericsError
from localspec.forward.tree import children

ROOT = -1


def verify(
    proposal: Proposal, choices: Sequence[int | None], allowed: Sequence[bool] | None = None
) -> Verdict:
    """Walk down the draft from the root as far as the target agrees.

    choices: row 0 follows the root, row i + 1 follows draft token i; None where the target's row
    holds no numbers, which matters only where it is reached. allowed: for each draft token whether
    it is accepted although it is not the choice. Raises NumericsError.
    """
    path, lenient, node = list[int](), list[int](), ROOT
    below, tokens = children(proposal.parents), proposal.tokens
    while True:
        choice = choices[node + 1]
        if choice is None:
            raise NumericsError(
                "The model returned values that are not numbers, so no token can be chosen. The "
                "weights may be damaged or the precision too low: load it with --dtype fp32, or "
                "fetch the model again."
            )
        found = next((child for child in below.get(node, ()) if tokens[child] == choice), None)
        if found is None and allowed is not None:
            found = next((child for child in below.get(node, ()) if allowed[child]), None)
            lenient += [len(path)] if found is not None else []
        if found is None:
            return Verdict(tuple(path), choice, tuple(lenient), None not in choices)
        path.append(found)
        node = found
