"""Chosen experts of a stack are a layer with the very weights of the same experts as layers of
their own, in every format."""

from __future__ import annotations

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.weights.nf4 import BLOCK, has_kernel
from localspec.weights.precision import Precision, linear_for, stack_for
from localspec.weights.stacks import Stack
from localspec.weights.stored import Dense, Grouped, Int8, Mxfp4, Nf4, Weight
from tests.kit.card_int4 import imitate_card
from tests.kit.mxfp4 import random_mxfp4
from tests.kit.tiny import CPU

COUNT, NUM_OUT, NUM_IN = 5, 64, 128
CHOSEN = (3, 0, 4, 3)
FP32 = torch.float32


def noise(seed: int) -> torch.Tensor:
    return torch.randn(NUM_OUT, NUM_IN, generator=torch.Generator().manual_seed(seed))


def weights_in(kind: str) -> list[Weight]:
    made = {
        "dense": lambda seed: Dense(noise(seed)),
        "nf4": lambda seed: Nf4.rounded(noise(seed), BLOCK),
        "nf4 in blocks of other sizes": lambda seed: Nf4.rounded(noise(seed), 2 * BLOCK),
        "mxfp4": lambda seed: random_mxfp4(NUM_OUT, NUM_IN, seed=seed),
        "groups": lambda seed: Grouped.rounded(noise(seed), 64),
        "groups of 32": lambda seed: Grouped.rounded(noise(seed), 32),
        "8 bits": lambda seed: Int8.rounded(noise(seed)),
        "8 bits in groups": lambda seed: Grouped.with_zeros(
            torch.randint(0, 256, (NUM_OUT, NUM_IN), dtype=torch.uint8),
            torch.full((NUM_OUT, 2), 128), torch.rand(NUM_OUT, 2), 8,
        ),
    }[kind]  # fmt: skip
    return [made(seed) for seed in range(COUNT)]


def values_of(stack: Stack) -> torch.Tensor:
    """The weight of the layer of CHOSEN, [out, in]."""
    layer = stack.chosen(torch.tensor(CHOSEN))
    num_in = NUM_IN * (len(CHOSEN) if stack.is_summed else 1)
    return layer(torch.eye(num_in)).T


KINDS = ("dense", "nf4", "nf4 in blocks of other sizes", "mxfp4", "groups", "groups of 32",
         "8 bits", "8 bits in groups")  # fmt: skip


@pytest.mark.parametrize("is_summed", [False, True], ids=["outputs", "inputs"])
@pytest.mark.parametrize("kind", KINDS)
def test_chosen_experts_have_the_weights_of_layers_of_their_own(
    kind: str, is_summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_card(monkeypatch)
    kept = Precision(FP32, CPU, keeps_groups=True)
    weights = weights_in(kind)
    stack = stack_for([[weight] for weight in weights], COUNT, kept, is_summed)
    values = values_of(stack)
    rows = torch.randn(len(CHOSEN), 7, NUM_IN, generator=torch.Generator().manual_seed(1))
    rows = rows.bfloat16().float()  # as the kernel for groups reads them
    apart = torch.stack(
        [
            stack.chosen(torch.tensor([expert]))(each)
            for expert, each in zip(CHOSEN, rows, strict=True)
        ]
    )
    if not has_kernel(CPU) or not kind.startswith("nf4"):
        assert torch.allclose(stack.products(rows, torch.tensor(CHOSEN)), apart, atol=1e-4)
    if kind != "8 bits":  # a layer of LLM.int8 rounds its scales
        layers = [linear_for([weights[expert]], [None], kept) for expert in CHOSEN]
        parts = [layer(torch.eye(NUM_IN)).T for layer in layers]
        assert torch.allclose(values, torch.cat(parts, int(is_summed)), atol=1e-6)
    if not has_kernel(CPU) or not kind.startswith("nf4"):  # which may round rows
        dense = [weights[expert].dense(FP32) for expert in CHOSEN]
        rounding = 0.02 if kind in ("groups", "groups of 32") else 0.0  # of scales to bf16
        assert float((values - torch.cat(dense, int(is_summed))).abs().max()) <= rounding


@pytest.mark.parametrize("kind", ["nf4", "int4"])
@pytest.mark.parametrize("is_summed", [False, True], ids=["outputs", "inputs"])
def test_full_precision_is_rounded_as_layers_are(
    kind: str, is_summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up of two tensors are rounded as one weight."""
    imitate_card(monkeypatch)
    kept = Precision(FP32, CPU, kind)
    halves = [noise(seed).chunk(2) for seed in range(COUNT)]
    pairs = [[Dense(half) for half in pair] for pair in halves]
    stack = stack_for(pairs, COUNT, kept, is_summed)
    assert stack.kind is (Nf4 if kind == "nf4" else Grouped)
    parts = [linear_for(pairs[expert], [None, None], kept) for expert in CHOSEN]
    wanted = torch.cat([layer(torch.eye(NUM_IN)).T for layer in parts], int(is_summed))
    assert torch.allclose(values_of(stack), wanted, atol=1e-6)
    bits = 8 * stack.weight_bytes / (COUNT * NUM_OUT * NUM_IN)
    assert bits == 4.5  # with a scale of 4 bytes, or two numbers of 2, for 64 weights


def test_halves_that_are_kept_in_different_formats_are_rounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Q4_K beside Q6_K in a GGUF file: in groups on a card with a kernel for them."""
    imitate_card(monkeypatch)
    kept = Precision(FP32, CPU, "int4", 32, keeps_groups=True)
    pairs = [[Grouped.rounded(noise(seed), 32), Dense(noise(seed + 9))] for seed in range(COUNT)]
    stack = stack_for(pairs, COUNT, kept, is_summed=False)
    assert stack.kind is Grouped and stack.error < 0.01
    wanted = torch.cat([half.dense(FP32) for half in pairs[0]])
    found = stack.chosen(torch.tensor([0]))(torch.eye(NUM_IN)).T
    assert float((found - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize(
    "weights",
    [
        (random_mxfp4(NUM_OUT, NUM_IN), Dense(noise(0))),
        (Grouped.rounded(noise(0), 32), Grouped.rounded(noise(1), 64)),
    ],
    ids=["kinds", "sizes of groups"],
)
def test_experts_in_different_formats_are_refused(
    weights: tuple[Weight, Weight], monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate_card(monkeypatch)
    kept = Precision(FP32, CPU, keeps_groups=True)
    with pytest.raises(ModelError, match=r"kept in different formats.*another copy"):
        stack_for([[weight] for weight in weights], 2, kept, is_summed=False)


def test_mxfp4_stays_in_its_bytes() -> None:
    weights = weights_in("mxfp4")
    kept = Precision(FP32, CPU, "nf4")
    stack = stack_for([[weight] for weight in weights], COUNT, kept, is_summed=True)
    assert stack.kind is Mxfp4
    assert stack.weight_bytes == COUNT * NUM_OUT * NUM_IN * 4.25 / 8
