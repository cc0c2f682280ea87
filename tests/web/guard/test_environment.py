"""Whatever the environment says, the page stays shut and calls nobody; Gradio is imported for it
without making type stubs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.web.guard.environment import FIXED, settle

HOSTILE = {
    "GRADIO_ALLOWED_PATHS": "/",
    "GRADIO_ANALYTICS_ENABLED": "True",
    "GRADIO_DEBUG": "1",
    "GRADIO_HISTORY_BUCKET": "evil/bucket",
    "GRADIO_HOT_RELOAD": "1",
    "GRADIO_MCP_SERVER": "True",
    "GRADIO_NODE_SERVER_NAME": "0.0.0.0",
    "GRADIO_PROFILING": "1",
    "GRADIO_ROOT_PATH": "http://evil.test",
    "GRADIO_RUN_HISTORY": "True",
    "GRADIO_SERVER_NAME": "0.0.0.0",
    "GRADIO_SHARE": "True",
    "GRADIO_SSR_MODE": "True",
    "GRADIO_TEMP_DIR": "/",
    "GRADIO_VIBE_MODE": "1",
    "GRADIO_WATCH_DIRS": "/",
    "GRADIO_OF_NEXT_YEAR": "1",
    "SYSTEM": "spaces",
    "SPACE_ID": "evil/space",
    "SPACE_HOST": "evil.test",
    "OAUTH_CLIENT_ID": "x",
    "OAUTH_CLIENT_SECRET": "x",
    "OPENID_PROVIDER_URL": "http://evil.test",
    "KAGGLE_KERNEL_RUN_TYPE": "x",
    "FORWARDED_ALLOW_IPS": "*",
    "UVICORN_PROXY_HEADERS": "1",
    "UVICORN_HOST": "0.0.0.0",
    "WEB_CONCURRENCY": "4",
    "FASTAPI_ENV": "development",
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_TELEMETRY": "0",
    "HUGGINGFACE_CO_STAGING": "1",
    "DO_NOT_TRACK": "0",
    "USE_HUB_KERNELS": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "NO_PROXY": "intranet.test,[::1],fd07:b51a:cc66:f0::/64",
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "socks://127.0.0.1:9/",
}


def test_what_could_open_the_page_is_gone_and_the_rest_stays() -> None:
    environment = {**HOSTILE, "PATH": "/bin", "HF_TOKEN": "mine", "HF_HOME": "/models"}
    settle(environment)
    gone = {name for name in HOSTILE if name not in environment}
    assert gone == set(HOSTILE) - set(FIXED) - {"NO_PROXY", "http_proxy", "ALL_PROXY"}
    assert {name: environment[name] for name in FIXED} == FIXED
    assert environment["PATH"] == "/bin" and environment["HF_TOKEN"] == "mine"
    assert environment["http_proxy"] == "http://127.0.0.1:9", "downloads may need it"


@pytest.mark.parametrize(
    ("given", "kept"),
    [({}, ""), ({"NO_PROXY": "a.test, b.test"}, "a.test,b.test,"), ({"no_proxy": "c"}, "c,")],
)
def test_no_proxy_stands_before_loopback(given: dict[str, str], kept: str) -> None:
    environment = {**given}
    settle(environment)
    assert environment["NO_PROXY"] == environment["no_proxy"] == f"{kept}127.0.0.1,localhost,::1"
    settle(environment)
    assert environment["NO_PROXY"] == f"{kept}127.0.0.1,localhost,::1", "twice is once"


LOOK = """
import inspect, json, sys, tempfile, pathlib
stubs, getfile = [], inspect.getfile
sys.addaudithook(
    lambda event, details: event == "open" and str(details[0]).endswith(".pyi") and stubs.append(1)
)
from localspec.chat.service import ChatService
from localspec.record.store import Store
from localspec.web.guard.connections import server_of
from localspec.web.server import make_app
from tests.kit.fakes import FakeBackend, session_info

store = Store.open(pathlib.Path(tempfile.mkdtemp()) / "x.db")
service = ChatService(store, session_info, lambda *_: FakeBackend())
guard = make_app(service, "127.0.0.1", 7860, "token")
num_stubs = len(stubs)
sys.path.insert(0, sys.argv[1])
import own
from starlette.routing import Mount
import os
from huggingface_hub import constants
app = guard
while not hasattr(app, "routes"):
    app = app._app
mount = next(route for route in app.routes if isinstance(route, Mount))
blocks = mount.app.get_blocks()
config = server_of(guard).config
config.load()
print(json.dumps({
    "vibe": blocks.vibe_mode, "watch": blocks.dev_mode, "share": blocks.share,
    "root": blocks.root_path, "space": blocks.space_id, "api": blocks.api_open,
    "allowed": list(blocks.allowed_paths), "ssr": blocks.ssr_mode, "mcp": bool(blocks.mcp_server),
    "monitoring": blocks.enable_monitoring, "history": blocks.run_history,
    "analytics": blocks.analytics_enabled, "links": list(blocks.footer_links),
    "proxies": config.proxy_headers, "believed": config.forwarded_allow_ips,
    "workers": config.workers, "interface": type(config.loaded_app).__name__,
    "offline": constants.HF_HUB_OFFLINE, "telemetry_off": constants.HF_HUB_DISABLE_TELEMETRY,
    "staging": "staging" in constants.ENDPOINT or "hub-ci" in constants.ENDPOINT,
    "left": sorted(name for name in os.environ if name.startswith("GRADIO_")),
    "torch": "torch" in sys.modules,
    "stubs": num_stubs, "a stub is seen": len(stubs) > num_stubs,
    "inspect": inspect.getfile is getfile,
}))
"""


@pytest.mark.slow
def test_gradio_and_uvicorn_stay_shut_in_a_hostile_environment_and_no_type_stub_is_made(
    root: Path, tmp_path: Path
) -> None:
    """Of a component's class that is made afterwards Gradio makes a stub, and that is seen."""
    (tmp_path / "own.py").write_text("import gradio\n\n\nclass Own(gradio.HTML):\n    pass\n")
    ran = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path)],
        cwd=root,
        env={**os.environ, **HOSTILE},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "vibe": False,
        "watch": False,
        "share": False,
        "root": "",
        "space": None,
        "api": False,
        "allowed": [],
        "ssr": False,
        "mcp": False,
        "monitoring": False,
        "history": False,
        "analytics": False,
        "links": [],
        "proxies": False,
        "believed": "",
        "workers": 1,
        "interface": "Guard",
        "offline": True,
        "telemetry_off": True,
        "staging": False,
        "left": ["GRADIO_ANALYTICS_ENABLED"],
        "torch": False,
        "stubs": 0,
        "a stub is seen": True,
        "inspect": True,
    }
