"""The local backend: text, tokens, provenance and statistics of a turn agree, however it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from localspec.chat.local import LocalBackend
from localspec.chat.slots import Slot
from localspec.core.backend import Chunk, Message, Request
from localspec.core.decoding import (
    AUTO,
    OFF,
    TARGET,
    SamplingParams,
)
from localspec.core.errors import ContextOverflow, NumericsError, RequestError
from localspec.drafters.ngram import NgramDrafter
from localspec.drafters.parts import Parts
from localspec.engine.threads import RETRY_S, ROUNDS, Threads
from localspec.loading.drafters import slot_beside
from tests.kit.local_backend import END, HELLO, PIECES, SAY, ask, backend_of, text_of, writing
from tests.kit.tiny import TableModel, scripted, tiny_llama, with_cache


def check_consistent(chunks: list[Chunk]) -> None:
    """What every ending has in common."""
    tokens = [token for chunk in chunks for token in chunk.tokens]
    provenance = [name for chunk in chunks for name in chunk.provenance]
    steps = [chunk.step for chunk in chunks if chunk.step is not None]
    stats = chunks[-1].stats
    assert len(tokens) == len(provenance) == stats.num_output_tokens
    assert stats.num_accepted_tokens == sum(name != TARGET for name in provenance)
    assert stats.num_steps == len(steps)
    assert stats.num_output_tokens == sum(step.num_output_tokens for step in steps)
    assert stats.num_accepted_tokens == sum(step.num_accepted_tokens for step in steps)
    assert stats.num_draft_tokens == sum(step.num_draft_tokens for step in steps)
    assert stats.decode_ms == pytest.approx(sum(step.round_ms for step in steps))
    assert END not in tokens
    for chunk in chunks:
        if chunk.step is not None:
            assert len(chunk.tokens) == len(chunk.provenance) == chunk.step.num_output_tokens
            accepted = sum(name != TARGET for name in chunk.provenance)
            assert accepted == chunk.step.num_accepted_tokens
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is not None


def test_a_reply_to_its_end_of_text() -> None:
    chunks = ask(writing("ab", " x", "c"), drafter=OFF)
    check_consistent(chunks)
    assert text_of(chunks) == "ab xc"
    assert [chunk.phase for chunk in chunks] == ["prefill", *["decode"] * 4, "done"]
    assert chunks[-1].finish_reason == "eos"
    assert {name for chunk in chunks for name in chunk.provenance} == {TARGET}


@pytest.mark.parametrize("wrong_from", [0, 1, 2, 99])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_drafted_reply_has_the_same_text_and_names_its_drafter(
    wrong_from: int, length: int
) -> None:
    backend = writing("ab", " x", "c", "a", "y", "b", wrong_from=wrong_from)
    chunks = ask(backend, drafter="knowing", num_draft_tokens=length)
    check_consistent(chunks)
    assert text_of(chunks) == "ab xcayb"
    names = {name for chunk in chunks for name in chunk.provenance}
    assert ("knowing" in names) == (wrong_from > 0)


def measured(backend: LocalBackend, plain_ms: float) -> None:
    for width in (1, 8):
        backend.loaded.controller.costs.set_verify(width, 16, plain_ms)


def test_times_are_set_and_speedup_is_unknown_until_measured() -> None:
    backend = writing("a", "b")
    stats = ask(backend, drafter="knowing", num_draft_tokens=1)[-1].stats
    assert stats.speedup is None and stats.decode_speedup is None
    assert stats.prefill_ms is not None and stats.ttft_ms is not None
    assert 0 <= stats.prefill_ms <= stats.ttft_ms
    assert backend.describe().calibration is None
    measured(backend, stats.decode_ms / stats.num_steps)
    off = ask(backend, drafter=OFF)[-1]
    assert off.stats.speedup is None and off.stats.plain_decode_ms is None and not off.plain_ms


def test_a_reply_is_compared_as_a_whole_and_by_its_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rounds of a stand-in take microseconds, which scatter by more than a reply may.
    monkeypatch.setattr("localspec.controller.plain_baseline.UNSURE", float("inf"))
    backend = writing(*"abcabcabc")
    guess = {"drafter": "knowing", "num_draft_tokens": 3}
    rounds = [chunk.step for chunk in ask(backend, **guess) if chunk.step is not None]
    measured(backend, min(step.verify_ms for step in rounds))
    last = ask(backend, **guess)[-1]
    stats = last.stats
    assert stats.no_speedup is None, stats
    assert stats.plain_decode_ms == pytest.approx(sum(last.plain_ms))
    assert stats.reply_ms and stats.prefill_ms
    assert stats.reply_ms > stats.prefill_ms + stats.decode_ms, "text and hand-over count as well"
    assert stats.plain_decode_ms and stats.plain_reply_ms and stats.speedup
    kept_ms = stats.reply_ms - stats.decode_ms
    assert stats.plain_reply_ms == pytest.approx(kept_ms + stats.plain_decode_ms)
    assert stats.speedup == pytest.approx(stats.plain_reply_ms / stats.reply_ms)
    assert stats.decode_speedup == pytest.approx(stats.plain_decode_ms / stats.decode_ms)


@pytest.mark.parametrize("drafter", ["off", "knowing"])
def test_a_reply_goes_on_beyond_its_end_of_text_where_that_is_ignored(drafter: str) -> None:
    backend = writing("a", "b")
    chunks = ask(backend, drafter=drafter, max_tokens=9, ignores_end=True)
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert len(tokens) == 9 and END in tokens and chunks[-1].finish_reason == "length"
    assert backend.prompt_tokens(Request(HELLO)) == tuple(SAY[one] for one in HELLO[0].content)


def test_max_tokens_ends_the_reply() -> None:
    chunks = ask(writing("a", "b", "c", "a"), drafter="knowing", num_draft_tokens=4, max_tokens=3)
    check_consistent(chunks)
    assert text_of(chunks) == "abc" and chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(
    ("pieces", "stop", "left", "num_tokens"),
    [
        (("a", "STO", "P", "b"), "STOP", "a", 3),  # over two tokens
        (("c", "a", "b", "c", "y"), "abc", "c", 4),  # over three
        (("ab", "c", "y"), "bc", "a", 2),  # from the middle of one
        (("a", "\n", "\n", "y"), "\n\n", "a", 3),
        (("a", "\n", "b", "\n\n", "y"), "\n\n", "a\nb", 4),  # a false start before
    ],
)
def test_stop_strings_cut_text_tokens_and_numbers_alike(
    length: int, pieces: tuple[str, ...], stop: str, left: str, num_tokens: int
) -> None:
    backend = writing(*pieces)
    chunks = ask(backend, drafter="knowing", num_draft_tokens=length, stop=(stop,))
    check_consistent(chunks)
    assert text_of(chunks) == left
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].stats.num_output_tokens == num_tokens


def test_text_held_back_for_a_stop_that_never_comes_is_shown_at_the_end() -> None:
    chunks = ask(writing("a", "STO"), drafter=OFF, stop=("STOP",))
    assert text_of(chunks) == "aSTO" and chunks[-1].finish_reason == "eos"


def test_empty_stop_string_is_refused_before_anything_runs() -> None:
    backend = writing("a")
    with pytest.raises(RequestError, match="empty"):
        backend.generate(Request(HELLO, max_tokens=20, stop=("",)), threading.Event())
    assert target_of(backend).num_forwards == 0


def target_of(backend: LocalBackend) -> TableModel:
    target = backend.loaded.engine.target
    assert isinstance(target, TableModel)
    return target


def test_overflow_is_refused_with_its_counts_before_anything_runs() -> None:
    backend = writing("a")
    with pytest.raises(ContextOverflow, match="3 tokens") as caught:
        backend.generate(Request(HELLO, max_tokens=62), threading.Event())
    error = caught.value
    assert (error.num_prompt_tokens, error.max_tokens, error.context_length) == (3, 62, 64)
    assert target_of(backend).num_forwards == 0
    assert ask(backend, max_tokens=61)[-1].finish_reason == "eos"  # exactly full is allowed


@pytest.mark.parametrize(
    ("name", "said"), [("absent", "no draft model was chosen"), ("nonsense", "knowing")]
)
def test_unknown_drafter_is_refused_with_the_choices_or_the_reason(name: str, said: str) -> None:
    backend = writing("a")
    with pytest.raises(RequestError, match=said):
        backend.generate(Request(HELLO, drafter=name), threading.Event())


def test_cancel_is_seen_within_one_round() -> None:
    backend, cancel = writing("a", "b", "c", "a", "b"), threading.Event()
    chunks = []
    for chunk in backend.generate(Request(HELLO, max_tokens=20, drafter=OFF), cancel):
        chunks.append(chunk)
        if chunk.step is not None:
            cancel.set()
    check_consistent(chunks)
    assert text_of(chunks) == "a" and chunks[-1].finish_reason == "cancelled"


def test_cancelled_before_the_prefill_nothing_is_decoded() -> None:
    backend, cancel = writing("a"), threading.Event()
    cancel.set()
    chunks = list(backend.generate(Request(HELLO, max_tokens=20), cancel))
    check_consistent(chunks)
    assert chunks[-1].finish_reason == "cancelled" and target_of(backend).num_forwards == 0


def test_closing_the_stream_leaves_a_usable_backend() -> None:
    backend = writing("a", "b", "c")
    stream: Any = backend.generate(Request(HELLO, max_tokens=20, drafter=OFF), threading.Event())
    for _ in range(3):
        next(stream)
    stream.close()
    assert text_of(ask(backend, drafter=OFF)) == "abc"


def failing_after(backend: LocalBackend, num_forwards: int, fault: Exception) -> None:
    target = target_of(backend)
    forward: Callable[..., Any] = target.forward

    def fail(*arguments: Any, **named: Any) -> Any:
        if target.num_forwards >= num_forwards:
            raise fault
        return forward(*arguments, **named)

    target.forward = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), MemoryError()])
def test_error_in_mid_stream_keeps_what_was_written(fault: Exception) -> None:
    backend = writing("a", "STO", "P", "b")
    failing_after(backend, 3, fault)
    chunks = ask(backend, drafter=OFF, stop=("STOX",))
    check_consistent(chunks)
    assert chunks[-1].finish_reason == "error"
    assert chunks[-1].error is not None and "What was written is kept" in chunks[-1].error
    assert [token for chunk in chunks for token in chunk.tokens] == [SAY["a"], SAY["STO"]]
    assert text_of(chunks) == "aSTO"  # also what a possible stop string held back
    assert target_of(backend).cache.tokens == [1, 2, 3, SAY["a"]]


def test_second_turn_reuses_the_first_ones_cache() -> None:
    backend = writing("a", "b")
    assert ask(backend, drafter=OFF)[-1].stats.num_reused_tokens == 0
    longer = (*HELLO, Message("assistant", "ab"), Message("user", "c"))
    chunks = list(backend.generate(Request(longer, max_tokens=2), threading.Event()))
    assert chunks[-1].stats.num_prompt_tokens == 6
    assert chunks[-1].stats.num_reused_tokens == 5


@pytest.mark.slow
def test_seed_repeats_a_reply_for_a_fixed_drafter_and_length() -> None:
    def reply(seed: int) -> list[int]:
        target = with_cache(tiny_llama(vocab_size=len(PIECES)), 64)
        backend = backend_of(target, {"ngram": NgramDrafter()})
        sampling = SamplingParams(temperature=1.5, seed=seed)
        chunks = ask(backend, sampling=sampling, drafter="ngram", num_draft_tokens=3)
        return [token for chunk in chunks for token in chunk.tokens]

    replies = {seed: reply(seed) for seed in range(5)}
    assert all(reply(seed) == found for seed, found in replies.items())
    assert len({tuple(found) for found in replies.values()}) > 1


def test_auto_without_measurements_decodes_plainly_and_says_so() -> None:
    stats = ask(writing("a", "b"), drafter=AUTO)[-1].stats
    assert stats.num_drafts == 0 and "not been measured" in stats.reason


def test_drafters_have_their_labels_in_what_a_person_reads() -> None:
    small, larger = (with_cache(tiny_llama(vocab_size=n), 64) for n in (len(PIECES), 64))
    measured = backend_of(larger, {"ngram": NgramDrafter()})
    phrases = list(measured.calibrate(threading.Event()))
    assert any(phrase.startswith("measuring word lookup, ") for phrase in phrases)
    backend = backend_of(small, {"ngram": NgramDrafter()})
    chosen = ask(backend, drafter="ngram", num_draft_tokens=3)[-1].stats.reason
    assert chosen == "word lookup with 3 tokens a round, as you chose."


def test_snapshot_is_filed_under_the_identity() -> None:
    state = writing("a").snapshot()
    assert list(state) == ["tiny | cpu"]


def test_calibration_can_be_stopped_between_measurements() -> None:
    backend, cancel = writing("a"), threading.Event()
    cancel.set()
    assert list(backend.calibrate(cancel)) == []
    assert target_of(backend).cache.length == 0


def test_measuring_that_replies_interrupt_at_each_step_comes_to_its_end() -> None:
    """Messages that keep coming must not keep the rest from being measured."""
    backend, whole = writing("a"), list(writing("a").calibrate(threading.Event()))
    found = dict[str, None]()
    while phrase := next(backend.calibrate(threading.Event()), None):
        found[phrase] = None
        assert text_of(ask(backend)) == "a"
    assert list(found) == list(dict.fromkeys(whole))
    assert not backend.lacks_costs(Request(HELLO, max_tokens=5, drafter=AUTO))


class Captures:
    """Stands in for what is captured in idle time. wanted: what is to be."""

    def __init__(self) -> None:
        self.wanted, self.made = ["one", "two"], list[str]()
        self.notice: str | None = None

    @property
    def has_missing(self) -> bool:
        return len(self.made) < len(self.wanted)

    def capture(self) -> Iterator[str]:
        for name in self.wanted[len(self.made) :]:
            yield f"capturing {name}"
            self.made.append(name)
        self.notice = "Only two of three steps were captured."


def with_captures(backend: LocalBackend) -> tuple[LocalBackend, Captures]:
    captures = Captures()
    backend.loaded.engine.drafters["knowing"].captures = (captures,)
    return backend, captures


def test_what_can_be_captured_is_captured_before_costs_are_measured() -> None:
    backend, captures = with_captures(writing("ab"))
    assert backend.describe().has_idle_work
    phrases = list(backend.calibrate(threading.Event()))
    assert phrases[:2] == ["capturing one", "capturing two"]
    assert len(phrases) > 2 and captures.made == ["one", "two"]
    assert captures.notice in backend.describe().notices


def test_graphs_that_a_reply_asked_for_are_captured_in_the_next_idle_time() -> None:
    backend, captures = with_captures(writing("ab"))
    list(backend.calibrate(threading.Event()))
    ask(backend, drafter="knowing")
    assert not backend.describe().has_idle_work
    captures.wanted.append("three")
    assert backend.describe().has_idle_work
    assert list(backend.calibrate(threading.Event())) == ["capturing three"]
    assert not backend.describe().has_idle_work and captures.made[-1] == "three"


def test_a_message_stops_capturing_and_what_was_made_stays() -> None:
    (backend, captures), cancel = with_captures(writing("ab")), threading.Event()
    for _ in backend.calibrate(cancel):
        if captures.made:
            cancel.set()
    assert captures.made == ["one"] and not backend.describe().notices


# the likeliest next tokens


def test_candidates_are_the_models_own_logits_best_first() -> None:
    module = tiny_llama(vocab_size=len(PIECES))
    backend = backend_of(with_cache(module), {})
    found = backend.candidates(HELLO, (SAY["P"],), 5)
    with torch.no_grad():
        logits = module(torch.tensor([[1, 2, 3, SAY["P"]]])).logits[0, -1]
    best = logits.topk(5)
    assert [one.token for one in found] == best.indices.tolist()
    assert [one.logit for one in found] == pytest.approx(best.values.tolist(), abs=1e-4)
    chances = logits.softmax(-1)[best.indices].tolist()
    assert [one.probability for one in found] == pytest.approx(chances, abs=1e-5)
    assert [one.text for one in found] == [PIECES[one.token] for one in found]


def test_candidates_leave_the_cache_as_a_turn_does() -> None:
    backend = backend_of(with_cache(tiny_llama(vocab_size=len(PIECES))), {})
    backend.candidates(HELLO, (SAY["P"],), 2)
    assert backend.loaded.engine.target.cache.tokens == [1, 2, 3]
    again = (*HELLO, Message("assistant", "P"))
    request = Request(again, continues=True, begun_tokens=(SAY["P"],), max_tokens=1)
    assert list(backend.generate(request, threading.Event()))[-1].stats.num_reused_tokens == 3


def test_no_more_candidates_are_named_than_there_are() -> None:
    assert len(writing("a").candidates(HELLO, (), 99)) == len(PIECES)


def test_candidates_that_are_no_numbers_are_refused() -> None:
    backend = backend_of(TableModel(lambda tokens: torch.full((8,), float("nan")), 8), {})
    with pytest.raises(NumericsError):
        backend.candidates(HELLO, (), 3)


def test_candidates_beyond_the_context_are_refused() -> None:
    with pytest.raises(ContextOverflow):
        writing("a").candidates(HELLO, (1,) * 62, 3)


# -- several at the same time ---------------------------------------------------------------


def with_slots(num_slots: int) -> LocalBackend:
    """A tiny model that answers every conversation at length."""
    target = with_cache(tiny_llama(vocab_size=len(PIECES)))
    drafters: dict[str, Any] = {"ngram": NgramDrafter()}
    backend = backend_of(target, drafters)
    parts = Parts(target)
    made = [slot_beside(parts, Slot(backend.loaded.engine, backend.loaded.controller))]
    made += [slot_beside(parts, made[0]) for _ in range(num_slots - 2) if made[0] is not None]
    return LocalBackend(replace(backend.loaded, beside=tuple(one for one in made if one)))


def requests_of(*texts: str) -> list[Request]:
    return [
        Request(
            (Message("user", text),),
            SamplingParams(1.0, seed=seed),
            max_tokens=12,
            drafter=("ngram", OFF)[seed % 2],
            num_draft_tokens=None if seed % 2 else 3,
        )
        for seed, text in enumerate(texts)
    ]


@pytest.mark.slow
def test_replies_of_several_slots_are_what_each_is_alone_and_say_no_speedup() -> None:
    backend, asked = with_slots(3), requests_of("abc", "bca", "cab", "aab")
    cancel = threading.Event()
    open_ones = {place: backend.generate(one, cancel) for place, one in enumerate(asked)}
    found: dict[int, list[Chunk]] = {place: [] for place in open_ones}
    order = list[int]()
    while open_ones:
        for place, chunks in tuple(open_ones.items()):
            chunk = next(chunks, None)
            if chunk is None:
                del open_ones[place]
                order.append(place)
            else:
                found[place].append(chunk)
    for place, one in enumerate(asked):
        check_consistent(found[place])
        assert text_of(found[place]) == text_of(list(with_slots(2).generate(one, cancel)))
    assert backend.describe().num_slots == 3
    assert all(each[-1].stats.plain_decode_ms is None for each in found.values())


def test_a_reply_waits_for_a_slot_and_can_be_stopped_while_it_waits() -> None:
    backend = with_slots(2)
    asked, never, cancel = requests_of("abc", "bca", "cab"), threading.Event(), threading.Event()
    first, second = (backend.generate(one, never) for one in asked[:2])
    begun = [next(first), next(second)]
    waits = backend.generate(asked[2], cancel)
    cancel.set()
    (chunk,) = waits
    assert chunk.finish_reason == "cancelled" and not chunk.tokens
    assert [each.phase for each in begun] == ["prefill", "prefill"]
    assert list(first)[-1].finish_reason and list(second)[-1].finish_reason


def test_a_conversation_goes_on_in_the_slot_that_holds_it() -> None:
    backend, never = with_slots(2), threading.Event()
    long, other = requests_of("abcabcabcabcabc", "bca")
    first, second = backend.generate(other, never), backend.generate(long, never)
    next(first), next(second)
    list(first), list(second)
    follow_up = replace(long, messages=(Message("user", "abcabcabcabcabca"),))
    assert list(backend.generate(follow_up, never))[-1].stats.num_reused_tokens == 15


def test_a_token_without_an_embedding_is_refused_in_words() -> None:
    backend = backend_of(scripted([SAY["a"], END], 3, SAY["c"]), {})
    with pytest.raises(RequestError, match=r"token 3 of this text.*3 tokens only.*Leave out 'c'"):
        backend.generate(Request(HELLO, SamplingParams()), threading.Event())


def test_rounds_that_take_far_longer_than_believed_go_on_with_fewer_threads() -> None:
    before = torch.get_num_threads()
    backend = backend_of(scripted([SAY["a"]] * 30, 3, len(PIECES)), {})
    for width in (1, 2):
        backend.loaded.controller.costs.set_verify(width, 3, 1e-6)
    minutes = count(step=RETRY_S)
    threads = Threads(2, 2, worth=1.0, clock=lambda: next(minutes))
    backend.loaded = replace(backend.loaded, threads=threads)
    request = Request(HELLO, max_tokens=2 * ROUNDS)
    numbers = [torch.get_num_threads() for _ in backend.generate(request, threading.Event())]
    torch.set_num_threads(before)
    assert numbers[0] == 2 and 1 in numbers
