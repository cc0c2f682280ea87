"""Everything that a card runs, on fake tensors: devices and types agree, and the host seldom waits.

Numbers, streams and real captures are not covered: see fake_card.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from localspec.core.decoding import DraftPlan, Growth, SamplingParams, Sequence
from localspec.core.grammar import Grammar
from localspec.drafters import chunk, eagle_beams
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.drafting import RULED_SIZE
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY, drafter_class
from localspec.drafters.vocabularies import Foreign
from localspec.engine.engine import Engine
from localspec.forward import graphs
from localspec.forward.cache import WIDEST, KVCache, native_cache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.graphs import CapturedDecoder, Work, shapes
from localspec.forward.heads.assistant import Assistant
from localspec.forward.heads.chain_static import ChainHead
from localspec.forward.load import load_model
from localspec.forward.model import PREFILL_CHUNK, CausalLM, kv_shape
from localspec.forward.one_width import OneWidthDecoder
from localspec.forward.output_head import DraftVocabulary
from localspec.forward.prefix_store import PrefixStore
from localspec.forward.prefixes import Prefixes
from localspec.machine.config_shapes import shape_from_config
from localspec.machine.folder_shapes import shape_from_folder
from localspec.machine.gguf_models import opened_gguf
from localspec.machine.memory import CUBLAS_WORKSPACE_BYTES, Arrangement, Room, bytes_of
from localspec.machine.model import Model
from localspec.weights import precision
from localspec.weights.int4 import Int4Linear
from localspec.weights.library import bitsandbytes
from localspec.weights.nf4 import BLOCK, Nf4Linear
from localspec.weights.precision import Precision
from localspec.weights.stored import Dense
from tests.kit import qwen_mtp
from tests.kit.assistants import shared_keys
from tests.kit.decoders import decoder_of, layers_of, weights_of
from tests.kit.fake_card import (
    CUDA,
    OTHER_CUDA,
    Traffic,
    fake_card,
    fake_module,
    memory_of_card,
)
from tests.kit.families import WITH_STATES, small
from tests.kit.foreign_tiny import foreign_to
from tests.kit.gguf_files import VOCABULARY, write_gguf
from tests.kit.grammars import MadeUp
from tests.kit.packed import LAYOUTS, packed_folder
from tests.kit.random_heads import head_for
from tests.kit.tiny import VOCAB_SIZE, Plans, tiny_llama, tiny_qwen
from tests.kit.tracing import UncapturedPool

DTYPE = torch.bfloat16
PROMPT = tuple([5, 6, 7, 8] * 10)
LENGTH = 3
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=1)
PENALISED = replace(SAMPLED, repetition_penalty=1.2)

# Times that the host may wait for the card in a round, whatever the draft's length: for the draft,
# where the card makes it, and for the target's choices. Word lookup drafts on the host.
MOST_GREEDY, MOST_SAMPLED = 2, 3
FEWER = {"ngram": 1}
AT_FIRST = {"early_exit": 1}  # in a turn's first round: its exits are compared
# These ask the host about each token of a draft: it reads their text as they go.
BY_TOKEN = tuple(name for name, info in REGISTRY.items() if info.needs == "foreign")
DEPTHS = {"early_exit": 2}  # of the target; one layer says all there is to say elsewhere


MOST_LAUNCHES = 7  # of a head's draft, beside the graph
FREE = Growth(lambda confidence: 0.9 * confidence, (0.0,) * 16, 0.0)


def target_module() -> Any:
    return tiny_llama(num_layers=1)


def gemma_module() -> Any:
    with shared_keys():
        return small("gemma4", vocab_size=VOCAB_SIZE)


def gemma_on_card() -> Decoder:
    module = fake_module(gemma_module(), DTYPE)
    return decoder_of(module, KVCache(kv_shape(module.config, 64), DTYPE, CUDA, num_spare=16))


def on_card(
    num_layers: int,
    capacity: int = 64,
    device: torch.device = CUDA,
    vocab_size: int = VOCAB_SIZE,
) -> Decoder:
    module = fake_module(tiny_llama(num_layers=num_layers, vocab_size=vocab_size), DTYPE, device)
    return decoder_of(module, KVCache(kv_shape(module.config, capacity), DTYPE, device))


def drafter_on(name: str, parts: Parts) -> Any:
    with patch.object(precision, "MAX_RELATIVE_ERROR", 1.0):  # a fake product has no numbers
        return drafter_class(name).build(parts)


def parts_on_card(name: str, heads: dict[str, Any], foreign: Foreign) -> Parts:
    """What the drafter may be built from, as on an Apple GPU."""
    foreign = replace(foreign, model=on_card(1, vocab_size=foreign.model.vocab_size))
    target = gemma_on_card() if name == "assistant" else on_card(DEPTHS.get(name, 1))
    return Parts(target, on_card(1), heads=heads, foreign=foreign)


def captured(parts: Parts) -> Parts:
    """The same as on CUDA."""
    pool, draft = UncapturedPool(), parts.draft
    assert isinstance(parts.target, Decoder) and isinstance(draft, Decoder)
    target, draft = CapturedDecoder(parts.target, pool), CapturedDecoder(draft, pool)
    return replace(parts, target=target, draft=draft, pool=pool)


class Priced(Plans):
    """Where it is told so, as the controller plans: it may end a draft after every token, and
    prices a tree."""

    is_priced = False

    def plan(self, sequence: Sequence) -> DraftPlan:
        if not self.is_priced:
            return super().plan(sequence)
        growth = Growth(lambda confidence: 0.9 * confidence, (0.01,) * LENGTH, 0.02)
        return replace(super().plan(sequence), growth=growth, keep_drafting=lambda *_: True)


def rounds_of(
    name: str,
    parts: Parts,
    sampling: SamplingParams,
    traffic: Traffic,
    ways: tuple[bool, ...] = (False, False),
    grammar: Grammar | None = None,
) -> Iterator[bool]:
    """A prompt and a round for each of the ways, whether it is priced; `traffic` holds that round
    while its way is given."""
    engine = Engine(parts.target, {name: drafter_on(name, parts)})
    sequence = engine.start(PROMPT, sampling, 64, frozenset(), grammar=grammar)
    engine.prefill(sequence, threading.Event())
    policy = Priced((name, LENGTH))
    rounds = engine.decode(sequence, policy, threading.Event())
    for policy.is_priced in ways:
        traffic.clear()
        next(rounds)
        yield policy.is_priced
    rounds.close()
    parts.target.cache.rollback(0)


def any_half(reply: list[int] | tuple[int, ...]) -> set[int]:
    """A grammar that forces nothing, so that every token is guessed."""
    return {token for token in range(VOCAB_SIZE) if (token + len(reply)) % 4 < 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(REGISTRY))
def test_rounds_wait_for_the_card_only_where_they_must(name: str) -> None:
    """A grammar is asked on the host about each token of a chain, or each step of a tree."""
    heads = {}
    if REGISTRY[name].needs == "head":
        module = gemma_module if name == "assistant" else target_module
        heads = {name: head_for(name, module)}
    foreign, grammar = foreign_to(tiny_llama()), MadeUp(any_half, VOCAB_SIZE)
    with fake_card(number=0.9) as traffic:
        uncaptured = parts_on_card(name, heads, foreign)
        parts = captured(uncaptured)
        for sampling in (GREEDY, PENALISED):  # under a penalty and all that cuts a sampled row
            most = MOST_GREEDY if sampling is GREEDY else MOST_SAMPLED
            most = FEWER.get(name, most) if name not in BY_TOKEN else 1 + 2 * LENGTH
            further = -(-LENGTH // RULED_SIZE) - 1  # a draft that may end early is read in pieces
            for is_priced in rounds_of(name, parts, sampling, traffic, (False, True)):
                assert not traffic.uploads, "the host waits while its memory is copied"
                allowed = most + (further if is_priced else AT_FIRST.get(name, 0))
                assert sum(traffic.reads.values()) <= allowed, traffic.reads
        for _ in rounds_of(name, parts, SAMPLED, traffic, (False,), grammar):
            assert not traffic.uploads
            allowed = max(most, 1 + LENGTH) + AT_FIRST.get(name, 0)
            assert sum(traffic.reads.values()) <= allowed, traffic.reads
        sampling = replace(SAMPLED, presence_penalty=0.5, frequency_penalty=0.5)
        for _ in rounds_of(name, uncaptured, sampling, traffic):
            assert not traffic.uploads


@pytest.mark.slow
def test_a_module_that_ships_with_its_target_waits_no_more_than_others(tmp_path: Path) -> None:
    """Nor does a graph of its steps."""
    folder = qwen_mtp.write(tmp_path, *qwen_mtp.pair())
    with fake_card(number=0.9) as traffic:
        target = shipped_target()
        for sampling, most in ((GREEDY, MOST_GREEDY), (SAMPLED, MOST_SAMPLED)):
            parts = Parts(target, heads={"mtp": folder})
            for _ in rounds_of("mtp", parts, sampling, traffic):
                assert not traffic.uploads
                assert sum(traffic.reads.values()) <= most, traffic.reads
    with fake_card() as traffic:
        pool = WatchedPool(traffic)
        parts = Parts(shipped_target(), heads={"mtp": folder}, pool=pool)
        drafter = drafter_on("mtp", parts)
        (captures,) = drafter.captures
        with patch.object(ChainHead, "draft_sizes", (1,)):
            assert len(list(captures.capture())) == pool.num_captures > 0
        assert captures.notice is None


def shipped_target() -> Decoder:
    """Inside `fake_card`."""
    with unset_fake_temporarily():
        module = copy.deepcopy(qwen_mtp.pair()[0])
    weights = weights_of(fake_module(module, DTYPE), Precision(DTYPE, CUDA), 64)
    return Decoder(weights, native_cache(kv_shape_of(weights, 64), DTYPE, CUDA))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, info in REGISTRY.items() if info.needs == "draft"])
@pytest.mark.parametrize("device", [OTHER_CUDA, torch.device("cpu")], ids=["card", "processor"])
def test_a_draft_on_another_device_hands_over_token_ids_alone(
    name: str, device: torch.device
) -> None:
    """Neither logits, hidden states nor noise cross, and the host waits no more than with both on
    one card. Where the draft is on the processor, nothing but the target's choices is read."""
    is_cpu = device.type == "cpu"
    with fake_card(number=0.9) as traffic:
        pool = UncapturedPool()
        target, draft = CapturedDecoder(on_card(1), pool), on_card(1, device=device)
        draft_pool = None if is_cpu else UncapturedPool()
        if draft_pool is not None:
            draft = CapturedDecoder(draft, draft_pool)
        parts = Parts(target, draft, pool=pool, draft_pool=draft_pool)
        for sampling in (GREEDY, PENALISED):
            for _ in rounds_of(name, parts, sampling, traffic):
                assert not traffic.uploads and not traffic.crossings
                assert sum(traffic.reads.values()) <= (1 if is_cpu else MOST_GREEDY)


class WatchedPool(UncapturedPool):
    """Runs the work that would be recorded, and counts what a capture would not survive."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self.num_captures = 0

    def capture(self, work: Work) -> Work:
        self._traffic.clear()
        work()
        assert not self._traffic.reads and not self._traffic.uploads, "a capture would fail"
        self.num_captures += 1
        return work


@pytest.mark.slow
def test_every_graph_body_stays_on_the_card() -> None:
    # Longer pieces go on alike.
    with patch.object(chunk, "DRAFT_SIZES", (1, 2)), fake_card() as traffic:
        pool = WatchedPool(traffic)
        target, draft = on_card(1), on_card(1)
        target.follow([0, -1])
        step = CapturedDecoder(target, pool)
        chunks = ChunkedDraft(draft, draft.vocab_size, pool)
        chunks.want(PENALISED)
        for each in (step, chunks):
            assert len(list(each.capture())) > 0 and each.notice is None
        assert len(step.captured) == len(shapes(64)) and pool.num_captures > len(step.captured)
        logits = step.forward([1, 2, 3], [-1, 0, 0])
        assert (logits.shape, logits.dtype, logits.device) == ((3, 64), torch.float32, CUDA)


class CountingPool(WatchedPool):
    """A replay starts no kernel of its own. num_replays: how many there were."""

    num_replays = 0

    def capture(self, work: Work) -> Work:
        super().capture(work)

        def replay() -> None:
            self.num_replays += 1

        return replay


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ids"),
    [
        *((name, ()) for name, info in REGISTRY.items() if info.needs == "head"),
        *((name, range(VOCAB_SIZE // 2)) for name in ("mtp", "block")),
    ],
)
def test_a_head_drafts_by_one_graph_one_wait_and_few_kernels(
    name: str, ids: range | tuple[()]
) -> None:
    """Whatever its steps are, and however many pairs or rows of the context are new. ids: of the
    tokens that it knows, none for all."""
    few = patch.object(eagle_beams, "STEPS", (4,)), patch.object(ChainHead, "draft_sizes", (4,))
    heads = {name: head_for(name, gemma_module if name == "assistant" else target_module)}
    with few[0], few[1], patch.object(Assistant, "draft_sizes", (4,)), fake_card() as traffic:
        pool = CountingPool(traffic)
        target = gemma_on_card() if name == "assistant" else on_card(1)
        vocabulary = DraftVocabulary(ids)
        parts = Parts(target, heads=heads, pool=pool, vocabulary=vocabulary)
        drafter = drafter_on(name, parts)
        assert not ids or len(drafter.output.ids) == len(ids)
        (captures,) = drafter.captures
        captures.cuts.clear()  # greedy drafts start fewer kernels
        captures.want(PENALISED)
        assert len(list(captures.capture())) == pool.num_captures > 0 and captures.notice is None
        engine, plan = Engine(target, {name: drafter}), DraftPlan(name, 4, growth=FREE)
        sequence = engine.start(PROMPT, PENALISED, 64, frozenset())
        engine.prefill(sequence, threading.Event())
        drafter.propose(sequence, plan)  # catches up with a prompt
        traffic.clear()
        pool.num_replays, launches = 0, Launches()
        with launches:
            drafter.propose(sequence, plan)
        assert pool.num_replays == 1
        assert not traffic.uploads and sum(traffic.reads.values()) == 1, traffic.reads
        assert launches.count <= MOST_LAUNCHES


def hybrid_on_card(num_layers: int = 4, capacity: int = 96, family: str = "qwen3_5") -> Decoder:
    module = fake_module(small(family, num_hidden_layers=num_layers), DTYPE)
    weights = weights_of(module, Precision(DTYPE, CUDA), capacity)
    return Decoder(weights, KVCache(kv_shape_of(weights, capacity), DTYPE, CUDA))


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_STATES)
def test_every_graph_body_of_a_model_with_states_stays_on_the_card(family: str) -> None:
    few = patch.multiple(graphs, COARSE_WIDTHS=(1, WIDEST), FINE_WIDTHS=())
    with few, patch.object(chunk, "DRAFT_SIZES", (2,)), fake_card() as traffic:
        pool, decoder = WatchedPool(traffic), hybrid_on_card(family=family)
        assert decoder.is_capturable
        step, chunks = CapturedDecoder(decoder, pool), ChunkedDraft(decoder, VOCAB_SIZE, pool)
        for each in (step, chunks):
            assert len(list(each.capture())) > 0 and each.notice is None
        assert len(step.captured) == len(shapes(96)) and pool.num_captures > len(step.captured)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_rounds_of_models_with_states_wait_no_more_than_others(name: str) -> None:
    with fake_card(number=0.9) as traffic:
        pool = UncapturedPool()
        target, draft = (CapturedDecoder(hybrid_on_card(), pool) for _ in "ab")
        parts = Parts(target, draft, pool=pool)
        for sampling, most in ((GREEDY, MOST_GREEDY), (SAMPLED, MOST_SAMPLED)):
            for _ in rounds_of(name, parts, sampling, traffic):
                assert not traffic.uploads
                assert sum(traffic.reads.values()) <= FEWER.get(name, most), traffic.reads


@pytest.mark.slow
def test_states_are_put_by_and_brought_back_without_a_wait() -> None:
    with fake_card() as traffic:
        model = hybrid_on_card()
        model.forward(PROMPT)
        traffic.clear()
        model.cache.hold()
        model.forward([3] * 40)
        assert not traffic.reads and not traffic.uploads
        assert model.cache.reuse(PROMPT) == len(PROMPT)
        model.forward([4])
        assert not traffic.reads and not traffic.uploads


def with_rings_on_card(capacity: int) -> Decoder:
    """A model whose layers with a window hold 512 positions."""
    module = fake_module(small("gemma4", max_position_embeddings=2048), DTYPE)
    weights = weights_of(module, Precision(DTYPE, CUDA), capacity)
    cache = KVCache(kv_shape_of(weights, capacity), DTYPE, CUDA, num_spare=WIDEST)
    assert {pair[0].shape[2] for pair in cache.slots} == {512, cache.num_slots}
    return Decoder(weights, cache)


@pytest.mark.slow
def test_every_graph_body_of_a_model_with_rings_stays_on_the_card() -> None:
    few = patch.multiple(graphs, COARSE_WIDTHS=(1, WIDEST), FINE_WIDTHS=())
    with few, patch.object(chunk, "DRAFT_SIZES", (2,)), fake_card() as traffic:
        pool, decoder = WatchedPool(traffic), with_rings_on_card(1000)
        step = CapturedDecoder(decoder, pool)
        chunks = ChunkedDraft(decoder, decoder.vocab_size, pool)
        one = OneWidthDecoder(with_rings_on_card(1000), pool)
        for each in (step, chunks, one):
            assert len(list(each.capture())) > 0 and each.notice is None
        for model in (step, one):
            for first in range(0, 900, PREFILL_CHUNK):
                model.forward([3] * min(PREFILL_CHUNK, 900 - first), num_logits=1)
            traffic.clear()
            assert model.forward([1, 2, 3]).shape == (3, decoder.vocab_size)
            assert not traffic.uploads and not traffic.reads


@pytest.mark.slow
def test_windows_of_a_long_prompt_are_put_by_and_brought_back_without_a_wait() -> None:
    with fake_card() as traffic:
        target = with_rings_on_card(4096)
        engine = Engine(target, {})
        sequence = engine.start(tuple([3] * 2101), GREEDY, 8, frozenset())
        traffic.clear()
        engine.prefill(sequence, threading.Event())
        assert sum(traffic.reads.values()) == -(-2100 // PREFILL_CHUNK), "one for each piece"
        target.forward([4] * 512)
        assert target.cache.reuse([3] * 2100) == 2100, "which the ring itself holds no more"
        target.forward([4])
        assert sum(traffic.reads.values()) == -(-2100 // PREFILL_CHUNK)
        assert not traffic.uploads


@pytest.mark.slow
def test_a_text_is_kept_without_a_wait() -> None:
    """Rows, states and windows, so that a round that follows waits for none of it."""
    with fake_card() as traffic:
        for model, length in ((hybrid_on_card(), 48), (with_rings_on_card(1000), 700)):
            model.cache.prefixes = Prefixes(PrefixStore(2**30), "a model")
            for first in range(0, length, PREFILL_CHUNK):
                model.forward([3] * min(PREFILL_CHUNK, length - first), num_logits=1)
            model.cache.hold()
            traffic.clear()
            assert list(model.cache.prefixes.save(model.cache))
            assert model.cache.prefixes.store.nbytes > 0
            model.forward([4])
            assert not traffic.reads and not traffic.uploads


class Launches(TorchDispatchMode):
    """Counts the operations on the card that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten" and not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_a_round_of_a_model_with_states_waits_for_nothing_and_starts_few_kernels() -> None:
    """Before a replay. Their number does not grow with layers or tokens."""
    counts = dict[int, list[int]]()
    with fake_card() as traffic:
        for num_layers in (4, 8):
            cache = hybrid_on_card(num_layers=num_layers).cache
            counts[num_layers] = []
            traffic.clear()
            for num_rows in (1, 16, 1, 9, 16, 16, 4):
                launches = Launches()
                with torch.inference_mode(), launches, cache.append([3] * num_rows):
                    counts[num_layers].append(launches.count)
                cache.rollback(cache.length - num_rows // 2)
            assert not traffic.reads and not traffic.uploads
    assert counts[4] == counts[8]
    assert counts[4].count(0) == 6 and max(counts[4]) <= 20, "only what is settled is moved"


@pytest.mark.slow
def test_a_long_window_is_recorded_whole_and_in_parts_and_the_faster_one_is_kept() -> None:
    few = patch.multiple(graphs, COARSE_WIDTHS=(1, WIDEST), FINE_WIDTHS=())
    with few, fake_card() as traffic:
        pool, decoder = WatchedPool(traffic), on_card(1, capacity=512)
        step = CapturedDecoder(decoder, pool)
        assert len(list(step.capture())) == len(shapes(512)) and step.notice is None
        assert pool.num_captures == len(shapes(256)) + 2 * len(shapes(256))


def one_width(pool: UncapturedPool) -> OneWidthDecoder:
    module = fake_module(target_module(), DTYPE, CUDA)
    cache = KVCache(kv_shape(module.config, 64), DTYPE, CUDA, num_spare=WIDEST)
    return OneWidthDecoder(decoder_of(module, cache), pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "ngram"])
def test_steps_of_one_width_wait_no_more_than_others(name: str) -> None:
    with fake_card(number=0.9) as traffic:
        pool = UncapturedPool()
        parts = Parts(one_width(pool), CapturedDecoder(on_card(1), pool), pool=pool)
        for sampling, most in ((GREEDY, MOST_GREEDY), (SAMPLED, MOST_SAMPLED)):
            for _ in rounds_of(name, parts, sampling, traffic):
                assert not traffic.uploads
                assert sum(traffic.reads.values()) <= FEWER.get(name, most)


@pytest.mark.slow
def test_steps_of_one_width_can_be_captured() -> None:
    with fake_card() as traffic:
        pool = WatchedPool(traffic)
        target = one_width(pool)
        assert len(list(target.capture())) == pool.num_captures == 1 and target.notice is None


@pytest.mark.slow
def test_a_long_prompt_waits_once_for_each_piece_and_uploads_without_a_wait() -> None:
    with fake_card() as traffic:
        target = on_card(1, capacity=4096)
        engine = Engine(target, {})
        sequence = engine.start(tuple([3] * 2001), GREEDY, 8, frozenset())
        traffic.clear()
        engine.prefill(sequence, threading.Event())
        assert target.cache.length == 2000
        assert sum(traffic.reads.values()) == -(-2000 // PREFILL_CHUNK)
        assert not traffic.uploads


# -- memory ---------------------------------------------------------------------------------


class OnCard:
    """The tensors of a module without memory, made on the card when they are read, as a file's are
    copied to it."""

    def __init__(self, module: Any) -> None:
        self._sizes = {name: each.shape for name, each in module.state_dict().items()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sizes)

    def read(self, name: str) -> Dense:
        return Dense(torch.empty(self._sizes[name], dtype=DTYPE, device=CUDA))


QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
QWEN3_06B = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "most"),
    # Weights of fewer than 10 MB share segments, which stay while a part of them is in use.
    [(QWEN3_8B, 1.1), (QWEN3_4B, 1.1), (QWEN3_06B, 1.25)],
    ids=["8B", "4B", "0.6B"],
)
def test_loading_reserves_little_more_than_the_weights(sizes: dict[str, int], most: float) -> None:
    """Fused weights need larger blocks than the ones they are made of: what is freed is no use for
    the next layer's, and is to be given back."""
    config = Qwen3Config(
        num_hidden_layers=12, num_key_value_heads=8, head_dim=128, vocab_size=20_000, **sizes
    )
    with torch.device("meta"):
        module = Qwen3ForCausalLM(config).to(DTYPE)
    weights = sum(each.nbytes for each in module.state_dict().values())
    with fake_card(), memory_of_card() as memory:
        cache = KVCache(kv_shape(config, 64), DTYPE, CUDA)
        decoder = decoder_of(module, cache, source=OnCard(module), dtype=DTYPE)
        assert memory.used < 1.01 * weights + cache.kv_bytes
        assert memory.reserved < most * weights
        assert memory.most_reserved < 1.3 * weights
        assert decoder.weight_bytes <= memory.used


@pytest.mark.slow
def test_the_plan_counts_what_loading_allocates() -> None:
    """Target, draft and caches, within 5 %; the rest of a plan is set aside, not loaded."""
    context, counted, held = 4096, 0, list[Any]()
    common = {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 128}
    configs = [Qwen3Config(**common, **sizes) for sizes in (QWEN3_8B, QWEN3_06B)]
    configs[1].tie_word_embeddings = True
    with torch.device("meta"):
        modules = [Qwen3ForCausalLM(config) for config in configs]
    with fake_card(), memory_of_card() as memory:
        while modules:
            module = modules.pop()
            shape = shape_from_config(module.config.to_dict(), "a model")
            cache = KVCache(kv_shape(module.config, context), DTYPE, CUDA)
            held.append(decoder_of(module, cache, source=OnCard(module), dtype=DTYPE))
            counted += sum(shape.loaded_bytes("bf16", "bf16", context, "cuda"))
        assert abs(memory.used - counted) < 0.05 * counted


@pytest.mark.slow
@pytest.mark.parametrize("context", [8192, 131072])
def test_the_plan_counts_what_reading_a_prompt_takes(context: int) -> None:
    """Of a long one the mask is the most."""
    config = Qwen3Config(
        num_hidden_layers=1, num_key_value_heads=8, head_dim=128, vocab_size=64,
        max_position_embeddings=context, **QWEN3_8B,
    )  # fmt: skip
    with torch.device("meta"):
        module = Qwen3ForCausalLM(config)
    room = Room("cuda", 24 * 2**30)
    shape = shape_from_config(config.to_dict(), "a model")
    model = Model("m", known_shape=shape)
    planned = bytes_of(Arrangement(model, "bf16", context), room).activations
    planned -= CUBLAS_WORKSPACE_BYTES
    with fake_card(), memory_of_card() as memory:
        cache = KVCache(kv_shape(config, context), DTYPE, CUDA)
        decoder = decoder_of(module, cache, source=OnCard(module), dtype=DTYPE)
        decoder.cache.tokens.extend([0] * (context - PREFILL_CHUNK))
        held = memory.most_used = memory.used
        decoder.forward(range(PREFILL_CHUNK), num_logits=1)
        assert 0.8 * planned < memory.most_used - held < 1.2 * planned


def test_the_plan_counts_the_weights_in_nf4_that_a_long_piece_unpacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of gate and up, which are one product, are not unpacked at once."""
    bitsandbytes()
    ops = torch.ops.bitsandbytes
    kernel = import_module("bitsandbytes.backends.default.ops")._gemm_4bit_default_impl
    monkeypatch.setattr(ops, "gemm_4bit", SimpleNamespace(default=kernel))  # as for many rows
    num_in, num_out = QWEN3_8B["hidden_size"], 2 * QWEN3_8B["intermediate_size"]
    shape = shape_from_config({**Qwen3Config(**QWEN3_8B).to_dict()}, "a model")
    model = Model("m", known_shape=shape)
    full, quantised = (
        bytes_of(Arrangement(model, precision, 8192), Room("cuda", 24 * 2**30)).activations
        for precision in ("bf16", "4-bit")
    )
    with fake_card(), memory_of_card() as memory, torch.inference_mode():
        packed = torch.empty(num_in * num_out // 2, 1, dtype=torch.uint8, device=CUDA)
        scales = torch.empty(num_in * num_out // BLOCK, device=CUDA)
        layer = Nf4Linear(packed, scales, (num_out, num_in), None)
        rows = torch.empty(PREFILL_CHUNK, num_in, dtype=DTYPE, device=CUDA)
        held = memory.most_used = memory.used
        made = layer(rows)
        assert made.shape == (PREFILL_CHUNK, num_out)
        taken = memory.most_used - held - made.nbytes
        assert taken <= quantised - full <= 1.3 * taken


def folder_in_groups(folder: Path, is_gguf: bool) -> Path:
    """Packed as AWQ, or a GGUF file in Q4_K with some layers in Q6_K, as Q4_K_M is."""
    if not is_gguf:
        pack, settings, _ = LAYOUTS["awq"]
        packed_folder(folder, pack, settings, tiny_qwen("qwen3"))
        return folder
    shape = {**tiny_qwen("qwen3").config.to_dict(), "intermediate_size": 256}
    module = Qwen3ForCausalLM(Qwen3Config(**shape))
    others = {"down_proj": "Q6_K", "v_proj": "Q6_K"}
    write_gguf(folder / "m.gguf", module, "Q4_K", "qwen3", VOCABULARY, others)
    return opened_gguf(folder / "m.gguf", folder)


@pytest.mark.slow
@pytest.mark.parametrize("is_gguf", [False, True], ids=["awq", "gguf"])
def test_weights_that_are_published_in_4_bits_stay_in_them(is_gguf: bool, tmp_path: Path) -> None:
    folder = folder_in_groups(tmp_path, is_gguf)
    planned, _ = shape_from_folder(folder).loaded_bytes("4-bit", "bf16", 64, "cuda")
    with fake_card() as traffic, torch.inference_mode():
        decoder = load_model(folder, DTYPE, CUDA, 64, bits=4).model
        assert isinstance(decoder, Decoder)
        assert decoder.weight_bytes == pytest.approx(planned, rel=0.05)
        assert all(isinstance(each, Int4Linear) for each in layers_of(decoder))
        traffic.clear()
        assert decoder.forward(range(6)).device == CUDA and not traffic.reads


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_with_the_head_in_4_bits_no_table_is_left_in_full_precision(is_tied: bool) -> None:
    bitsandbytes()
    sizes = {"vocab_size": 8192, "tie_word_embeddings": is_tied}
    config = {**tiny_qwen("qwen3").config.to_dict(), **sizes}
    module = Qwen3ForCausalLM(Qwen3Config(**config))
    shape = shape_from_config(module.config.to_dict(), "a model")
    table = shape.vocab_size * shape.hidden_size
    with fake_card() as traffic, memory_of_card() as memory, torch.inference_mode():
        cache = KVCache(kv_shape(module.config, 64), DTYPE, CUDA)
        whole = decoder_of(module, cache, source=OnCard(module), dtype=DTYPE).weight_bytes
        held = memory.most_used = memory.used
        decoder = decoder_of(module, cache, source=OnCard(module), dtype=DTYPE, quantises_ends=True)
        loading = shape.loading_bytes("4-bit-head", "bf16", "cuda")
        assert memory.most_used - held <= decoder.weight_bytes + loading + table // 8
        saved = whole - decoder.weight_bytes
        assert saved == shape.weight_bytes("4-bit") - shape.weight_bytes("4-bit-head")
        assert saved == (1 if is_tied else 2) * (2 * table - 0.5625 * table)
        traffic.clear()
        rows = decoder.embed(torch.arange(5, device=CUDA))
        assert (rows.shape, rows.dtype, rows.device) == ((5, shape.hidden_size), DTYPE, CUDA)
        assert decoder.forward(range(6)).shape == (6, shape.vocab_size)
        assert not traffic.reads


def test_a_card_that_does_not_compute_in_bf16_keeps_no_groups(tmp_path: Path) -> None:
    shape = shape_from_folder(folder_in_groups(tmp_path, is_gguf=False))
    assert shape.count_in_groups("cuda", "bf16") == shape.linear_params
    assert not shape.count_in_groups("cuda", "fp16") and not shape.count_in_groups("mps", "bf16")
    half = shape.weight_bytes("4-bit", "fp16", "cuda")
    assert half - shape.weight_bytes("4-bit", "bf16", "cuda") == pytest.approx(
        shape.quantised_bytes("4-bit") - 0.625 * shape.linear_params, abs=1
    )


@pytest.mark.slow
def test_the_path_over_transformers_uploads_without_a_wait_too() -> None:
    with fake_card(number=0.9) as traffic:
        module = fake_module(target_module(), DTYPE)
        target = CausalLM(module, KVCache(kv_shape(module.config, 64), DTYPE, CUDA))
        for sampling in (GREEDY, SAMPLED):
            for _ in rounds_of("ngram", Parts(target), sampling, traffic):
                assert not traffic.uploads and sum(traffic.reads.values()) <= FEWER["ngram"]
