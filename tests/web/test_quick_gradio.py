"""Gradio is imported without making type stubs, and works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOOK = """
import inspect, json, sys
from localspec.web.quick_gradio import without_type_stubs
stubs, before = [], inspect.getfile
sys.addaudithook(
    lambda event, details: event == "open" and str(details[0]).endswith(".pyi") and stubs.append(1)
)
with without_type_stubs():
    import gradio
num_imported = len(stubs)
sys.path.insert(0, sys.argv[1])
import own
with gradio.Blocks() as page:
    gradio.HTML("text").change(print)
print(json.dumps({
    "imported": num_imported,
    "is_seen": len(stubs) > num_imported,
    "num_components": len(page.get_config_file()["components"]),
    "is_restored": inspect.getfile is before,
}))
"""


@pytest.mark.slow
def test_no_type_stub_is_made_while_gradio_is_imported(root: Path, tmp_path: Path) -> None:
    """Of a component's class that is made afterwards Gradio makes one, and that is seen."""
    (tmp_path / "own.py").write_text("import gradio\n\n\nclass Own(gradio.HTML):\n    pass\n")
    command = [sys.executable, "-c", LOOK, str(tmp_path)]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "imported": 0,
        "is_seen": True,
        "num_components": 1,
        "is_restored": True,
    }
