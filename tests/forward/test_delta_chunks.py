"""States in closed forms, as a GPU moves them, say what the recurrence and transformers say."""

from __future__ import annotations

import threading
from itertools import accumulate, pairwise

import pytest
import torch

from localspec.engine.engine import Engine
from localspec.formats.delta_settings import DeltaSettings
from localspec.forward.decoder import Decoder
from localspec.forward.delta_chunks import ClosedStates
from localspec.forward.graphs import CapturedDecoder, shapes
from localspec.forward.passes import Rows, forward_together
from localspec.forward.states import RowInputs
from tests.kit.families import WITH_STATES, assert_close
from tests.kit.hybrids import TEXT, by_transformers, module, num_rows_read, read
from tests.kit.tiny import CPU, GREEDY, Plans, play, with_plain_cache
from tests.kit.tracing import TracingPool

NET = DeltaSettings(2, 4, 16, 8, 4, (True,))


def decoder(family: str = "qwen3_5") -> Decoder:
    return with_plain_cache(module(family), 96)


@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize(
    "widths",
    [[80], [1] * 80, [60, *[1] * 20], [16] * 5, [17, 30, 2, 3, 7, 16, 5]],
    ids=["whole", "one by one", "prompt and steps", "drafts", "mixed"],
)
def test_a_text_read_in_any_widths_gives_what_transformers_gives(
    family: str, widths: list[int]
) -> None:
    assert_close(read(decoder(family), TEXT, widths), by_transformers(family))


class Recorded:
    """What rows bring to the states of a layer, in place of a mixer, and the recurrence over it."""

    def __init__(self, inputs: RowInputs) -> None:
        self._inputs = inputs
        self._num_read = 0

    def inputs(self, window: torch.Tensor, gates: torch.Tensor) -> RowInputs:
        first, self._num_read = self._num_read, self._num_read + gates.shape[0]
        rows = slice(first, self._num_read)
        taken = self._inputs
        return RowInputs(
            taken.heads[rows], taken.values[rows], taken.shares[rows], taken.log_decays[rows]
        )

    def in_order(self, *_: object) -> torch.Tensor:
        raise NotImplementedError

    def outputs(self) -> torch.Tensor:
        """In fp64, [n, value_heads, value_size]."""
        taken, state = self._inputs, torch.zeros(4, 16, 8, dtype=torch.float64)
        seen = list[torch.Tensor]()
        for heads, value, share, decay in zip(
            taken.heads.double(), taken.values, taken.shares, taken.log_decays, strict=True
        ):
            query, key = heads.repeat_interleave(2, dim=1)[..., None]
            state = state * torch.exp(decay.double())[:, None, None]
            delta = share[:, None, None] * (value[:, None] - key.mT @ state)
            state = state + key * delta
            seen.append((query.mT @ state)[:, 0])
        return torch.stack(seen)


def recorded(num_rows: int, is_hard: bool) -> Recorded:
    """is_hard: a key that returns again and again, is wholly corrected and hardly decays, among
    tokens at which all is forgotten."""
    generator = torch.Generator().manual_seed(5)

    def noise(*sizes: int) -> torch.Tensor:
        return torch.randn(num_rows, *sizes, generator=generator)

    heads = torch.nn.functional.normalize(noise(2, 2, 16), dim=-1)
    shares, log_decays = torch.sigmoid(noise(4)), -torch.rand(num_rows, 4, generator=generator)
    if is_hard:
        heads[:, 1] = heads[:1, 1]
        shares.fill_(1.0)
        log_decays.mul_(1e-3)[::23] = -100.0
    return Recorded(RowInputs(heads, noise(4, 8), shares, log_decays))


@pytest.mark.parametrize("is_hard", [False, True], ids=["noise", "hard"])
@pytest.mark.parametrize("widths", [[200], [1] * 200, [16] * 12, [70, 16, 1, 15, 16, 17, 9, 56]])
def test_closed_forms_agree_with_the_recurrence(widths: list[int], is_hard: bool) -> None:
    net, states = recorded(200, is_hard), ClosedStates(NET, torch.float32, CPU)
    seen = list[torch.Tensor]()
    for start, end in pairwise(accumulate(widths, initial=0)):
        states.begin(start, end - start)
        rows = states.rows(end - start)
        channels, gates = torch.zeros(end - start, NET.num_channels), torch.zeros(end - start, 8)
        seen.append(rows.outputs(net, 0, channels, gates))
        states.finish(end, end - start)
    wanted = net.outputs()[: sum(widths)]
    assert float((torch.cat(seen) - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize("width", [2, 8, 16])
def test_a_draft_that_is_rejected_at_any_position_leaves_nothing(width: int) -> None:
    wanted, model = by_transformers(), decoder()
    model.forward(TEXT[:20])
    for num_accepted in range(1, width + 1):
        base = model.cache.length
        if base + num_accepted >= len(TEXT):
            break
        model.forward([*TEXT[base : base + num_accepted], *[5] * width][:width])
        model.cache.keep(base, range(num_accepted))
        place = base + num_accepted
        assert_close(model.forward([TEXT[place]])[0], wanted[place])


def test_rows_drafted_one_by_one_are_taken_back_before_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a copy of the target does that drafts in its cache. No token is read again for it."""
    wanted, model = by_transformers(), decoder()
    model.forward(TEXT[:20])
    sizes = num_rows_read(monkeypatch, model)
    for base in range(20, 60, 5):
        read(model, [7] * 8, [1] * 8)
        model.cache.rollback(base)
        assert_close(model.forward([*TEXT[base : base + 5], 1, 2])[:5], wanted[base : base + 5])
        model.cache.rollback(base + 5)
    assert sizes == [*[1] * 8, 7] * 8


def test_a_text_is_gone_back_in_token_by_token() -> None:
    wanted, model = by_transformers(), decoder()
    read(model, TEXT, [30, *[1] * 40])
    for length in (69, 60, 55, 54, 31, 3, 0):
        model.cache.rollback(length)
        assert_close(model.forward(TEXT[length : length + 2]), wanted[length : length + 2])


def test_a_second_turn_reads_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    sizes, engine = num_rows_read(monkeypatch, model), Engine(model, {})
    reply = play(engine, TEXT[:40], Plans(("off", 0)), 40).tokens
    for prompt, num_new in (((*reply, 4, 8, 1), 3), ((*TEXT[:40], 9, 9, 2, 6), 4)):
        del sizes[:]
        engine.prefill(engine.start(prompt, GREEDY, 4, frozenset()), threading.Event())
        assert sum(sizes) == num_new
        assert_close(model.forward([prompt[-1]])[0], by_transformers(text=prompt)[-1])
        model.cache.rollback(len(prompt) - 1)


def test_sequences_that_run_together_keep_their_states() -> None:
    first, wanted = decoder(), by_transformers()
    second = first.beside()
    forward_together([Rows(first, TEXT[:30]), Rows(second, TEXT[:3])])
    logits = forward_together([Rows(first, TEXT[30:34]), Rows(second, TEXT[3:40])])
    assert_close(logits[0], wanted[30:34])
    assert_close(logits[1], wanted[3:40])


# -- captured ---------------------------------------------------------------------------------


def captured(pool: TracingPool) -> CapturedDecoder:
    """With every graph, made while a text was held."""
    model = CapturedDecoder(decoder(), pool)
    model.forward(TEXT[:25])
    assert len(list(model.capture())) == len(shapes(96)) and model.notice is None
    return model


@pytest.fixture(scope="module")
def graphs() -> tuple[CapturedDecoder, TracingPool]:
    pool = TracingPool()
    return captured(pool), pool


def test_captures_leave_the_states_of_a_text_that_is_held(
    graphs: tuple[CapturedDecoder, TracingPool],
) -> None:
    model, _ = graphs
    assert model.cache.length == 25
    assert_close(model.forward(TEXT[25:28]), by_transformers()[25:28])


def test_a_first_forward_that_is_a_graph_leaves_nothing_in_its_memory() -> None:
    model = CapturedDecoder(decoder(), TracingPool())
    next(steps := model.capture())
    next(steps)
    assert len(model.captured) == 1
    assert_close(model.forward(TEXT[:40]), by_transformers()[:40])


@pytest.mark.parametrize("width", range(1, 17))
def test_a_graph_of_every_width_gives_the_logits_of_transformers(
    width: int, graphs: tuple[CapturedDecoder, TracingPool]
) -> None:
    """Also of widths that are padded, at every number of pending tokens, and after rejections."""
    (model, pool), wanted = graphs, by_transformers()
    model.cache.rollback(0)
    before = pool.num_replays
    while model.cache.length + width <= 40:
        base = model.cache.length
        model.forward([*TEXT[base : base + 1], *[5] * (width - 1)])
        model.cache.rollback(base)
        assert_close(model.forward(TEXT[base : base + width]), wanted[base : base + width])
    assert pool.num_replays - before == 2 * (40 // width)
