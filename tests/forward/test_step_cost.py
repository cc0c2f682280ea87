"""How many operators of torch a step on a processor runs: its time, without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from localspec.forward.decoder import Decoder
from tests.kit.families import small
from tests.kit.tiny import with_cache

PROMPT = [5, 3, 9, 2, 7, 1]
VIEWS = ("view", "unbind", "narrow", "select.int", "slice.", "transpose", "permute", "expand",
         "unsqueeze", "split", "alias", "t.", "chunk", "detach", "numpy_T")  # fmt: skip


class Operators(TorchDispatchMode):
    """Counts the operators that run while it is entered, and the bytes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.counts[str(operator)] += 1
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not is_view(str(operator)):
            self.num_bytes += result.nbytes
        return result


def counted(model: Decoder, tokens: list[int]) -> Counter[str]:
    with Operators() as operators:
        model.forward(tokens)
    return operators.counts


def is_view(operator: str) -> bool:
    return operator.removeprefix("aten.").startswith(VIEWS)


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


# Operators of a step beside its products and views, by layer and for all layers together.
MOST_OPERATORS = {"qwen3": (24, 12), "qwen3_5": (38, 22), "gemma4": (34, 34)}


@pytest.mark.parametrize("family", MOST_OPERATORS)
def test_a_step_runs_few_operators(family: str) -> None:
    model = with_cache(small(family), 64)
    model.forward(PROMPT)
    counts = counted(model, [4])
    computing = sum(count for name, count in counts.items() if not is_view(name))
    of_layer, of_all = MOST_OPERATORS[family]
    assert computing - num_products(counts) <= of_layer * len(model.weights.blocks) + of_all


LONG = 4096


@pytest.mark.parametrize("num_rows", [1, 8, 512])
def test_masks_of_a_long_context_stay_small(num_rows: int) -> None:
    """Rows of a forward see the same slots but for the new ones, so a forward over a long context
    computes one mask: of 128 rows of a key head at most."""
    model = with_cache(small("qwen3"), LONG + 1024)

    def num_bytes(start: int) -> int:
        while model.cache.length < start:
            model.forward([1] * min(512, start - model.cache.length))
        with Operators() as operators:
            model.forward([1] * num_rows)
        return operators.num_bytes

    short, long = num_bytes(512), num_bytes(LONG)
    rows = min(128, 2 * num_rows + 15)  # two query heads share a key head
    assert long - short <= 1.1 * rows * (LONG - 512) * 4
