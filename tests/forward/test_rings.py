"""A layer with a window holds its newest positions in a ring, and its model says what it would say
with every position: at every length around the window and the ring's ends, however a text is read,
after rejections, edits and new turns, captured or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from localspec.core.decoding import DraftPlan, SamplingParams
from localspec.drafters.chunk import ChunkedDraft
from localspec.drafters.drafting import Drafting
from localspec.engine.engine import Engine
from localspec.forward import snapshots
from localspec.forward.cache import KEY_BLOCK, STRETCH, KVCache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.one_width import OneWidthDecoder
from localspec.forward.passes import Rows, forward_together
from localspec.forward.row_check import has_invariant_rows
from localspec.weights.precision import Precision
from tests.kit.decoders import weights_of
from tests.kit.families import small
from tests.kit.tiny import CPU, GREEDY, Plans, play, turn_of, with_cache, with_plain_cache
from tests.kit.tracing import TracingPool, UncapturedPool

CLOSENESS = 1e-5  # of all logits, by their norm
WINDOW = 6
RING = 512  # slots of a ring for WINDOW positions
CAPACITY = 1060
SHARED = "gemma4, keys of earlier layers"
FAMILIES = ("gemma3_text", "gemma4", "gemma4, values from keys", "gemma4, experts beside", SHARED,
            "gpt_oss", "cohere2", "olmo3")  # fmt: skip
TEXT = tuple((7 * place + place * place // 3 + 3) % 47 + 1 for place in range(1040))
TREE = (-1, 0, 0, 1, 2, 2, -1)
PATHS = ((0, 1, 3), (0, 2, 4), (0, 2, 5), (6,))  # of TREE, from the root to a leaf
SAMPLED = SamplingParams(0.9, seed=3)
pytestmark = pytest.mark.slow
MAKERS = {"processor": with_cache, "plain cache": with_plain_cache}


@cache
def module(family: str = "gemma4", window: int = WINDOW) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    made = small(family, max_position_embeddings=2048, sliding_window=window, **sizes)
    made.set_attn_implementation("eager")
    return made


@cache
def logits_of_transformers(family: str, window: int = WINDOW) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([TEXT])
        logits: torch.Tensor = module(family, window)(input_ids=ids, use_cache=False).logits[0]
    return logits


def decoder(family: str = "gemma4", make: Callable[..., Decoder] = with_cache) -> Decoder:
    return make(module(family), CAPACITY)


def like_a_gpu() -> Decoder:
    """A decoder over a cache as a GPU has it, with spare slots for padded widths."""
    weights = weights_of(module(), Precision(torch.float32, CPU), CAPACITY)
    shape = kv_shape_of(weights, CAPACITY)
    return Decoder(weights, KVCache(shape, torch.float32, CPU, num_spare=16))


def read(model: Decoder, tokens: Sequence[int], ends: Sequence[int]) -> torch.Tensor:
    """Return the logits of `tokens` after what is held, read in pieces that end at `ends`."""
    start = model.cache.length
    bounds = [0, *(end - start for end in ends if start < end < start + len(tokens)), len(tokens)]
    return torch.cat([model.forward(tokens[first:end]) for first, end in pairwise(bounds)])


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).norm()) <= CLOSENESS * float(wanted.norm())


def ring_sizes(model: Decoder) -> set[int]:
    every = {pair[0].shape[2] for pair in model.cache.slots}
    return every - {model.cache.num_slots}


# -- logits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_longer_than_the_ring_gives_the_logits_of_transformers(
    family: str, make: Callable[..., Decoder]
) -> None:
    """A prompt whose second piece is as long as a ring, then single rows and drafts."""
    model, wanted = decoder(family, make), logits_of_transformers(family)
    assert ring_sizes(model), "nothing is shown without a ring"
    ends = [8, 520, *range(521, 525), *range(530, 550, 7), *range(760, 780, 13), 1020, 1027, 1029]
    assert_equal(read(model, TEXT, ends), wanted)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("window", [1, 255, 256, 257, 600])
def test_windows_around_the_spare_and_longer_than_a_piece(
    window: int, make: Callable[..., Decoder]
) -> None:
    model = make(module("gemma4", window), CAPACITY)
    unit = KEY_BLOCK if model.cache.has_key_blocks else STRETCH
    assert ring_sizes(model) == {window + 256 + -(window + 256) % unit}
    wanted = logits_of_transformers("gemma4", window)
    assert_equal(read(model, TEXT, [512, 1024, 1025, 1030, 1046]), wanted)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("length", [*range(5, 8), *range(RING - 1, RING + 2), 2 * RING - 1])
def test_rows_of_every_width_at_the_ends_of_window_and_ring(
    length: int, make: Callable[..., Decoder]
) -> None:
    model, wanted = decoder(make=make), logits_of_transformers("gemma4")
    read(model, TEXT[:length], range(512, 1024, 512))
    for width in range(1, 17):
        assert_equal(model.forward(TEXT[length:][:width]), wanted[length:][:width])
        model.cache.rollback(length)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("width", [2, 5, 16])
def test_a_draft_that_is_rejected_at_any_place_of_a_lap_leaves_nothing(
    width: int, make: Callable[..., Decoder]
) -> None:
    model, wanted = decoder(make=make), logits_of_transformers("gemma4")
    read(model, TEXT[: RING - width], [])
    for num_accepted in (*range(1, width + 1), *range(1, width + 1)):
        base = model.cache.length
        draft = [*TEXT[base : base + num_accepted], *[5] * width][:width]
        model.forward(draft)
        model.cache.keep(base, range(num_accepted))
        place = base + num_accepted
        assert_equal(model.forward([TEXT[place]])[0], wanted[place])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("family", ["gemma4", SHARED])
@pytest.mark.parametrize("short", [0, 2, 5, 8])
def test_a_tree_across_the_end_of_a_ring(
    short: int, family: str, make: Callable[..., Decoder]
) -> None:
    """Each of its paths gives the logits of its chain, before and after a path is kept."""
    model, nodes = decoder(family, make), [9, 4, 3, 2, 8, 6, 7]
    (ring,) = ring_sizes(model)
    before = TEXT[: ring - short]
    read(model, before, [512])
    found = model.forward(nodes, TREE)
    for path in PATHS:
        model.cache.rollback(len(before))
        chain = model.forward([nodes[node] for node in path])
        assert_equal(found[list(path)], chain)
        after = model.forward([11, 12])
        model.cache.rollback(len(before))
        model.forward(nodes, TREE)
        model.cache.keep(len(before), path)
        assert_equal(model.forward([11, 12]), after)
        model.cache.rollback(len(before))


# -- bits on this processor -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in FAMILIES),
        *((family, torch.bfloat16) for family in ("gemma3_text", SHARED, "gpt_oss", "cohere2")),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_however_a_text_is_read(family: str, dtype: torch.dtype) -> None:
    weights = weights_of(module(family), Precision(dtype, CPU), CAPACITY)
    shape = kv_shape_of(weights, CAPACITY)
    model = Decoder(weights, KVCache(shape, dtype, CPU, has_key_blocks=True))
    if not has_invariant_rows(model):
        pytest.skip("here its linear layers give a row other bits beside others")
    whole = read(model, TEXT, [512, 1024])
    widths = [500, 1, 2, 3, 5, 8, 13, 16, 200, 250, 9, 1, 1, 4, 16]
    for ends in ([*accumulate(widths)], [*range(300, 1100, 300)]):
        model.cache.rollback(0)
        assert torch.equal(read(model, TEXT, ends), whole)


def test_sequences_that_run_together_keep_their_rings() -> None:
    first, wanted = decoder(), read(decoder(), TEXT, [512, 1024])
    second = first.beside()
    read(first, TEXT[:600], [512])
    read(second, TEXT[:505], [])
    parts = [Rows(first, TEXT[600:609]), Rows(second, TEXT[505:540])]
    found = forward_together(parts)
    assert torch.equal(found[0], wanted[600:609]) and torch.equal(found[1], wanted[505:540])


# -- going back -------------------------------------------------------------------------------


def num_rows_read(monkeypatch: pytest.MonkeyPatch, model: Decoder) -> list[int]:
    """Return the rows of each forward from now on."""
    sizes, embed = list[int](), model.embed
    monkeypatch.setattr(model, "embed", lambda ids: sizes.append(len(ids)) or embed(ids))
    return sizes


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_text_goes_back_within_the_spare_and_reads_again_beyond_it(
    make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = decoder(make=make), logits_of_transformers("gemma4")
    read(model, TEXT[:1000], [512])
    sizes = num_rows_read(monkeypatch, model)
    shortest = 1000 - RING + WINDOW - 1
    for length, num_read in ((shortest, 2), (shortest - 1, shortest + 1), (3, 2), (0, 2)):
        del sizes[:]
        model.cache.rollback(length)
        assert_equal(model.forward(TEXT[length : length + 2]), wanted[length : length + 2])
        assert sum(sizes) == num_read, length


def test_later_turns_read_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second turn, a regenerated reply, an edit far behind the spare and a branch from there,
    with the reply that each has afresh."""
    model = decoder()
    engine, sizes = Engine(model, {}), num_rows_read(monkeypatch, model)

    def reply_of(prompt: Sequence[int], num_tokens: int, num_new: int | None = None) -> list[int]:
        del sizes[:]
        sequence = engine.start(tuple(prompt), SAMPLED, num_tokens, frozenset())
        engine.prefill(sequence, threading.Event())
        assert num_new is None or sum(sizes) == num_new
        reply = play(engine, tuple(prompt), Plans(("off", 0)), num_tokens, SAMPLED).tokens
        assert reply == play(Engine(decoder(), {}), tuple(prompt), Plans(("off", 0)), num_tokens,
                             SAMPLED).tokens  # fmt: skip
        return reply

    first = reply_of(TEXT[:100], 20)
    second = reply_of([*first, 4, 8, *TEXT[100:700]], 12, 602)
    assert reply_of([*first, 4, 8, *TEXT[100:700]], 12, 0) == second
    reply_of([*first, 9, 2, 5], 12, 3)  # the end of the first reply stands as a snapshot
    reply_of([*TEXT[:95], 7, 7], 12, 1)  # which reaches back a little, to the first prompt's end
    reply_of([*second, 4], 12, len(second) - 95)  # of the text only the first 95 were the same


def test_long_prompts_are_held_at_places_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.forward.cache.SNAPSHOT_EVERY", 256)
    model, wanted = decoder(), logits_of_transformers("gemma4")
    read(model, TEXT, range(128, 1024, 128))
    assert model.cache.reuse_read((*TEXT[:400], 1, 2, 3)) == 256
    assert_equal(read(model, TEXT[256:500], []), wanted[256:500])


def test_a_snapshot_goes_back_as_far_as_it_holds_windows() -> None:
    """A few lengths before its own, fewer where the ring itself stood at the end of its reach."""
    model, wanted = decoder(), logits_of_transformers("gemma4")
    shortest = 1000 - RING + WINDOW - 1
    read(model, TEXT[:400], [])
    model.cache.hold()
    read(model, TEXT[400:1000], [700])
    model.cache.rollback(shortest + 4)
    model.cache.hold()
    for length in (400, 368, shortest + 4, shortest, shortest - 1, 399):
        model.cache.reuse(TEXT[: shortest + 4])
        read(model, TEXT[model.cache.length : 1000], [700])
        model.cache.rollback(length)
        assert_equal(model.forward(TEXT[length : length + 1]), wanted[length : length + 1])


def test_what_two_texts_share_is_held_for_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a system prompt: of a third text only what follows it is read."""
    model = decoder()
    engine, sizes = Engine(model, {}), num_rows_read(monkeypatch, model)
    system = TEXT[:140]
    for number, num_read in enumerate((959, 959, 819)):
        del sizes[:]
        prompt = (*system, number, *TEXT[141:960])
        sequence = engine.start(prompt, GREEDY, 4, frozenset())
        engine.prefill(sequence, threading.Event())
        assert sum(sizes) == num_read
    fresh = decoder()
    read(fresh, prompt[:-1], [512])
    assert torch.equal(model.forward([prompt[-1]]), fresh.forward([prompt[-1]]))


def test_copies_take_bounded_memory_and_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    model.cache.hold()  # of nothing
    read(model, TEXT[:400], [])
    model.cache.hold()
    monkeypatch.setattr(snapshots, "MOST_SNAPSHOT_BYTES", 1)
    read(model, TEXT[400:1000], [512])
    model.cache.hold()
    assert model.cache.reuse(TEXT[:590]) == 590, "the ring itself reaches so far"
    assert model.cache.reuse(TEXT[:400]) == 0, "the copy at 400 was let go of"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_after_a_failed_forward_the_text_is_read_on(
    make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted = decoder(make=make), logits_of_transformers("gemma4")
    read(model, TEXT[:505], [])
    with monkeypatch.context() as patched:
        patched.setattr("localspec.forward.decoder.last_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.forward([5] * 512)
    assert_equal(model.forward(TEXT[505:520]), wanted[505:520])


def test_no_number_stays_beyond_the_end_of_a_ring() -> None:
    model, wanted = like_a_gpu(), logits_of_transformers("gemma4")
    read(model, TEXT[:600], [512])
    model.forward([1] * 16)
    for _, values in model.cache.slots:
        for place in range(600, 616):
            values[:, :, place % values.shape[2]] = float("nan")
    model.cache.rollback(600)
    model.cache.zero_beyond()
    assert not any(bool(part.isnan().any()) for pair in model.cache.slots for part in pair)
    assert_equal(model.forward(TEXT[600:610]), wanted[600:610])


# -- drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "0.9"])
def test_drafts_change_no_reply_across_the_end_of_a_ring(sampling: SamplingParams) -> None:
    from localspec.drafters.parts import Parts
    from localspec.loading.drafters import build_drafters

    prompt = TEXT[:490]
    wanted = play(Engine(decoder(), {}), prompt, Plans(("off", 0)), 50, sampling).tokens
    target, draft = decoder(), decoder("gemma3_text")
    drafters, _ = build_drafters(Parts(target, draft), print)
    names = ("ngram", "draft_model", "early_exit", "self_quant", "chained")
    assert {*names} <= drafters.keys()
    plans = Plans(*((name, 4 + 3 * place) for place, name in enumerate(names)))
    assert play(Engine(target, drafters), prompt, plans, 50, sampling).tokens == wanted
    assert {step.drafter for step in plans.steps} >= {"draft_model", "early_exit", "self_quant"}


# -- fixed shapes and graphs ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CapturedDecoder, OneWidthDecoder])
def test_captured_steps_of_a_ring_give_the_logits_of_transformers(
    kind: type[CapturedDecoder],
) -> None:
    """A width with padded rows, at the end of each lap and of the context."""
    model, wanted = kind(like_a_gpu(), TracingPool()), logits_of_transformers("gemma4")
    assert list(model.capture()) and model.notice is None
    pool = model._store.pool
    assert isinstance(pool, TracingPool)
    for length in (3, RING - 9, RING, 2 * RING - 3):
        model.cache.rollback(0)
        read(model, TEXT[:length], [512, 1024])
        before, place = pool.num_replays, length
        for width in (1, 7, 3):
            assert_equal(model.forward(TEXT[place:][:width]), wanted[place:][:width])
            place += width
        model.forward([5] * 7)  # a draft that is rejected
        model.cache.rollback(place)
        assert_equal(model.forward(TEXT[place:][:2]), wanted[place:][:2])
        assert pool.num_replays >= before + 4, "the graphs were not used"


@pytest.mark.parametrize("kind", [CapturedDecoder, OneWidthDecoder])
def test_padded_rows_of_a_captured_width_count_as_written(kind: type[CapturedDecoder]) -> None:
    """They overwrite what the shortest length would see that could be gone to without them."""
    model, wanted = kind(like_a_gpu(), TracingPool()), logits_of_transformers("gemma4")
    assert list(model.capture())
    read(model, TEXT[:600], [512])
    model.forward(TEXT[600:613])
    length = 613 - RING + WINDOW - 1
    for _ in range(2):  # at last from its start, which is read before
        model.cache.rollback(length)
        assert_equal(model.forward(TEXT[length : length + 13]), wanted[length : length + 13])
        read(model, TEXT[length + 13 : 613], [])
        length = 3


def test_with_one_width_a_row_has_its_bits_in_every_window_of_a_ring() -> None:
    """Beyond the ring's end the keys are those of the ring, before it those of a short window."""
    found, tokens = list[torch.Tensor](), TEXT[: RING + 40]
    for widths in ((1,), (3, 16, 5)):
        model = OneWidthDecoder(like_a_gpu(), TracingPool())
        model.forward(tokens[: RING - 20])
        rows = list[torch.Tensor]()
        while model.cache.length < len(tokens):
            width = widths[len(rows) % len(widths)]
            rows.append(model.forward(tokens[model.cache.length :][:width]))
        found.append(torch.cat(rows))
    assert torch.equal(*found)


def test_with_one_width_a_later_turn_goes_on_at_the_end_of_whole_pieces() -> None:
    """Which lies behind what the ring can go back to."""
    model, fresh = (OneWidthDecoder(like_a_gpu(), TracingPool()) for _ in "ab")
    engine, prompt = Engine(model, {}), (*TEXT[:560], 4, 8, *TEXT[562:601])
    engine.prefill(engine.start(TEXT[:601], GREEDY, 4, frozenset()), threading.Event())
    while model.cache.length < 1020:
        model.forward(TEXT[model.cache.length :][:16])
    assert model.cache.reuse_read(prompt) == 512
    again = play(engine, prompt, Plans(("off", 0)), 12, SAMPLED)
    assert again.tokens == play(Engine(fresh, {}), prompt, Plans(("off", 0)), 12, SAMPLED).tokens


def test_with_one_width_no_more_is_reused_than_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the last whole piece is not, after its snapshot was let go of."""
    monkeypatch.setattr(snapshots, "MOST_SNAPSHOTS", 1)
    model = OneWidthDecoder(like_a_gpu(), TracingPool())
    engine = Engine(model, {})
    engine.prefill(engine.start(TEXT[:601], GREEDY, 4, frozenset()), threading.Event())
    while model.cache.length < 1020:
        model.forward(TEXT[model.cache.length :][:16])
    assert model.cache.reuse_read((*TEXT[:575], 4, 8)) == 0


@pytest.mark.parametrize("num_kept", [1, 8])
def test_a_chunk_that_drafts_across_a_lap(num_kept: int) -> None:
    """Its tokens are those of single steps, and tokens that a rule drops were written."""
    model, wanted = like_a_gpu(), logits_of_transformers("gemma4")
    sequence = turn_of(TEXT[:RING], vocab_size=model.vocab_size)
    read(model, TEXT[: RING - 3], [])
    plan = DraftPlan("d", 8, keep_drafting=lambda place, _: place + 1 < num_kept)
    draft = Drafting(sequence, plan, model.vocab_size)
    ChunkedDraft(model, model.vocab_size, UncapturedPool()).draft_on(draft)
    single, expected = like_a_gpu(), list[int]()
    logits = read(single, TEXT[:RING], [500])[-1:]
    for _ in range(num_kept):
        expected.append(int(logits.argmax()))
        logits = single.forward(expected[-1:])
    assert draft.tokens == expected
    model.cache.rollback(RING)
    read(model, TEXT[RING:600], [])
    draft = Drafting(turn_of(TEXT[:601], vocab_size=model.vocab_size), plan, model.vocab_size)
    ChunkedDraft(model, model.vocab_size, UncapturedPool()).draft_on(draft)
    length = model.cache.length - RING + WINDOW - 1
    model.cache.rollback(length)
    assert_equal(model.forward(TEXT[length : length + 1]), wanted[length : length + 1])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_cache_takes_the_bytes_of_its_rings(make: Callable[..., Decoder]) -> None:
    """Of the two layers with a window, and of the one without."""
    model = decoder(make=make)
    rounded = CAPACITY + -CAPACITY % KEY_BLOCK if model.cache.has_key_blocks else CAPACITY
    assert model.cache.kv_bytes == 2 * 2 * 4 * (2 * RING * 16 + rounded * 32)
    assert model.cache.another().kv_bytes == model.cache.kv_bytes
