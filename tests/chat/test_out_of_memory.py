"""Memory that runs out at any step of a turn costs that turn's rest: what was written stays, the
drafters are unloaded and really freed, and the next turn works. A lost device is another fault."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from localspec.chat.local import LocalBackend
from localspec.chat.off_reasons import as_chosen, off_now
from localspec.chat.out_of_memory import fault_of
from localspec.controller.costs import Costs
from localspec.core import decoding
from localspec.core.backend import Chunk, Message, Request
from localspec.core.decoding import AUTO, OFF, SamplingParams
from localspec.core.errors import CacheError, EngineLost, MemoryShortage
from localspec.core.turn_stats import TurnStats
from localspec.drafters.ngram import NgramDrafter
from localspec.forward.features import Features
from tests.kit.local_backend import END, PIECES, SAY, Knowing, backend_of
from tests.kit.tiny import scripted

PROMPT = (Message("user", "abc"),)
TEXT = ["a", "b", " x", "c", "y"] * 8
NO_RAM = "DefaultCPUAllocator: can't allocate memory"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20.00 MiB."


class Weighty(Knowing):
    """A drafter that holds weights."""

    memory_bytes = 5_000_000

    def __init__(self, script: list[int]) -> None:
        super().__init__(script, 3)
        self.weights = torch.zeros(10)


class Short:
    """Raises at one forward of the target, with a tensor in the frame that the traceback keeps."""

    def __init__(self, target: Any, at_forward: int, make: Callable[[], Exception]) -> None:
        self._forward, self._left, self._make = target.forward, at_forward, make
        self.held: weakref.ref[torch.Tensor] | None = None
        target.forward = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            workspace = torch.zeros(1000)
            self.held = weakref.ref(workspace)
            raise self._make()  # a new one: an old one would hold its traceback
        return self._forward(*arguments, **named)


def writing() -> LocalBackend:
    script = [SAY[piece] for piece in TEXT] + [END]
    target = scripted(script, 3, len(PIECES))
    drafters: dict[str, Any] = {"weighty": Weighty(script), "ngram": NgramDrafter()}
    return backend_of(target, drafters)


def ask(backend: LocalBackend, drafter: str = AUTO, gamma: int | None = None) -> list[Chunk]:
    request = Request(PROMPT, max_tokens=60, drafter=drafter, num_draft_tokens=gamma)
    return list(backend.generate(request, threading.Event()))


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.slow
@pytest.mark.parametrize("at_forward", [1, 2, 3, 10])  # the prefill, then rounds
@pytest.mark.parametrize("fault", [lambda: torch.OutOfMemoryError(OUT_OF_MEMORY), MemoryError])
def test_memory_that_runs_out_at_any_step_drops_the_draft_and_the_next_turn_works(
    fault: Callable[[], Exception], at_forward: int
) -> None:
    backend = writing()
    draft = weakref.ref(backend.loaded.engine.drafters["weighty"])
    short = Short(backend.loaded.engine.target, at_forward, fault)
    held: list[object] = []

    def return_memory() -> None:
        gc.collect()
        held.extend([draft(), short.held and short.held()])

    backend.loaded = replace(backend.loaded, return_memory=return_memory)
    chunks = ask(backend, "weighty", 1)
    last = chunks[-1]
    assert last.finish_reason == "error" and last.is_relieved is True
    assert last.error is not None
    assert "Memory ran out" in last.error and "unloaded: weighty" in last.error
    assert "".join(TEXT).startswith(text_of(chunks))
    assert len([t for c in chunks for t in c.tokens]) >= at_forward - 2
    assert held == [None, None], "the draft, or tensors of the traceback, were held all the same"
    again = ask(backend)
    assert text_of(again) == "".join(TEXT) and again[-1].finish_reason == "eos"
    status = {each.name: each for each in backend.describe().drafters}
    assert not status["weighty"].is_available and status["weighty"].code == "no_memory"
    assert status["ngram"].is_available
    assert any("Memory ran out" in notice for notice in backend.describe().notices)


def test_without_a_draft_nothing_can_be_freed_and_the_chunk_says_so() -> None:
    script = [SAY[piece] for piece in TEXT] + [END]
    backend = backend_of(scripted(script, 3, len(PIECES)), {"ngram": NgramDrafter()})
    Short(backend.loaded.engine.target, 5, lambda: RuntimeError(NO_RAM))
    last = ask(backend)[-1]
    assert (last.finish_reason, last.is_relieved) == ("error", False)
    assert text_of(ask(backend)) == "".join(TEXT)


def test_an_unloaded_drafter_is_refused_with_the_reason() -> None:
    backend = writing()
    Short(backend.loaded.engine.target, 4, lambda: MemoryShortage("1 GiB more."))
    ask(backend, "weighty", 2)
    with pytest.raises(decoding.RequestError, match="unloaded when memory ran out"):
        ask(backend, "weighty")


@pytest.mark.parametrize("at_forward", [1, 2, 9])
def test_a_lost_device_ends_the_engine_after_what_was_written(at_forward: int) -> None:
    backend = writing()
    said = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"
    Short(backend.loaded.engine.target, at_forward, lambda: RuntimeError(said))
    texts: list[str] = []
    request = Request(PROMPT, max_tokens=60, drafter=OFF)
    with pytest.raises(EngineLost, match=r"illegal memory access was encountered\.$"):
        for chunk in backend.generate(request, threading.Event()):
            texts.append(chunk.text)
    assert "".join(TEXT).startswith("".join(texts)) and len(texts) >= at_forward - 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "memory"),
        (RuntimeError("CUDA error: out of memory"), "memory"),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "memory"),
        (RuntimeError("MPS backend out of memory"), "memory"),
        (RuntimeError("CUDA error: device-side assert triggered"), "device"),
        (RuntimeError("GPU is lost"), "device"),
        (RuntimeError("shapes cannot be multiplied"), "other"),
        (CacheError("The cache holds 3 tokens."), "other"),
    ],
)
def test_faults_are_told_apart(error: Exception, kind: str) -> None:
    assert fault_of(error).kind == kind


def test_an_error_of_ours_is_said_as_it_is() -> None:
    assert fault_of(CacheError("The cache holds 3 tokens.")).message == "The cache holds 3 tokens."


# why nothing drafts


def reasons(backend: LocalBackend, **wanted: Any) -> list[str | None]:
    request = Request(PROMPT, **{"max_tokens": 12, **wanted})
    chunks = list(backend.generate(request, threading.Event()))
    return [chunk.stats.off.code if chunk.stats.off else None for chunk in chunks[1:]]


def test_the_code_says_why_nothing_drafts() -> None:
    assert set(reasons(writing(), drafter=OFF)) == {"switched_off"}
    assert set(reasons(writing(), num_draft_tokens=0)) == {"switched_off"}
    by_drafter, by_length = as_chosen(OFF, None), as_chosen(AUTO, 0)
    assert by_drafter is not None and "Choose auto" in by_drafter.remedy
    assert by_length is not None and "Draft length" in by_length.remedy, "auto is chosen already"
    assert as_chosen(AUTO, None) is None
    assert set(reasons(writing())) == {"measuring"}
    assert set(reasons(writing(), drafter="weighty", num_draft_tokens=3)) == {None}


def measured(backend: LocalBackend, verify_ms: float) -> LocalBackend:
    costs = backend.loaded.controller.costs
    for width in (1, 2, 4, 8, 16):
        costs.set_verify(width, 10, 1.0 if width == 1 else verify_ms)
    for name in backend.loaded.engine.drafters:
        costs.set_draft_step(name, 10, 0.1)
    assert costs.is_measured
    return backend


def test_a_draft_that_does_not_pay_and_one_with_nothing_to_say_differ() -> None:
    assert "does_not_pay" in reasons(measured(writing(), 1000.0))
    script = [SAY[piece] for piece in ("a", "b", " x", "c", "y", "P", "\n")] + [END]
    backend = backend_of(scripted(script, 3, len(PIECES)), {"ngram": NgramDrafter()})
    assert "nothing_to_propose" in reasons(measured(backend, 1.0))


def test_sampled_rounds_are_measured_after_greedy_ones_and_say_so() -> None:
    backend = measured(writing(), 1000.0)
    backend.loaded.controller.sampled_costs = Costs()
    assert set(reasons(backend, sampling=SamplingParams(0.7, seed=1))) == {"measuring"}


def test_what_only_heads_have_read_goes_with_them() -> None:
    backend = writing()
    target = backend.loaded.engine.target
    target.cache.features = Features(64, 8, torch.float32, torch.device("cpu"))
    Short(target, 2, MemoryError)
    assert ask(backend)[-1].is_relieved is True
    assert target.cache.features is None


def test_a_reply_in_which_nothing_was_drafted_says_why() -> None:
    """It said "off, because nothing was drafted"."""
    loaded, stats = writing().describe(), TurnStats(3, num_output_tokens=1, num_steps=1)
    over = {tokens: off_now(loaded, replace(stats, num_output_tokens=tokens), False)
            for tokens in (1, 40)}  # fmt: skip
    assert [one.code if one else None for one in over.values()] == ["no_room", "nothing_to_propose"]
    assert off_now(loaded, stats, False, is_over=False) is None, "it may still draft"
    assert off_now(loaded, replace(stats, num_drafts=1), False) is None
