"""Block drafters give what their publishers' own code gives, in every layout.

The reference outputs were computed once, by the modules of z-lab, DeepSpec and speculators (and the
convolutions and the selector of DFlash2), for a prompt and ten rounds with a rejection at every
place of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.forward.cache import KVCache, native_cache
from localspec.forward.features import Features
from localspec.forward.heads.block import BlockHead
from localspec.forward.heads.block_files import read_block
from localspec.forward.model import PREFILL_CHUNK
from localspec.forward.passes import Pass
from tests.kit.parity import (
    CAPACITY,
    CPU,
    VOCAB,
    WIDTH,
    Case,
    MadeUpTarget,
    cases,
    largest_error,
    made_up,
    target_of,
    text,
)

FILES = sorted((Path(__file__).parent / "parity").glob("block_*.safetensors"))
CASES = {name: case for file in FILES for name, case in cases(file).items()}
TOLERANCE = 2e-4  # of logits up to 20, in fp32; a wrong row is off by more than 1


def head_of(case: Case, folder: Path) -> tuple[BlockHead, MadeUpTarget]:
    target: Any = target_of(case)
    parts = read_block(case.write(folder, target), target)
    return BlockHead(parts, CAPACITY), target


def opened(
    head: BlockHead, tokens: list[int], features: Features, is_static: bool
) -> tuple[Any, torch.Tensor]:
    """A block after a text: what goes on from its rows, and the first row."""
    if not is_static:
        return head, head.start(tokens, features).forward()
    bucket = next(each for each in head.buckets if each >= head.end_of(len(tokens), 0))
    if (missing := head.missing(tokens, features)) is not None:
        while (cut := missing.cut(PREFILL_CHUNK)) is not None:
            cut[0].forward()
        missing.forward()
    with torch.inference_mode(), head.begun(tokens) as numbers:
        steps = head.steps(bucket, features)
        return steps, steps.start(torch.tensor(numbers))


def made(output: Any) -> torch.Tensor:
    return output.forward() if isinstance(output, Pass) else output


def drafted(
    head: BlockHead, target: MadeUpTarget, length: int, is_static: bool = False
) -> tuple[torch.Tensor, list[int], torch.Tensor | None]:
    """A greedy draft after so many tokens: logits [k, V], tokens, and stated confidences [k]."""
    tokens = text()[:length]
    block, row = opened(head, tokens, target.features(head.layers, tokens), is_static)
    logits, found, stated = list[torch.Tensor](), list[int](), list[torch.Tensor]()
    for step in range(head.num_drafts):
        if step:
            row = made(block.extend(torch.tensor([found[-1]]), row))
        logits.append(made(block.logits(row))[0])
        found.append(int(logits[-1].argmax()))
        confidence = block.stated()
        if confidence is not None:
            stated.append(confidence[0])
    head.forget(length - 1)
    return torch.stack(logits), found, torch.stack(stated) if stated else None


@pytest.mark.parametrize("is_static", [False, True], ids=["", "fixed shapes"])
@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_that_of_the_reference_in_every_round(
    name: str, is_static: bool, tmp_path: Path
) -> None:
    """With fixed shapes: the forward that a GPU captures."""
    case = CASES[name]
    head, target = head_of(case, tmp_path)
    assert {0, 1, 2, 3, head.num_drafts} <= {*case.accepted, head.num_drafts}
    for at, length in enumerate(case.lengths):
        logits, tokens, confidences = drafted(head, target, length, is_static)
        assert largest_error(logits, case.results["logits"][at]) < TOLERANCE, f"round {at}"
        assert tokens == case.results["tokens"][at].tolist()
        if "confidences" in case.results:
            assert confidences is not None
            assert largest_error(confidences, case.results["confidences"][at]) < TOLERANCE
    if "cache" in case.results:
        wanted = case.results["cache"]  # [layers, 2, kv_heads, n, head_dim]
        size = wanted.shape[3]
        assert head.cache.length == size
        found = torch.stack([torch.cat(pair)[:, :, :size] for pair in head.cache.slots])
        assert largest_error(found, wanted) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_a_block_on_a_fresh_cache_is_that_after_ten_rounds(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    head, target = head_of(case, tmp_path)
    for _ in range(2):  # the second has no new token to read
        logits, tokens, _ = drafted(head, target, case.lengths[-1])
        assert largest_error(logits, case.results["logits"][-1]) < TOLERANCE
        assert tokens == case.results["tokens"][-1].tolist()


def test_another_text_keeps_only_what_both_begin_with(tmp_path: Path) -> None:
    """Tokens were rejected or edited: rows of the context are made again from there on."""
    case = CASES["z-lab full"]
    head, target = head_of(case, tmp_path)
    tokens = text()[:20]
    edited = [*tokens[:6], 38, *tokens[7:]]
    head.start(edited, target.features(head.layers, edited)).forward()
    logits, _, _ = drafted(head, target, case.lengths[3])
    assert largest_error(logits, case.results["logits"][3]) < TOLERANCE


@pytest.mark.parametrize("is_static", [False, True], ids=["", "fixed shapes"])
@pytest.mark.parametrize("name", ["z-lab sliding", "speculators DFlash", "z-lab DFlash2"])
def test_a_window_takes_a_ring_and_says_the_same(
    name: str, is_static: bool, tmp_path: Path
) -> None:
    """Over a lap of the ring, back by an edit, and on."""
    case, capacity = CASES[name], 1100
    target: Any = target_of(case)
    target.cache = KVCache(replace(target.cache.shape, capacity=capacity), torch.float32, CPU)
    parts = read_block(case.write(tmp_path, target), target)
    head = BlockHead(parts, capacity)
    whole = BlockHead(parts, capacity)
    every_position = replace(whole.cache.shape, windows=())
    whole.cache = native_cache(every_position, torch.float32, CPU)
    assert head.cache.kv_bytes < 0.8 * whole.cache.kv_bytes
    features = Features(capacity, WIDTH, torch.float32, CPU)
    features.follow(head.layers)
    tokens = [(7 * place + place // 5) % VOCAB for place in range(capacity)]
    states = {layer: made_up(f"states {layer}", (capacity, WIDTH)) for layer in head.layers}
    for at, length in enumerate((300, 303, 520, 521, 700, 260, 400, 900, 905)):
        tokens[length - 2] = at  # an edit, which changes the states from there on
        for layer, rows in states.items():
            rows[length - 2 :] = made_up(f"states {layer} {at}", rows[length - 2 :].shape)
        features.write(length, {layer: rows[:length] for layer, rows in states.items()})
        whole.cache.rollback(0)
        blocks = (
            opened(head, tokens[:length], features, is_static),
            opened(whole, tokens[:length], features, False),
        )
        logits = [made(block.logits(row)) for block, row in blocks]
        assert largest_error(*logits) < TOLERANCE, f"at {length} tokens"
        for each in (head, whole):
            each.forget(length - 1)


def masked_root(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    run = head._run

    def wrong(context: Any, names: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
        return run(context, names, torch.cat((ids[1:2], ids[1:])), first)

    monkeypatch.setattr(head, "_run", wrong)


def row_off(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = head._layout
    turned = replace(layout, samples_root=not layout.samples_root)
    monkeypatch.setattr(head, "_parts", replace(head._parts, layout=turned))
    monkeypatch.setattr(head, "_layout", turned)


def late_context(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the context is made of the state of the token before."""
    context = head._context

    def wrong(tokens: Any, features: Any, first: int, end: int) -> torch.Tensor:
        return context(tokens, features, first, end).roll(1, 0)

    monkeypatch.setattr(head, "_context", wrong)


def bare_context(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused states before their norm."""
    parts = replace(head._parts, context_norm=lambda rows: rows)
    monkeypatch.setattr(head, "_parts", parts)


def other_causality(head: BlockHead, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = head._layout
    turned = tuple(not each for each in layout.is_causal)
    monkeypatch.setattr(
        head, "_parts", replace(head._parts, layout=replace(layout, is_causal=turned))
    )


WRONG: dict[str, Callable[[BlockHead, pytest.MonkeyPatch], None]] = {
    "slot 0 as a mask": masked_root,
    "rows off by one": row_off,
    "states of the token before": late_context,
    "states before the norm": bare_context,
    "the other causality": other_causality,
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("name", ["z-lab full", "z-lab sliding", "DeepSpec rnn", "z-lab DFlash2"])
def test_a_wrong_variant_is_seen(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them merely loses acceptance, so that no reply would show it."""
    case = CASES[name]
    head, target = head_of(case, tmp_path)
    WRONG[fault](head, monkeypatch)
    logits, _, _ = drafted(head, target, case.lengths[0])
    wanted = case.results["logits"][0]
    size = min(len(logits), len(wanted))
    assert largest_error(logits[:size], wanted[:size]) > 100 * TOLERANCE
