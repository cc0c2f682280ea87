"""How many operators of torch a step on a processor runs: its time, without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from localspec.forward.decoder import Decoder
from tests.kit.families import small
from tests.kit.tiny import with_cache

PROMPT = [5, 3, 9, 2, 7, 1]


class Operators(TorchDispatchMode):
    """Counts the operators that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def counted(model: Decoder, tokens: list[int]) -> Counter[str]:
    with Operators() as operators:
        model.forward(tokens)
    return operators.counts


def num_products(counts: Counter[str]) -> int:
    return sum(count for name, count in counts.items() if "_linear_pointwise" in name)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5_moe"])
def test_a_step_of_a_mixture_reads_the_chosen_experts_alone(family: str) -> None:
    """Rows that only fill a forward up choose no experts of their own."""
    model = with_cache(small(family), 64)
    model.forward(PROMPT)
    counts, blocks = counted(model, [4]), model.weights.blocks
    apart = {"gpt_oss": 3, "qwen3_5_moe": 5}  # mixer in and out, router; a shared expert's two
    chosen = 2 * 2  # gate and up as one, and down, of two experts
    assert num_products(counts) == len(blocks) * (apart[family] + chosen) + 1
