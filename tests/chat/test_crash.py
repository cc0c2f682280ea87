"""A process killed in the middle of a reply loses neither the message nor what was written."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.record.store import Store

WRITER = """
import sys, time
from pathlib import Path
from localspec.chat import service as chat
from localspec.record.store import Store
from tests.fakes import FakeBackend, Script, session_info
chat.CHECKPOINT_S = 0.01
store = Store.open(Path(sys.argv[1]))
service = chat.ChatService(store, session_info, lambda report: FakeBackend(Script(round_s=0.05)))
service.start()
reply = service.submit(None, "Are you still there?", chat.ReplySettings())
while True:
    time.sleep(0.01)
    turn = reply.entry.turn
    if turn and len(store.branch(turn.message_id)[-1].text) > 40:
        print("written", flush=True)
        break
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_process_leaves_message_and_partial_reply(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "localspec.db"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    store = Store.open(path)
    conversation = store.conversations()[0]
    shown = store.branch(conversation.tip_message_id or 0)
    store.close()
    assert shown[0].text == "Are you still there?"
    assert shown[1].state == "interrupted" and len(shown[1].text) > 40
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()
