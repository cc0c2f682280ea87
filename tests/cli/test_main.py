"""`python -m localspec` from a bare checkout sets itself up; with the packages it just runs."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import localspec.__main__ as command_line
import tools
from localspec.core.errors import SetupError
from tests.kit.command_line import invoke


def test_with_the_packages_nothing_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "ensure_environment", lambda *_: pytest.fail("set up"))
    command_line.prepare(["-m", "localspec", "plan"])


def test_without_the_packages_it_starts_again_in_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    monkeypatch.setattr(command_line, "ensure_environment", lambda *each: asked.append(each))
    command_line.prepare(["-m", "localspec", "plan", "--json"])
    assert asked == [("requirements.txt", ["-m", "localspec", "plan", "--json"])]


def test_the_tools_start_again_in_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    monkeypatch.setattr(command_line, "ensure_environment", lambda *each: asked.append(each))
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "tools.inflate", "--help"])
    importlib.reload(tools)
    assert asked == [("requirements.txt", ["-m", "tools.inflate", "--help"])]


def test_a_set_up_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SetupError("No disk. Free some.")

    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    monkeypatch.setattr(command_line, "ensure_environment", fail)
    with pytest.raises(SystemExit) as ended:
        command_line.prepare([])
    assert ended.value.code == "No disk. Free some."


TRAINED = [f"train {name}" for name in ("distil", "medusa", "eagle", "mtp", "accepted")]


@pytest.mark.parametrize("name", ["generate", "plan", "bench", "export", "doctor", *TRAINED])
def test_every_command_has_help_and_json(name: str) -> None:
    shown = invoke(*name.split(), "--help")
    assert shown.exit_code == 0
    assert "--json" in shown.stdout


@pytest.mark.slow
def test_a_refused_value_is_one_sentence_on_stderr(root: Path) -> None:
    command = [sys.executable, "-m", "localspec", "generate", "--temperature", "-1", "hi"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "temperature is -1.0, but it must lie between 0 and 5."


@pytest.mark.parametrize("words", ["serve --unload-after", "plan --context", "generate --context"])
def test_a_number_of_400_digits_is_refused_in_words(words: str) -> None:
    refused = invoke(*words.split(), "9" * 400)
    assert refused.exit_code == 2 and "is not between" in refused.stderr


def test_plan_takes_no_heads_since_it_plans_none() -> None:
    refused = invoke("plan", "--heads", "folder")
    assert refused.exit_code == 2 and "There is no flag --heads." in refused.stderr


LONG = "x" * 300
REMOTE = ["bench", "--remote", "http://127.0.0.1:1", "--limit", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "--model", LONG], "cannot be looked up on this disk: File name too long"),
        (["plan", "--home", LONG], "too long for the name of a file"),
        (["plan", "--vram-gib", "8", "--device", "cpu"], "plans for a GPU, and --device cpu"),
        (["bench", "--out", LONG], "too long|cannot be written"),
        (["bench", "--prompts", LONG], "cannot be read"),
        (["bench", "--prompts", "/dev/zero"], "more than 200,000 characters"),
        (["bench", "--prompts", "deep.jsonl"], "Line 1 of deep.jsonl is no prompt"),
        (["bench", "table", "deep.jsonl"], "nested too deeply"),
        ([*REMOTE, "--concurrency", "nan"], "'nan' is no list of whole numbers"),
        ([*REMOTE, "--concurrency", "1.5"], "'1.5' is no list of whole numbers"),
        ([*REMOTE, "--concurrency", "0"], "numbers of at least 1"),
        ([*REMOTE, "--max-tokens", "0"], "must be at least 1"),
        ([*REMOTE, "--temperatures", "0,1"], "one temperature"),
        ([*REMOTE, "--suite", "quick"], "--suite has no effect with --remote"),
        (["bench", "--cold-starts", "2"], "was removed. Run `bench --arms off,auto --warm 0`"),
        (["bench", "--plot", "here"], "was removed. The page's Stats tab draws"),
        (["bench", "--plain", "http://127.0.0.1:1"], "--plain has no effect without --remote"),
        (["bench", "--arms", "ngram@²"], "is no arm"),
        (["bench", "table", "list.json"], "is no result"),
        (["serve", "--host", "a..b", "--home", "empty"], "no address of this machine"),
        (["generate", " "], "message is empty"),
        (
            ["keys", "make", "laptop", "--home", "list.json"],
            "none was changed. .*cannot be written",
        ),
        (["keys", "revoke", "laptop", "--home", "list.json"], "none was changed"),
        (["generate", "hi", "--draft", "empty"], "holds no draft model"),
        (["generate", "hi", "--remote-key-file", "list.json"], "no effect without --remote"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_hostile_argument_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 50_000 + "]" * 50_000)
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("localspec.core.prompt_rows.MAX_CHARACTERS", 200_000)
    ended = invoke(*words)
    assert ended.exit_code == 1
    assert re.search(said, ended.stderr), ended


def test_a_list_of_keys_says_where_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    listed = invoke("keys", "list", "--home", str(tmp_path / "file"))
    assert "cannot be written" in listed.stderr and listed.stdout == "There is no key.\n"


def test_no_key_is_made_where_the_server_cannot_listen(tmp_path: Path, taken_port: int) -> None:
    home = tmp_path / "home"
    ended = invoke("serve", "--port", str(taken_port), "--home", str(home))
    assert ended.exit_code == 1 and "cannot be used" in ended.stderr
    assert not home.exists(), "else the next start shows no key"


INTERRUPTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *others):
        if name == "localspec.core.files":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run in the background
sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("command", [["app.py"], ["-m", "localspec", "plan"]])
def test_ctrl_c_while_modules_are_imported_ends_without_a_word(
    root: Path, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


SERVE = ["serve", "--port", "0", "--remote", "http://127.0.0.1:1", "--home"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_server_ends_well_at_ctrl_c(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localspec", *SERVE, str(tmp_path)]
    with subprocess.Popen(
        command,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it runs in the background ignore Ctrl-C, and so do their children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as ran:
        assert ran.stdout is not None and ran.stdout.readline().startswith("localspec → http://")
        ran.send_signal(signal.SIGINT)
        try:
            said, error = ran.communicate(timeout=60)
        finally:
            ran.kill()
    assert (said, ran.returncode) == ("", 0) and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="this system has no /proc")
def test_a_server_tells_what_a_page_would_show_and_ends_well_when_it_is_asked_to(
    root: Path,
) -> None:
    command = [sys.executable, "-m", "localspec", *SERVE, "/proc/nowhere"]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stderr is not None
        told = [ran.stderr.readline() for _ in range(3)]
        ran.terminate()
        _, rest = ran.communicate(timeout=30)
    assert ran.returncode == 0 and "Traceback" not in rest
    assert sum("is kept in memory only" in one for one in told) == 1, told
    assert sum("http://127.0.0.1:1 does not answer" in one for one in told) == 1, told


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["-m", "localspec", "plan", "--help"], "The output cannot be written: "),
        (["app.py", "--port", "0", "--no-browser"], "The address cannot be printed: "),
    ],
)
def test_an_output_without_a_place_is_one_sentence(
    root: Path, tmp_path: Path, command: list[str], said: str
) -> None:
    command = [sys.executable, *command, *["--home", str(tmp_path)]]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(said) and len(ended.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_server_whose_output_has_no_place_says_so(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "localspec", *SERVE, str(tmp_path)]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command, cwd=root, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("The output cannot be written")
