"""Drafts from the tokens of a person's own replies: which tokens, and that no reply changes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch

from localspec.core.decoding import OFF
from localspec.drafters import draft_vocabulary
from localspec.drafters.draft_vocabulary import chosen, refusal_of_size
from localspec.drafters.parts import Parts
from localspec.drafters.registry import REGISTRY
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder, narrowed
from localspec.forward.graphs import CapturedDecoder
from localspec.forward.output_head import DraftVocabulary, OutputHead
from tests.drafters.stages import (
    LENGTH,
    NAMES,
    PROMPT,
    WARPS,
    build,
    lent_parts,
    place_of,
    plain_reply,
    plain_text,
    tensors_of,
)
from tests.kit.tiny import (
    VOCAB_SIZE,
    Plans,
    agreeing_draft,
    play,
    tiny_llama,
    with_cache,
    with_plain_cache,
)
from tests.kit.tracing import TracingPool

NARROWED = tuple(name for name in NAMES if REGISTRY[name].needs in ("draft", "head"))
CPU = torch.device("cpu")

# -- which tokens -------------------------------------------------------------------------------


def replies_covering(share: float) -> list[list[int]]:
    """Ten replies of 1,000 tokens; of the last one this share stands in those before it."""
    num_known = round(1_000 * share)
    return [list(range(1_000))] * 9 + [[*range(num_known), *range(5_000, 6_000 - num_known)]]


@pytest.mark.parametrize(("share", "words"), [(0.96, "96.0 %"), (0.969, "96.9 %"), (0.97, None)])
def test_earlier_replies_must_cover_the_latest_ones(share: float, words: str | None) -> None:
    choice = chosen(replies_covering(share), (), 50_000)
    assert bool(choice.ids) == (words is None)
    if words is not None:
        assert f"cover {words} of the latest ones, and 97% are needed" in choice.reason


def test_the_tokens_are_the_most_frequent_ones_and_those_of_every_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_vocabulary, "MOST_COUNTED", 100)
    rare = [[*range(500)], *[[*range(300, 399)] * 20] * 12, [399] * 3]
    ids = chosen(rare, (7_000, 49_999, 50_001), 50_000).ids
    assert list(ids) == sorted(set(ids)) and len(ids) % 64 == 0
    assert {*range(300, 400), 7_000, 49_999} <= set(ids)
    filled_up = set(ids) - {*range(300, 400), 7_000, 49_999}
    assert filled_up == set(range(len(filled_up))), "the lowest others make whole blocks"


def test_nothing_is_chosen_where_it_says_little_or_saves_little() -> None:
    assert "too few replies" in chosen([], (), 50_000).reason
    assert "too few replies" in chosen([[1] * 999] * 10, (), 50_000).reason
    assert chosen([[1] * 1_000] * 10, (), 50_000).ids
    assert not chosen([list(range(1_000))] * 10, (), 2_000).ids, "more than half of them"
    assert chosen([list(range(1_000))] * 10, (), 2_048).ids
    assert refusal_of_size(32_767) and not refusal_of_size(32_768)


# -- drafting -----------------------------------------------------------------------------------


def own_tokens() -> tuple[int, ...]:
    """Half of the tokens of the tiny target, most of its replies' among them."""
    replies = [plain_text(), *(plain_reply(warp, 0) for warp in ("plain", "all"))]
    written = dict.fromkeys(token for reply in replies for token in reply)
    others = (token for token in range(VOCAB_SIZE) if token not in written)
    return tuple(sorted([*written, *others][: VOCAB_SIZE // 2]))


class OffByOne(DraftVocabulary):
    """A fault: every output stands for the token after its own."""

    def narrowed(self, head: OutputHead, device: torch.device) -> OutputHead:
        right = super().narrowed(head, device)
        if right is head or right.ids is None:
            return right
        return replace(right, ids=(right.ids + 1) % VOCAB_SIZE)


@cache
def engine_with(name: str, kind: type[DraftVocabulary]) -> Engine:
    vocabulary = kind(own_tokens())
    parts = replace(lent_parts((name,), tiny_llama, 256), vocabulary=vocabulary)
    if parts.draft is not None:
        parts = replace(parts, draft=narrowed(parts.draft, vocabulary))
    return Engine(parts.target, {name: build(name, parts)})


def played(engine: Engine, name: str, length: int, warp: str = "greedy") -> Plans:
    """The rounds of a reply, which is that of plain decoding."""
    policy = Plans((name, length))
    engine.target.cache.rollback(0)
    sampling = replace(WARPS[warp], seed=0)
    reply = play(engine, PROMPT, policy, LENGTH, sampling)
    assert tuple(reply.tokens) == plain_reply(warp, 0, LENGTH)
    return policy


@pytest.mark.parametrize("name", NARROWED)
@pytest.mark.parametrize("warp", ["plain", "all"])
def test_the_reply_is_the_targets_own(name: str, warp: str) -> None:
    policy = played(engine_with(name, DraftVocabulary), name, 4, warp)
    guessed = {token for proposal in policy.proposals for token in proposal.tokens}
    if name != "chained":  # The lookup copies any token.
        assert guessed and guessed <= set(own_tokens())


@pytest.mark.parametrize("name", NARROWED)
def test_a_map_that_is_off_by_one_loses_what_a_right_one_keeps(name: str) -> None:
    def accepted(engine: Engine) -> int:
        return sum(step.num_accepted_tokens for step in played(engine, name, 15).steps)

    parts = lent_parts((name,), tiny_llama, 256)
    whole = Engine(parts.target, {name: build(name, parts)})
    right, wrong = engine_with(name, DraftVocabulary), engine_with(name, OffByOne)
    assert accepted(right) >= accepted(whole) > accepted(wrong)


@pytest.mark.parametrize("name", NARROWED)
def test_logits_are_those_of_the_whole_head_and_of_no_other_token(name: str) -> None:
    parts = lent_parts((name,), tiny_llama, 256)
    whole: OutputHead | None = build(name, parts).output
    part: OutputHead | None = engine_with(name, DraftVocabulary).drafters[name].output
    assert whole is not None and part is not None
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    ids = list(own_tokens())
    assert torch.equal(part(rows)[:, ids], whole(rows)[:, ids])
    others = [token for token in range(VOCAB_SIZE) if token not in ids]
    assert bool(part(rows)[:, others].isneginf().all())


@pytest.mark.parametrize("name", NARROWED)
def test_the_bytes_of_the_rows_are_counted(name: str) -> None:
    engine = engine_with(name, DraftVocabulary)
    own = {place_of(tensor) for tensor in tensors_of(engine.target)}
    drafter = engine.drafters[name]
    held = {
        place_of(tensor): tensor.numel() * tensor.element_size()
        for tensor in tensors_of(drafter)
        if place_of(tensor) not in own
    }
    rows = drafter.output.layer.weight_bytes  # type: ignore[attr-defined]
    assert drafter.memory_bytes >= sum(held.values()) > rows > 0


def test_the_whole_head_of_a_draft_model_is_freed() -> None:
    model = with_cache(tiny_llama())
    whole = weakref.ref(model.weights.head)
    part = narrowed(model, DraftVocabulary(own_tokens()))
    del model
    gc.collect()
    assert part.vocab_size == VOCAB_SIZE and whole() is None


def test_without_room_for_rows_drafts_choose_among_all_tokens() -> None:
    asked = list[int]()

    def has_room(num_bytes: int, device: torch.device) -> bool:
        asked.append(num_bytes)
        return False

    vocabulary = DraftVocabulary(own_tokens(), has_room=has_room)
    head = with_cache(tiny_llama()).weights.output
    assert vocabulary.narrowed(head, CPU) is head
    assert asked == [head.layer.weight_bytes // 2]
    assert vocabulary.note(head).startswith("chooses among all tokens: There is no room")


def test_heads_that_borrow_one_layer_share_its_rows() -> None:
    vocabulary = DraftVocabulary(own_tokens())
    head = with_cache(tiny_llama()).weights.output
    first, second = vocabulary.narrowed(head, CPU), vocabulary.narrowed(head, CPU)
    assert first.layer is second.layer
    assert vocabulary.note(first) == f"chooses among {VOCAB_SIZE // 2} of {VOCAB_SIZE} tokens"


def test_a_copied_token_that_the_draft_model_does_not_know_is_kept() -> None:
    """The lookup judges what the model cannot."""
    rest = tuple(token for token in own_tokens() if token not in PROMPT)
    parts = replace(lent_parts(("chained",), tiny_llama, 256), vocabulary=DraftVocabulary(rest))
    assert parts.draft is not None
    parts = Parts(parts.target, narrowed(parts.draft, parts.vocabulary))
    engine = Engine(parts.target, {"chained": build("chained", parts)})
    policy = Plans(("chained", 4))
    play(engine, PROMPT, policy, 4)
    copied = policy.proposals[0]
    assert copied.tokens[: len(PROMPT) - 6] and copied.tokens[0] in PROMPT


def test_captured_steps_hold_the_rows_that_were_taken() -> None:
    """Of draft model and heads, as on a GPU: what is captured gives the target's own reply."""
    pool, vocabulary = TracingPool(), DraftVocabulary(own_tokens())
    draft = narrowed(with_plain_cache(agreeing_draft(tiny_llama()), 64), vocabulary)
    assert isinstance(draft, Decoder)
    parts = Parts(
        with_plain_cache(tiny_llama(), 64),
        CapturedDecoder(draft, pool),
        pool=pool,
        draft_pool=pool,
        vocabulary=vocabulary,
    )
    drafters = {name: build(name, parts) for name in ("draft_model", "mtp")}
    engine = Engine(parts.target, drafters)
    for is_captured in (False, True):
        for name in drafters:
            before = pool.num_replays
            played(engine, name, 4)
            assert (pool.num_replays > before) is is_captured
        for capturing in engine.captures:
            assert is_captured or [*capturing.capture()]
            assert capturing.notice is None


def test_plain_decoding_knows_all_tokens() -> None:
    """The target's own head is never narrowed."""
    engine = engine_with("mtp", DraftVocabulary)
    policy = Plans((OFF, 0))
    engine.target.cache.rollback(0)
    assert tuple(play(engine, PROMPT, policy, LENGTH).tokens) == plain_text()
