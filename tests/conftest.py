"""What every test may use. Real tokenizers and configs lie beside the checkout when they are
there at all; a test that needs them skips, with the reason, where they are absent."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localspec.core.options import SAME_BITS
from localspec.loading.torch_start import library_settings
from localspec.web.quick_gradio import without_type_stubs
from tests.kit.tally import PROPERTY, Tally

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Tiny models gain nothing from threads, and on a busy machine threads that wait for each other
# cost far more than they save. Where a test wants two, they sleep while they wait: three workers
# took ten times as long where they did not. It stands here because torch reads it when imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# The tests compute with the instructions that the product computes with.
for name, value in library_settings(SAME_BITS).items():
    os.environ.setdefault(name, value)

# No test reads or writes what the person who runs it keeps: a home of its own takes the place of
# theirs, before a library looks there as it is imported. What is installed beside localspec (other
# engines) is named by a flag.
HOME = tempfile.TemporaryDirectory(prefix="localspec-tests-", ignore_cleanup_errors=True)
OF_THE_PERSON = (
    "HF_", "HUGGING", "TRANSFORMERS_", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME",
    "XDG_STATE_HOME", "OLLAMA_", "LOCALSPEC_", "OPENAI_", "ANTHROPIC_", "GRADIO_", "VLLM_",
)  # fmt: skip
for name in [name for name in os.environ if name.upper().startswith(OF_THE_PERSON)]:
    del os.environ[name]
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]
os.environ["HOME"] = os.environ["USERPROFILE"] = HOME.name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "web"
BROWSER = PAGE / "browser"
STEP_BACK = 5  # niceness
ENDURANCE_S = 6 * 3600.0  # of a test with all of its cases


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run the tests that count losses alone, with all of their cases"
    parser.addoption("--endurance", action="store_true", help=told)
    told = "of n parts of the cases at every call, which one; with --endurance"
    parser.addoption("--part", default="1/1", metavar="K/N", help=told)
    told = "run the tests of the other engines too, which tools.peers installed in this home"
    parser.addoption("--peers", type=Path, metavar="DIR", help=told)


def pytest_unconfigure() -> None:
    HOME.cleanup()


@pytest.fixture(scope="session")
def peers_home(request: pytest.FixtureRequest) -> Path:
    """The home in which other engines are installed; skips the test where none is named."""
    home: Path | None = request.config.getoption("--peers")
    if home is None:
        pytest.skip("no folder with other engines is named (--peers DIR)")
    return home


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts of this test's cases, which are checked at its end."""
    number, num_parts = map(int, request.config.getoption("--part").split("/"))
    made = Tally(request.config.getoption("--endurance"), (number, num_parts))
    yield made
    request.node.user_properties.append((PROPERTY, made.told))
    made.check()


# A full pass of the garbage collector over all that pytest has collected takes 0.3 s and more, and
# a load that follows another makes one. So what stands when the tests begin is set aside for good,
# and loads set aside nothing.
COLLECTOR = ("freeze", "unfreeze", "get_freeze_count")
REAL = {name: getattr(gc, name) for name in COLLECTOR}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported here stays, so looking for garbage among it is in vain. Gradio is among it:
    as on the page, no type stubs are made of it."""
    gc.disable()
    try:
        with without_type_stubs():
            return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    gc.collect()
    REAL["freeze"]()
    for name in COLLECTOR:
        setattr(gc, name, lambda: 0)


@pytest.fixture
def sets_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a test that looks at what a load sets aside from the garbage collector."""
    for name, real in REAL.items():
        monkeypatch.setattr(gc, name, real)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def blank_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """To migrate a blank log takes 40 ms, six times as long as to open one, and most tests begin
    with one: in this process each begins with a copy of the first."""
    from localspec.record import opening

    first = tmp_path_factory.mktemp("log") / "first.db"
    opening.open_log(first).close()
    migrated, make = first.read_bytes(), opening.create_private

    def make_migrated(path: Path) -> None:
        make(path)
        if path.stat().st_size == 0:
            path.write_bytes(migrated)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "create_private", make_migrated)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_models_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds the models that a service of this machine keeps outside every home."""
    from localspec.machine import other_programs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_programs, "OF_THE_SERVICE", tmp_path_factory.getbasetemp() / "none")
        yield


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """A free port that the system gives to no other program during the test. A server that reuses
    addresses can listen at it, on Linux while it is bound here as well."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        if sys.platform != "linux":
            bound.close()
        yield port


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of localspec for this test where it names none."""
    monkeypatch.setattr("localspec.core.config.default_home", lambda: tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def quick_start() -> Iterator[None]:
    """Processes of engines begin as copies of one that has imported what they need."""
    from tests.kit.engines import forked_quickly

    with forked_quickly():
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer of 420 entries, learnt from generated dialogues."""
    from tests.kit.tiny_tokenizer import dialogue_tokenizer

    return dialogue_tokenizer()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tokenizers, templates and configs, `../shared/data`."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real tokenizers and configs of ../shared/data are not on this machine")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test that drives a browser, and order the files.

    Tests of the page without a browser come before those with one: Playwright's event loop runs in
    the main thread from its first test on, where no test can then run a loop of its own. Of several
    workers one begins with the browser, which takes longest; files with slow tests come next.
    """
    is_worker = hasattr(config, "workerinput")
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> int:
        if item.path.is_relative_to(BROWSER):
            needs_browser = "playwright" in getattr(item, "fixturenames", ())
            if needs_browser:
                item.add_marker("browser")
            return 2 if needs_browser else 1
        if item.path.is_relative_to(PAGE):
            return 3 if is_worker else 0
        return 4 if item.path in slow else 5

    items.sort(key=place)
    if config.getoption("--endurance"):
        items[:] = [one for one in items if "tally" in getattr(one, "fixturenames", ())]
        for item in items:
            item.add_marker(pytest.mark.timeout(ENDURANCE_S), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Beside a worker with the browser the others step back: the page has the longest way to go and
    waits for half of it."""
    if hasattr(item.config, "workerinput") and hasattr(os, "nice") and os.nice(0) < STEP_BACK:
        os.nice(0 if item.path.is_relative_to(BROWSER) else STEP_BACK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files of the browser's folder to one worker together, and every other file to one.

    xdist's own groups are marks, which pytest 9.2 keeps from its controller: a group is added to
    `_nodeid`, which no test has any more.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "browser" if (ROOT / file).is_relative_to(BROWSER) else file

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how long the tests of each wing took, summed over the workers, and what was counted."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counted = dict[str, str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[wing_of(report.nodeid)] += report.duration
                told = dict(report.user_properties).get(PROPERTY)
                counted |= {} if told is None else {report.nodeid: str(told)}
    slowest_first = sorted(seconds.items(), key=lambda item: -item[1])
    took = ", ".join(f"{wing} {duration:.0f} s" for wing, duration in slowest_first)
    terminalreporter.write_line(f"Test time by wing: {took or 'nothing ran'}")
    if terminalreporter.config.getoption("--endurance"):
        for nodeid, told in counted.items():
            name = nodeid.split("::")[-1].removeprefix("test_").replace("_", " ")
            terminalreporter.write_line(f"{name}: {told}")


def wing_of(nodeid: str) -> str:
    """The folder below `tests/`; "top level" for files beside the wings."""
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "top level"
