"""What every test may use. Real tokenizers and configs lie beside the checkout when they are
there at all; a test that needs them skips, with the reason, where they are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Tiny models gain nothing from threads, and on a busy machine threads that wait for each other
# cost far more than they save. It stands here because torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


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
