"""A log with turns of given steps."""

from __future__ import annotations

from pathlib import Path

from localspec.core.decoding import Step
from localspec.core.turn_stats import TurnStats
from localspec.record.store import SessionInfo, Store, TurnEnd, TurnSettings


def log_of(path: Path, *turns: tuple[Step, ...]) -> Store:
    """A log with one turn for each tuple of steps."""
    store = Store.open(path)
    session = store.start_session(SessionInfo())
    conversation = store.create_conversation("a chat")
    settings = TurnSettings(
        model="big", draft="small", device="cpu", dtype="fp32", temperature=0.7, workload="code"
    )
    for steps in turns:
        asked = store.add_message(conversation, None, "user", "hello")
        turn = store.begin_turn(session, conversation, asked, settings)
        store.finish_turn(
            turn,
            TurnEnd(
                text="hi",
                token_ids=[1],
                provenance=["target"],
                stats=TurnStats(1),
                steps=steps,
                finish_reason="length",
                error=None,
            ),
        )
    return store
