"""A loaded engine of tiny models, for tests of what measures one."""

from __future__ import annotations

from localspec.bench.runs import BenchEngine
from localspec.controller.acceptance import Acceptance
from localspec.controller.controller import Controller
from localspec.controller.costs import WIDTHS, Costs
from localspec.core.backend import DrafterStatus
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.draft_model import DraftModelDrafter
from localspec.drafters.ngram import NgramDrafter
from localspec.engine.engine import Engine
from localspec.forward.graphs import CapturedDecoder, GraphPool
from tests.kit.tiny import (
    END_ID,
    VOCAB_SIZE,
    agreeing_draft,
    tiny_llama,
    with_cache,
    with_plain_cache,
)


def measured_costs() -> Costs:
    """A table such as calibration leaves behind, so that tests need not take the time."""
    costs = Costs()
    for width in WIDTHS:
        costs.set_verify(width, 128, 10.0 + 0.1 * width)
    for name in ("ngram", "draft_model"):
        costs.set_draft_step(name, 128, 0.5)
    return costs


def captured_engine(pool: GraphPool) -> Engine:
    """Target and draft model with graphs in `pool`."""
    module = tiny_llama()
    target = CapturedDecoder(with_plain_cache(module), pool)
    draft = with_plain_cache(agreeing_draft(module))
    chunks = ChunkedDraft(draft, VOCAB_SIZE, pool)
    return Engine(target, {"draft_model": DraftModelDrafter(draft, VOCAB_SIZE, chunks)})


def tiny_bench(engine: Engine | None = None, precision: str = "float32") -> BenchEngine:
    """engine: None for a target on our own forward with a draft model and n-gram lookup."""
    if engine is None:
        target = tiny_llama()
        draft = DraftModelDrafter(with_cache(agreeing_draft(target)), VOCAB_SIZE)
        engine = Engine(with_cache(target), {"ngram": NgramDrafter(), "draft_model": draft})
    return BenchEngine(
        engine=engine,
        controller=Controller(engine.drafters, measured_costs(), Acceptance()),
        render=lambda text: [1 + ord(character) % (VOCAB_SIZE - 2) for character in text],
        end_ids=frozenset({END_ID}),
        statuses=tuple(DrafterStatus(name, True, "ready") for name in engine.drafters),
        context_length=256,
        precision=precision,
        machine={"target": "tiny"},
    )
