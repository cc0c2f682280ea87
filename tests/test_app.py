"""The two commands: flags answer at once, an old Python says what it lacks, and the parts are
put together without torch before the page is up."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import app
import tests.__main__ as suite
from localspec.chat.service import ChatService
from localspec.core.bootstrap import check_port
from localspec.core.errors import SetupError
from localspec.core.options import LoadOptions
from localspec.loading.service import session_info
from localspec.record.store import Store
from localspec.remote.wire import Opening
from tests.kit.waiting import until

ROOT = Path(__file__).resolve().parent.parent


def run_bare(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a Python that has no installed package."""
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["app.py", "tests/__main__.py"])
def test_an_old_python_can_parse_it_and_is_told_what_is_needed(name: str) -> None:
    source = (ROOT / name).read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 6))
    assert "__future__" not in source, "3.6 does not know annotations from the future"
    ran = run_bare(
        "-c",
        "import runpy, sys; sys.version_info = (3, 8, 1, 'final', 0)\n"
        f"runpy.run_path({name!r}, run_name='__main__')",
    )
    assert ran.returncode == 1
    assert "3.11 or newer, but this is Python 3.8." in ran.stderr and "python3.12" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_help_answers_without_any_package() -> None:
    ran = run_bare("app.py", "--help")
    assert ran.returncode == 0 and "--no-browser" in ran.stdout and "--drafter" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prot", "1"], "There is no flag --prot. Did you mean '--port'?"),
        (["--port", "70000"], "not between 0 and 65535"),
        (["--port", "many"], "no whole number"),
        (["--context", "0"], "not between 1 and"),
        (["--unload-after", "9" * 400], "not between 0 and 1000000"),
        (["--keep-chats", "-1"], "not between 0 and 1000000"),
        (["--drafter", "ngrams"], "ngram"),
    ],
)
def test_a_mistake_in_the_flags_is_told_before_any_set_up(arguments: list[str], told: str) -> None:
    ran = run_bare("app.py", *arguments)
    assert ran.returncode == 2 and told in ran.stderr and "environment" not in ran.stderr


def test_a_taken_port_is_told_before_any_set_up(taken_port: int) -> None:
    ran = run_bare("app.py", "--port", str(taken_port))
    assert ran.returncode == 1 and "start with --port" in ran.stderr
    assert "Traceback" not in ran.stderr and "environment" not in ran.stderr


@pytest.mark.parametrize("host", ["\ud800", "x" * 300, "a..b"])
def test_a_host_that_no_machine_can_have_is_said(host: str) -> None:
    with pytest.raises(SetupError, match="no address of this machine"):
        check_port(host, 7860)


def test_the_parts_are_put_together_as_the_flags_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}
    opened: list[str] = []

    def serve(
        service: ChatService,
        host: str,
        port: int,
        on_ready: Callable[[str, str], None],
        password: str | None,
        origins: list[str],
    ) -> None:
        assert password is None, "this machine only"
        seen.update(service=service, host=host, port=port, home=service.store.path)
        on_ready("http://127.0.0.1:1/?token=t", "http://127.0.0.1:1/?token=once")
        assert "options" not in seen, "nothing is loaded before the page is up"
        seen["backend"] = service.lifecycle.opener(print)
        seen["drafter"] = service.drafter
        service.close()

    def open_child(opening: Opening, report: Callable[[str], None]) -> str:
        seen.update(opening.keywords, function=opening.function)
        return "the backend"

    monkeypatch.setattr("localspec.web.server.serve", serve)
    monkeypatch.setattr("localspec.remote.child.ChildBackend.open", open_child)
    monkeypatch.setattr("webbrowser.open", opened.append)
    flags = ["--model", "m", "--heads", "h", "--drafter", "off", "--context", "4096"]
    flags += ["--no-browser", "--no-log-text"]
    app.start(app.parse_arguments([*flags, "--home", str(tmp_path), "--port", "0"]))
    assert capsys.readouterr().out == "localspec → http://127.0.0.1:1/?token=t\n"
    assert opened == [] and seen["host"] == "127.0.0.1" and seen["port"] == 0
    assert seen["home"] == tmp_path / "localspec.db"
    assert seen["backend"] == "the backend"
    assert seen["drafter"] == "off", "the page starts with the drafter that was asked for"
    assert not seen["service"].store.logs_text
    wanted = LoadOptions(model="m", drafter="off", context=4096, heads=("h",), home=tmp_path)
    assert seen["options"] == wanted == seen["service"].options
    module, _, name = str(seen["function"]).partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert seen["past"] == (), "a new log holds no conversations yet"
    assert seen["state"] is None, "a new log knows nothing of the controller yet"


def test_texts_are_logged_again_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        store.keep_text(False)
    monkeypatch.setattr("localspec.web.server.serve", lambda *of: None)
    app.start(app.parse_arguments(["--home", str(tmp_path), "--log-text"]))
    with closing(Store.open(tmp_path / "localspec.db")) as store:
        assert store.logs_text


@pytest.mark.slow  # starts a child process
def test_torch_stays_out_until_the_service_loads(tmp_path: Path) -> None:
    code = (
        "import sys, app, localspec.web.server as server\n"
        "server.serve = lambda service, *rest: service.close()\n"
        f"app.start(app.parse_arguments(['--home', {str(tmp_path)!r}]))\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.strip() == "[]", ran.stderr


@pytest.mark.parametrize(
    ("has_screen", "flags"), [(True, []), (False, []), (True, ["--no-browser"])]
)
def test_the_browser_opens_where_there_is_a_screen_and_never_learns_the_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_screen: bool, flags: list[str]
) -> None:
    opened: list[str] = []

    def serve(service: Any, host: str, port: int, on_ready: Any, *rest: Any) -> None:
        on_ready("http://127.0.0.1:1/?token=t", "http://127.0.0.1:1/?token=once")

    monkeypatch.setattr("localspec.web.server.serve", serve)
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(app, "has_screen", lambda: has_screen)
    app.start(app.parse_arguments(["--home", str(tmp_path), *flags]))
    wanted = ["http://127.0.0.1:1/?token=once"] if has_screen and not flags else []
    until(lambda: opened == wanted)


def test_the_log_learns_the_machine_and_the_versions() -> None:
    info = session_info()
    assert info.torch and info.transformers and info.python and info.ram_total_bytes
    assert info.device in ("cpu", "cuda", "mps") and info.app_version


def test_a_set_up_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise SetupError("No network. Connect it.")

    monkeypatch.setattr(app, "ensure_environment", refuse)
    with pytest.raises(SystemExit) as ended:
        app.main(["--port", "0"])
    assert ended.value.code == "No network. Connect it."


def test_a_home_with_a_name_that_is_too_long_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "ensure_environment", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        app.main(["--port", "0", "--no-browser", "--home", "x" * 300])
    assert str(ended.value.code).endswith("… is too long for the name of a file. Shorten it.")


@pytest.mark.parametrize("code", [0, 5])
def test_the_suite_ends_as_pytest_does_which_keeps_bytecode(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> Any:
        ran.append((command, env))
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(suite, "ensure_environment", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert suite.main(["-k", "fast"]) == code
    ((command, env),) = ran
    assert command == [sys.executable, "-m", "pytest", "-k", "fast"]
    assert "PYTHONDONTWRITEBYTECODE" not in env and env["PATH"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], suite.WHOLE),
        (["--quick"], suite.QUICK),
        (["--quick", "-x"], (*suite.QUICK, "-x")),
        (["-k", "fast"], ("-k", "fast")),
    ],
)
def test_the_suite_is_run_whole_quick_or_as_told(
    arguments: list[str], expected: tuple[str, ...]
) -> None:
    assert suite.pytest_arguments(arguments) == expected


def test_the_suite_starts_again_in_an_environment_with_the_development_requirements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def start_again(*given: Any) -> None:
        asked.append(given)
        raise SystemExit

    monkeypatch.setattr(suite, "ensure_environment", start_again)
    with pytest.raises(SystemExit):
        suite.main(["-x"])
    assert asked == [("requirements-dev.txt", ["-m", "tests", "-x"])]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_requirements_are_exact_and_say_why(name: str) -> None:
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if not line.startswith(("#", "-r ")):
            requirement, _, reason = line.partition("#")
            assert "==" in requirement and len(reason.strip()) > 5, line


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_no_password_is_asked_for_while_only_this_machine_is_served(host: str) -> None:
    environment = {"LOCALSPEC_PASSWORD": "left over from another start"}
    assert app.password_for(host, 7860, environment) is None and environment == {}


def test_beyond_loopback_the_password_comes_from_the_environment_and_leaves_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = {"LOCALSPEC_PASSWORD": "correct horse battery", "PATH": "/bin"}
    assert app.password_for("0.0.0.0", 7860, environment) == "correct horse battery"
    assert environment == {"PATH": "/bin"}, "children of this process have no use for it"
    said = capsys.readouterr().err
    assert "read and delete every conversation" in said and "not encrypted" in said


def test_beyond_loopback_the_password_is_typed_in_where_there_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("getpass.getpass", lambda prompt: "typed in secret")
    for has_terminal, expected in ((True, "typed in secret"), (False, None)):
        monkeypatch.setattr("sys.stdin.isatty", lambda answer=has_terminal: answer, raising=False)
        assert app.password_for("192.0.2.7", 7860, {}) == expected
