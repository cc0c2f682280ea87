"""Which differences from plain decoding are near-ties, with ties planted into a tiny model."""

from __future__ import annotations

import pytest
import torch

from localspec.bench.cases import Case
from localspec.bench.exactness import NEAR_TIE, FirstDifference, judge, plain_scores
from localspec.bench.runs import EngineRunner
from localspec.engine.engine import Engine
from localspec.forward.cache import KVCache
from localspec.forward.model import CausalLM, kv_shape
from tests.kit.tiny import tiny_llama
from tests.kit.tiny_bench import tiny_bench

CASE = Case("a", "chat", (3, 9, 14, 27, 5), 0)


@pytest.fixture
def plain_engine() -> Engine:
    module = tiny_llama()  # transformers' own path, so that a test can reach into its weights
    cache = KVCache(kv_shape(module.config, 256), module.dtype, module.device)
    return Engine(CausalLM(module, cache), {})


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_scores_are_those_of_plain_decoding(plain_engine: Engine, temperature: float) -> None:
    bench = tiny_bench(plain_engine)
    sampling = CASE.sampling(temperature)
    plain = EngineRunner(bench, bench.controller, "off").run(CASE, sampling, 10)
    for position in range(10):
        found = plain_scores(plain_engine, CASE, temperature, plain.decided[:position])
        assert int(found.argmax()) == plain.decided[position]


def planted(engine: Engine, gap: float) -> tuple[int, int, int]:
    """Make the runner-up of the first token follow the best by `gap`; best, twin, any other."""
    best, other = plain_scores(engine, CASE, 0.0, []).topk(2).indices.tolist()
    head = engine.target.module.lm_head.weight  # type: ignore[attr-defined]
    before = plain_scores(engine, CASE, 0.0, [])
    with torch.no_grad():
        head[other] = head[best] * (1.0 - gap / float(before[best]))
    return best, other, int(before.argmin())


@pytest.mark.parametrize(("gap", "is_near"), [(1e-5, True), (1e-2, False)])
def test_a_difference_is_a_near_tie_only_below_the_threshold(
    plain_engine: Engine, gap: float, is_near: bool
) -> None:
    best, twin, _ = planted(plain_engine, gap)
    found = judge(plain_engine, CASE, 0.0, "ngram", [best, 1], [twin, 2])
    assert found is not None and found.position == 0
    assert found.gap == pytest.approx(gap, abs=5e-5)
    assert found.is_near_tie == is_near


def test_a_token_outside_the_tie_is_a_real_difference(plain_engine: Engine) -> None:
    best, _, far = planted(plain_engine, 1e-5)
    found = judge(plain_engine, CASE, 0.0, "ngram", [best], [far])
    assert found is not None and found.top_two_gap < NEAR_TIE
    assert not found.is_near_tie


def test_an_output_that_merely_stops_is_a_real_difference(plain_engine: Engine) -> None:
    best, _, _ = planted(plain_engine, 1e-5)
    found = judge(plain_engine, CASE, 0.0, "ngram", [best, 4], [best])
    assert found is not None
    assert (found.position, found.gap, found.is_near_tie) == (1, None, False)


def test_equal_outputs_are_not_judged(plain_engine: Engine) -> None:
    assert judge(plain_engine, CASE, 0.0, "ngram", [1, 2], [1, 2]) is None
    assert plain_engine.target.cache.length == 0


def test_the_threshold_itself_is_no_near_tie() -> None:
    assert not FirstDifference("a", "ngram", 0, NEAR_TIE, NEAR_TIE).is_near_tie
