"""The house stands as designed: who may import whom, what stays out of the page's start, how
large a file may grow, and what may never be written into it. Read from the sources with `ast`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "localspec"
MAX_LINES = 400

# Every wing may import itself, and these.
EVERY_WING = {"core", "formats", "__init__"}
# What else a wing may import. From top to bottom: a wing imports only wings below it.
MAY_IMPORT = {
    "__main__": {"cli"},
    "cli": {"*"},
    "training": {
        "bench", "loading", "chat", "record", "machine", "drafters", "controller", "engine",
        "forward", "weights",
    },
    "bench": {
        "loading", "chat", "remote", "record", "machine", "drafters", "controller", "engine",
        "forward", "weights",
    },
    "web": {"api", "chat", "record", "machine", "drafters.registry"},
    "api": {"chat", "record", "drafters.registry"},
    "loading": {
        "chat", "remote", "record", "machine", "drafters", "controller", "engine", "forward",
        "weights",
    },
    "chat": {"record", "drafters.registry", "controller", "engine", "forward"},
    "remote": set(),
    "record": {"drafters.registry"},
    "machine": {"drafters.registry"},
    "drafters": {"engine", "controller", "forward"},
    "engine": {"controller", "forward"},
    "controller": set(),
    "forward": {"weights"},
    "weights": set(),
    "formats": set(),
    "core": set(),
    "__init__": set(),
}  # fmt: skip

# A foreign package may be imported only here.
HOMES = {
    "tools": (),  # made what ships; no part of what runs
    "torch": (
        "forward", "weights", "engine", "drafters", "bench", "training", "machine.hardware",
        "loading",
        "cli.train_run",
    ),
    "transformers": (
        "forward", "engine", "drafters", "bench", "training", "chat.template", "loading",
        "chat.template_child", "cli.train_run",
    ),
    "tokenizers": (
        "forward", "engine", "drafters", "bench", "training", "chat.template", "chat.shield",
        "loading",
    ),
    "bitsandbytes": ("weights",),
    "gguf": ("weights", "formats"),
    "gradio": ("web",),
    "fastapi": ("web", "api"),
    "starlette": ("web", "api"),
    "llguidance": ("chat.grammars",),
    "openai": ("remote",),
    "httpx2": ("remote", "machine", "core.http_limits"),
    "pydantic": ("api",),
    "prometheus_client": ("api", "remote"),
    "uvicorn": ("web",),
    "sqlite3": ("record",),
    "sqlite_utils": ("record",),
    "pynvml": ("machine",),
    "argparse": ("cli.flags",),  # one reading of flags, declared as data everywhere else
    "typer": (),  # gradio brings it
}  # fmt: skip
# What the page needs before it is up; none of these may bring the engine along.
BEFORE_THE_PAGE = (
    "localspec.web.server", "localspec.chat.service", "localspec.record.store",
    "localspec.record.export", "localspec.remote.child", "localspec.remote.server",
    "localspec.machine.hardware", "localspec.core.options", "app", "localspec.cli.main",
)  # fmt: skip
HEAVY = ("torch", "transformers", "tokenizers", "gradio", "bitsandbytes", "pandas")

# Names of one machine, and of package registries (PyTorch's own index for Windows may be named).
FORBIDDEN = (
    r"(?<![\w.])/(work|tmp/env|home/\w+|root)/",
    r"\bpypi\." + r"org\b",
    r"files\.python" + r"hosted",
    r"[A-Z]:\\Users\\",
)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".js", ".css", ".html", ".cfg", ".json", ""}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the package."""
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def name_of(path: Path) -> str:
    """The module's name inside the package; a wing's __init__ is the wing itself."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports_of(tree: ast.Module) -> Iterator[str]:
    """Full names of what is imported at run time; imports for type checking do not count."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if is_module(inside) else str(node.module)
        else:
            children = ast.iter_child_nodes(node)
            waiting += [each for each in children if not isinstance(each, ast.expr)]


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def own(name: str) -> str | None:
    """A name of ours without the package, None for anything foreign."""
    if name == "localspec":
        return "__init__"
    return name.removeprefix("localspec.") if name.startswith("localspec.") else None


def lies_in(name: str, places: set[str] | tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def breaches(module: str, tree: ast.Module) -> list[str]:
    """Sentences about imports that the house does not allow."""
    wing = module.split(".")[0]
    allowed = MAY_IMPORT.get(wing, set()) | {wing}
    if wing not in EVERY_WING:
        allowed |= EVERY_WING
    elif wing == "formats":
        allowed |= {"core"}
    found = []
    for imported in imports_of(tree):
        ours = own(imported)
        if ours is not None and "*" not in allowed and not lies_in(ours, allowed):
            found.append(f"{module} imports {ours}")
        package = imported.split(".")[0]
        if package in HOMES and not lies_in(module, HOMES[package]):
            found.append(f"{module} imports {package}")
    return found


def test_imports_follow_the_house() -> None:
    modules = {name_of(path): tree for path, tree in trees().items()}
    without_rule = [name for name in modules if not lies_in(name, set(MAY_IMPORT))]
    assert without_rule == [], "a new wing: give it its rule here"
    assert [breach for name, tree in modules.items() for breach in breaches(name, tree)] == []


@pytest.mark.parametrize(
    ("module", "line", "is_allowed"),
    [
        ("web.stats.figures", "from localspec.engine import controller", False),
        ("web.stats.figures", "from localspec.chat.service import ChatService", True),
        ("web.stats.figures", "import torch", False),
        ("web.stats.figures", "def f():\n    import torch", False),
        ("record.store", "import localspec.chat.service", False),
        ("engine.engine", "from localspec.drafters.ngram import NgramDrafter", False),
        ("drafters.ngram", "from localspec.engine.sampling import scores", True),
        ("chat.service", "from transformers import AutoTokenizer", False),
        ("chat.template", "from transformers import AutoTokenizer", True),
        ("chat.service", "import sqlite3", False),
        ("machine.planner", "from localspec.engine.engine import Engine", False),
        ("loading.local_backend", "from localspec.engine.engine import Engine", True),
        ("core.decoding", "if TYPE_CHECKING:\n    import torch", True),
        ("core.decoding", "import torch.nn", False),
        ("training.request", "import argparse", False),
        ("training.run", "from tools.demo_pair.corpus import pack", False),
    ],
)
def test_the_rules_see_a_planted_breach(module: str, line: str, is_allowed: bool) -> None:
    assert (breaches(module, ast.parse(line)) == []) is is_allowed


def circle(modules: dict[str, ast.Module]) -> list[str]:
    """The modules of a circle of imports, those inside of functions included; empty without one."""
    graph = {
        name: {ours for imported in imports_of(tree) if (ours := own(imported)) is not None}
        for name, tree in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.slow
def test_no_imports_run_in_a_circle() -> None:
    modules = {name_of(path): tree for path, tree in trees().items()}
    assert circle(modules) == []
    planted = "def f():\n    from localspec.engine.engine import Engine"
    assert circle(modules | {"forward.model": ast.parse(planted)}) != []


@pytest.mark.slow  # starts a child process
def test_nothing_heavy_is_imported_before_the_page_is_up() -> None:
    """The packages that each module brought; then that gradio does not bring the engine's."""
    code = (
        "import importlib, sys\nfrom localspec.web.quick_gradio import without_type_stubs\n"
        f"for module in {(*BEFORE_THE_PAGE, 'gradio')}:\n"
        "    with without_type_stubs():\n"
        "        importlib.import_module(module)\n"
        f"    print(module, *(name for name in {HEAVY} if name in sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines() == [*BEFORE_THE_PAGE, "gradio gradio pandas"], ran.stderr


@pytest.mark.parametrize("module", ["app", "tests.__main__", "localspec.core.bootstrap"])
def test_the_set_up_needs_the_standard_library_only(module: str) -> None:
    ran = subprocess.run(  # -S: without any installed package
        [sys.executable, "-S", "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


IMPORT_OF_TESTS = re.compile(
    r"^\s*(?:from|import) (tests\.\S+)(?: import ([^(#\n]+))?", re.MULTILINE
)


def foreign_helpers(module: str, text: str) -> list[str]:
    """Names that a module of the tests may not import: test modules, conftests and other wings."""
    wings = {"kit", "worlds", "__main__", module.split(".")[1]}
    return [
        f"{name}: {parts}"
        for name, parts in IMPORT_OF_TESTS.findall(text)
        if name.split(".")[1] not in wings
        or re.search(r"\b(test_\w+|conftest)\b", f"{name} {parts}")
    ]


def test_tests_import_helpers_of_the_kit_and_of_their_own_wing_alone() -> None:
    """Otherwise a change of one test breaks another wing's."""
    found = {
        name: names
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if (name := ".".join(path.relative_to(ROOT).with_suffix("").parts))
        if (names := foreign_helpers(name, path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("line", "is_allowed"),
    [
        ("from tests.chat.test_local import ask", False),
        ("from tests.chat import test_local", False),
        ("def f():\n    import tests.web.test_live as live", False),
        ("from tests.web.checks import ask", False),
        ("from tests.chat.conftest import Start", False),
        ("from tests.chat.crashing_app import main", True),
        ("from tests.kit.tiny import tiny_llama", True),
    ],
)
def test_a_foreign_helper_is_seen(line: str, is_allowed: bool) -> None:
    assert (foreign_helpers("tests.chat.test_local", line) == []) is is_allowed


FIXTURE = re.compile(r"^@pytest\.fixture\b[^@]*?^(?:async )?def (\w+)", re.MULTILINE)


def defined_fixtures(text: str) -> list[str]:
    """Names of the fixtures of a module."""
    return FIXTURE.findall(text)


def test_a_fixture_name_has_one_meaning() -> None:
    """Equal fixtures are shared in a conftest; another one has a name of its own."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in defined_fixtures(path.read_text("utf-8")):
            places[name].append(str(path.relative_to(ROOT)))
    assert len(places) > 100, "the fixtures were not found"
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_planted_fixture_is_seen() -> None:
    text = "@pytest.fixture(\n    params=[1]\n)\ndef a() -> int:\n    return 1\n\n\n"
    text += "@pytest.fixture\nasync def b() -> int:\n    return 1\n\n\ndef c() -> None: ...\n"
    assert defined_fixtures(text) == ["a", "b"]


def test_every_module_says_what_it_is() -> None:
    told = {name_of(path): ast.get_docstring(tree) or "" for path, tree in trees().items()}
    assert [name for name, docstring in told.items() if len(docstring) <= 20] == []


def test_no_file_becomes_a_home_for_everything() -> None:
    num_lines = {name_of(path): path.read_text("utf-8").count("\n") for path in trees()}
    assert {name for name, count in num_lines.items() if count > MAX_LINES} == set(), "part it"


def compared_by_value(tree: ast.Module) -> list[str]:
    """Names of the dataclasses that can change and are equal to others with the same values."""
    names = []
    for node in ast.walk(tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            called = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            given = {word.arg: ast.unparse(word.value) for word in called.keywords}
            is_named = given.get("frozen") == "True" or given.get("eq") == "False"
            if ast.unparse(called.func) == "dataclass" and not is_named:
                names.append(node.name)
    return names


def test_a_record_that_can_change_is_equal_to_itself_alone() -> None:
    """Otherwise a list may give up another record, and a cycle of records has no end."""
    assert [name for tree in trees().values() for name in compared_by_value(tree)] == []
    planted = "@dataclass\nclass A: ...\n@dataclass(slots=True)\nclass B: ...\n"
    assert compared_by_value(ast.parse(planted)) == ["A", "B"]


def project_files() -> list[Path]:
    """What git would track; everything but caches where this is no git checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name]
    hidden = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not hidden & set(p.parts)]


def forbidden_in(text: str) -> list[str]:
    return [match.group() for rule in FORBIDDEN for match in re.finditer(rule, text)]


def test_no_file_names_a_machine_or_a_registry() -> None:
    paths = [path for path in project_files() if path.suffix in TEXT_SUFFIXES and path.is_file()]
    assert len(paths) > 50, "the files of the project were not found"
    found = {
        str(path.relative_to(ROOT)): words
        for path in paths
        if path != Path(__file__) and path.stat().st_size < 1_000_000
        if (words := forbidden_in(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


def test_a_planted_path_is_seen() -> None:
    assert forbidden_in('open("/' + 'work/data/x")')
    assert forbidden_in("https://pypi." + "org/simple")
    assert not forbidden_in("a network/workload, /roots, ./work/here")
