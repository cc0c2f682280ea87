"""A service, a shelf and a hub on this machine for the tests of the Models tab.

Contract: the profile "ours" knows a pair and a published head of the target, which the stub hub
holds, and a model too large for any machine; the engine is the fake, and `opened` holds what was
asked to be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from localspec.chat.service import ChatService
from localspec.core.backend import Backend
from localspec.core.options import LoadOptions
from localspec.record.store import Store
from localspec.remote.server import ServerBackend
from tests.kit.fakes import FakeBackend, Script, session_info
from tests.kit.hub_stub import HubStub, client_of, serve_hub

TARGET, DRAFT, HUGE = "someone/target", "someone/draft", "someone/huge"
HEAD = "someone/head"  # a published head of the target
PROFILE = f"""
title = "Ours"
default = "{TARGET}"
family = "llama"
"""
MODEL = """
[models."{id}"]
license = "Apache-2.0"
gated = false
terms = "https://www.apache.org/licenses/LICENSE-2.0"
num_layers = {layers}
hidden_size = {width}
num_heads = 4
num_kv_heads = 2
head_dim = 16
intermediate_size = 128
vocab_size = 264
context_length = 8192
is_tied = false
drafts = {drafts}
"""
HEAD_TABLE = f"""
[heads."{HEAD}"]
kind = "block"
license = "MIT"
num_params = 65536
state_width = 256
kv_width = 64
block_length = 7
"""
HEAD_CONFIG = f"""{{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 264,
"dflash_config": {{"block_size": 8}}, "target_model_name_or_path": "{TARGET}"}}"""
CONFIG = """{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264,
"max_position_embeddings": 8192}"""


@dataclass
class ModelsSite:
    """home: where profile, log and list of downloads are. opened: what was asked of the engine."""

    home: Path
    cache: Path
    hub: HubStub
    service: ChatService
    backend: FakeBackend
    opened: list[LoadOptions] = field(default_factory=list)


def write_models(root: Path) -> dict[str, Path]:
    """The pair and a published head as folders; the target's weights are 2 MB."""
    for number, each in enumerate((TARGET, DRAFT)):
        (root / each).mkdir(parents=True)
        (root / each / "config.json").write_text(CONFIG)
        (root / each / "tokenizer.json").write_text("{}")
        rows = numpy.random.default_rng(number).random((1024 >> 3 * number, 512), numpy.float32)
        save_file({"weight": rows}, root / each / "model.safetensors")
    (root / HEAD).mkdir(parents=True)
    (root / HEAD / "config.json").write_text(HEAD_CONFIG)
    save_file(
        {"fc.weight": numpy.zeros((256, 256), numpy.float16)}, root / HEAD / "model.safetensors"
    )
    return {each: root / each for each in (TARGET, DRAFT, HEAD)}


def write_profile(home: Path) -> None:
    folder = home / "profiles" / "models"
    folder.mkdir(parents=True)
    models = (
        MODEL.format(id=TARGET, layers=2, width=128, drafts=f'["{DRAFT}", "{HEAD}"]')
        + MODEL.format(id=DRAFT, layers=1, width=64, drafts="[]")
        + MODEL.format(id=HUGE, layers=9000, width=65536, drafts="[]")
        + HEAD_TABLE
    )
    (folder / "ours.toml").write_text(PROFILE + models)


@contextmanager
def models_site(root: Path, script: Script | None = None) -> Iterator[ModelsSite]:
    """Everything but the page. The processes that fetch reach the stub by the environment."""
    write_profile(root / "home")
    with (
        serve_hub(write_models(root / "hub")) as hub,
        client_of(hub.endpoint, root / "cache"),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (
            ("HF_ENDPOINT", hub.endpoint),
            ("HF_HUB_CACHE", str(root / "cache")),
            ("HF_HOME", str(root / "hf")),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "1"),
        ):
            patch.setenv(name, value)
        store = Store.open(root / "home" / "localspec.db")
        backend, opened = FakeBackend(script or Script()), list[LoadOptions]()

        def opener_for(options: LoadOptions) -> Callable[[Callable[[str], None]], Backend]:
            def open_backend(report: Callable[[str], None]) -> Backend:
                opened.append(options)
                if options.remote is not None:
                    return ServerBackend(options.remote)
                report(f"loading {options.model}")
                return backend

            return open_backend

        first = LoadOptions()
        service = ChatService(
            store, session_info, opener_for(first), options=first, opener_for=opener_for
        )
        try:
            yield ModelsSite(root / "home", root / "cache", hub, service, backend, opened)
        finally:
            service.close()
            store.close()
