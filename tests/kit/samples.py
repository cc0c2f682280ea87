"""Small logs for the tests of record/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from localspec.core.decoding import Step
from localspec.core.turn_stats import TurnStats
from localspec.record.store import SessionInfo, Store, Turn, TurnEnd, TurnSettings

SETTINGS = TurnSettings(
    model="demo-target",
    draft="demo-draft",
    device="cpu",
    dtype="float32",
    drafter_requested="auto",
    temperature=0.7,
    top_k=0,
    top_p=0.9,
    min_p=0.0,
    repetition_penalty=1.0,
    seed=7,
    max_tokens=64,
    system_prompt="Be brief.",
    stop='["END"]',
    context_length=2304,
)
INFO = SessionInfo(app_version="0.1", device="cpu", ram_total_bytes=2**34, torch="2.13.0")

STEPS = (
    Step("ngram", 4, 4, 5, 0.5, 10.0, 12, signal=3),
    Step("draft_model", 3, 1, 2, 2.0, 9.5, 17, is_probe=True, signal=("len", 2)),
    Step("off", 0, 0, 1, 0.0, 8.0, 19),
)
STATS = TurnStats(
    num_prompt_tokens=12,
    num_reused_tokens=4,
    num_disk_tokens=3,
    num_output_tokens=8,
    num_steps=3,
    num_drafts=2,
    num_draft_tokens=7,
    num_accepted_tokens=5,
    prefill_ms=20.0,
    ttft_ms=31.0,
    decode_ms=30.0,
    plain_decode_ms=60.0,
    reply_ms=56.0,
    reason="measured fastest here",
    drafted_by={"ngram": 4, "draft_model": 3},
    reading_by={"draft_model": 12.5},
)
LENIENT_SETTINGS = replace(SETTINGS, workload="code", leniency='{"rule": "factor", "factor": 2.0}')
LENIENT_STATS = replace(STATS, exact=False, num_lenient_tokens=2)
TOKEN_IDS = (5, 6, 7, 8, 9, 10, 11, 12)
PROVENANCE = (*["ngram"] * 4, "target", "draft_model", "target", "target")


def open_store(folder: Path, busy_timeout_ms: int = 5000) -> Store:
    return Store.open(folder / "localspec.db", busy_timeout_ms)


def begin(store: Store, text: str = "hi", settings: TurnSettings = SETTINGS) -> Turn:
    """A new session and conversation with one message and an open turn."""
    session_id = store.start_session(INFO)
    conversation_id = store.create_conversation(text)
    asked = store.add_message(conversation_id, None, "user", text)
    return store.begin_turn(session_id, conversation_id, asked, settings)


def finish(
    store: Store,
    turn: Turn,
    text: str = "hello",
    finish_reason: str = "eos",
    stats: TurnStats = STATS,
    steps: tuple[Step, ...] = STEPS,
) -> None:
    store.finish_turn(
        turn,
        TurnEnd(
            text=text,
            token_ids=TOKEN_IDS,
            provenance=PROVENANCE,
            stats=stats,
            steps=steps,
            finish_reason=finish_reason,
            error=None,
        ),
    )


def siblings(store: Store, message_id: int) -> list[int]:
    """The messages with the same parent, this one included, oldest first."""
    message = store.branch(message_id)[-1]
    return list(store.message_tree.sibling_groups(message.conversation_id)[message.parent_id])
