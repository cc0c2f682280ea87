"""The drafter of a multi-token-prediction module: which rows it holds, and that none is stale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from localspec.core.decoding import DraftPlan, Proposal, SamplingParams, Sequence
from localspec.core.errors import CacheError, ModelError
from localspec.drafters.drafting import HEAD_SHARE
from localspec.drafters.mtp import MtpDrafter
from localspec.drafters.parts import Parts
from localspec.engine.engine import Engine
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.chain_static import ChainHead
from localspec.forward.heads.mtp_files import read_mtp
from tests.drafters.stages import assert_chosen
from tests.kit.mtp import shipped, write
from tests.kit.random_mtp import write_random
from tests.kit.tiny import GREEDY, Plans, play, tiny_llama, turn_of, with_cache

PROMPT = (5, 9, 12, 30, 7, 41)


@pytest.fixture(scope="module")
def mtp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp")
    write_random(made, with_cache(tiny_llama()))
    return made


def sequence_of(*tokens: int, sampling: SamplingParams | None = None) -> Sequence:
    return turn_of(tokens or PROMPT, sampling or SamplingParams())


def built(folder: Path, reads_once: bool = False) -> tuple[MtpDrafter, Decoder]:
    target = with_cache(tiny_llama())
    return MtpDrafter(
        target,
        ChainHead(read_mtp(folder, target), target.cache.shape.capacity),
        reads_once,
    ), target


def at_root(target: Decoder, sequence: Sequence) -> None:
    """Bring the target's cache where the engine would have it."""
    wanted = sequence.tokens[:-1]
    missing = wanted[target.cache.reuse(wanted) :]
    if missing:
        target.forward(missing, num_logits=1)


def by_hand(folder: Path, tokens: tuple[int, ...], count: int) -> list[int]:
    """A greedy draft computed at one go, with nothing kept from before."""
    return [int(row.argmax()) for row in rows_by_hand(folder, tokens, count)]


def rows_by_hand(folder: Path, tokens: tuple[int, ...], count: int) -> list[torch.Tensor]:
    """The probabilities each of its tokens is taken from."""
    target = with_cache(tiny_llama())
    features = target.follow([LAST])
    target.forward(tokens[:-1])
    head = AutoregressiveHead(read_mtp(folder, target), 64)
    state = head.start(tokens, features).forward()
    found: list[torch.Tensor] = []
    while len(found) < count:
        found.append(target.head(state)[0].softmax(-1))
        state = head.extend(int(found[-1].argmax()), state).forward()
    return found


def draft(drafter: MtpDrafter, target: Decoder, tokens: tuple[int, ...], count: int) -> list[int]:
    sequence = sequence_of(*tokens)
    at_root(target, sequence)
    return list(drafter.propose(sequence, DraftPlan("mtp", count)).tokens)


def test_a_greedy_draft_is_the_modules_own(mtp_folder: Path) -> None:
    drafter, target = built(mtp_folder)
    assert draft(drafter, target, PROMPT, 5) == by_hand(mtp_folder, PROMPT, 5)


@pytest.mark.slow
def test_no_row_is_stale_whatever_came_before(mtp_folder: Path) -> None:
    """Acceptance, rejection, an edit, another first token, and the same again: each draft is what
    a fresh drafter would say."""
    drafter, target = built(mtp_folder)
    guess = tuple(draft(drafter, target, PROMPT, 4))
    others = (
        (*PROMPT, *guess),  # all accepted: rows of the module's own states must not be kept
        (*PROMPT, *guess[:2], 50),
        PROMPT,
        PROMPT,
        (*PROMPT[:3], 44, 7, 41, 3),  # edited in the middle
        (8, *PROMPT[1:]),  # only the first token differs
        PROMPT[:2],
    )
    for tokens in others:
        sequence = sequence_of(*tokens)
        at_root(target, sequence)
        proposal = drafter.propose(sequence, DraftPlan("mtp", 4))
        wanted = rows_by_hand(mtp_folder, tokens, 4)
        assert list(proposal.tokens) == [int(row.argmax()) for row in wanted], tokens
        heights = [float(row.max()) for row in wanted]
        assert proposal.confidences == pytest.approx(heights, abs=1e-5), tokens


def test_drafted_rows_are_forgotten_also_after_an_error(
    mtp_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, target = built(mtp_folder)
    guess = tuple(draft(drafter, target, PROMPT, 3))
    extend, calls = AutoregressiveHead.extend, list[int]()

    def failing(self: AutoregressiveHead, token: int, rows: torch.Tensor) -> torch.Tensor:
        calls.append(token)
        if len(calls) == 2:
            raise CacheError("planted")
        return extend(self, token, rows)

    monkeypatch.setattr(AutoregressiveHead, "extend", failing)
    with pytest.raises(CacheError, match="planted"):
        draft(drafter, target, PROMPT, 6)
    monkeypatch.undo()
    tokens = (*PROMPT, *guess)
    assert draft(drafter, target, tokens, 4) == by_hand(mtp_folder, tokens, 4)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(1.0), SamplingParams(0.7, top_k=5, repetition_penalty=1.5)],
    ids=str,
)
def test_a_token_is_what_the_target_would_choose_by_the_modules_logits(
    mtp_folder: Path, sampling: SamplingParams
) -> None:
    drafter, target = built(mtp_folder)
    sequence = sequence_of(sampling=sampling)
    at_root(target, sequence)
    proposal = drafter.propose(sequence, DraftPlan("mtp", 4))
    fresh = with_cache(tiny_llama())
    features = fresh.follow([LAST])
    fresh.forward(PROMPT[:-1])
    head = AutoregressiveHead(read_mtp(mtp_folder, fresh), 64)
    states = {PROMPT: head.start(PROMPT, features).forward()}
    for text in proposal.texts:
        states[*PROMPT, *text] = head.extend(text[-1], states[*PROMPT, *text[:-1]]).forward()
    assert_chosen(proposal, sequence, lambda text: fresh.head(states[text])[0], HEAD_SHARE)


def test_the_stop_rule_ends_the_draft_after_the_token_it_saw(mtp_folder: Path) -> None:
    for reads_once in (False, True):
        drafter, target = built(mtp_folder, reads_once)
        sequence = sequence_of()
        at_root(target, sequence)
        plan = DraftPlan("mtp", 6, keep_drafting=lambda index, confidence: index < 2)
        assert len(drafter.propose(sequence, plan).tokens) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SamplingParams(1.0), SamplingParams(0.7, top_k=5, repetition_penalty=1.5)],
    ids=str,
)
def test_a_draft_read_at_once_is_the_draft_read_token_by_token(
    mtp_folder: Path, sampling: SamplingParams
) -> None:
    found = list[Proposal]()
    for reads_once in (False, True):
        drafter, target = built(mtp_folder, reads_once)
        sequence = sequence_of(sampling=sampling)
        at_root(target, sequence)
        found.append(drafter.propose(sequence, DraftPlan("mtp", 5)))
    assert found[0].tokens == found[1].tokens and len(found[0].tokens) == 5
    assert found[0].confidences == pytest.approx(found[1].confidences, abs=1e-5)


def test_without_a_state_before_the_root_it_has_nothing_to_say(mtp_folder: Path) -> None:
    drafter, _ = built(mtp_folder)
    assert drafter.signal(sequence_of(5)) is None
    assert drafter.propose(sequence_of(5), DraftPlan("mtp", 4)).tokens == ()


@pytest.mark.slow
def test_a_model_that_ships_its_module_drafts_with_it(tmp_path: Path) -> None:
    """Read from the target's own files; the text stays the target's own."""
    model, module = shipped()
    folder, target = write(tmp_path, model, module), with_cache(model, 64)
    drafter = MtpDrafter.build(Parts(target, heads={"mtp": folder}))
    engine = Engine(target, {"mtp": drafter})
    plain = play(Engine(with_cache(model, 64), {}), PROMPT, Plans(("off", 0)), 20)
    drafted = play(engine, PROMPT, Plans(("mtp", 3)), 20)
    assert drafted.tokens == plain.tokens


def test_without_a_module_it_says_how_to_get_one() -> None:
    with pytest.raises(ModelError, match="localspec train mtp"):
        MtpDrafter.build(Parts(with_cache(tiny_llama())))


def test_a_damaged_folder_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "head.json").write_text(json.dumps({"kind": "medusa"}))
    with pytest.raises(ModelError, match="kind 'medusa', not 'mtp'"):
        built(tmp_path)
