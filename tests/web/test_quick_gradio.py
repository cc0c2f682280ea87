"""Gradio is imported without making type stubs, and works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import inspect, json, sys
from contextlib import nullcontext
from localspec.web.quick_gradio import without_type_stubs
stubs, before = [], inspect.getfile
sys.addaudithook(
    lambda event, details: event == "open" and str(details[0]).endswith(".pyi") and stubs.append(1)
)
with without_type_stubs() if sys.argv[1] == "without" else nullcontext():
    import gradio
with gradio.Blocks() as page:
    gradio.HTML("text").change(print)
print(json.dumps({
    "has_stubs": bool(stubs),
    "num_components": len(page.get_config_file()["components"]),
    "is_restored": inspect.getfile is before,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["without", "with"])
def test_no_type_stub_is_made_while_gradio_is_imported(root: Path, how: str) -> None:
    command = [sys.executable, "-c", LOOK, how]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "has_stubs": how == "with",
        "num_components": 1,
        "is_restored": True,
    }
