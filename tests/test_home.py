"""The tests have a home of their own, whatever the person who runs them keeps."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants

from localspec.core.config import default_home
from localspec.machine.other_programs import found_models


def test_no_test_sees_what_the_person_keeps() -> None:
    home = Path.home()
    assert home.name.startswith("localspec-tests-")
    assert default_home().is_relative_to(home)
    assert Path(constants.HF_HUB_CACHE).is_relative_to(home)
    assert found_models() == ()
    of_the_person = ("HF_TOKEN", "HF_ENDPOINT", "OLLAMA_MODELS", "https_proxy", "OPENAI_API_KEY")
    assert not set(of_the_person) & os.environ.keys()
