"""Settings of the libraries that the environment could loosen, fixed before they are imported.

Contract: `settle` removes every variable by which Gradio, uvicorn, FastAPI, the hub's client or
torch could be opened up (by prefix, so that a new one is covered too), and sets the few that
close something no argument closes. Children inherit the result, the engine's process among them.
A download that was asked for runs in a process of its own, with the hub's client online there.

Not here: settings of localspec itself (config, app.py).
"""

from __future__ import annotations

from collections.abc import MutableMapping

# Gradio reads some ninety variables: sharing, allowed paths, root path, the code editor of "vibe
# mode", server-side rendering, the MCP server. SPACE_, SYSTEM and OAUTH_ make it believe that it
# runs on the hub's own machines, where its API is open.
REMOVED_PREFIXES = (
    "GRADIO_",
    "SPACE_",
    "SPACES_",
    "OAUTH_",
    "OPENID_",
    "KAGGLE_",
    "UVICORN_",
    "FASTAPI_",
)
REMOVED = (
    "SYSTEM",
    "FORWARDED_ALLOW_IPS",  # uvicorn would believe a stranger's word on who is calling
    "WEB_CONCURRENCY",
    "HUGGINGFACE_CO_STAGING",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",  # pickled weights could run code
)
FIXED = {
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "DO_NOT_TRACK": "1",
    "USE_HUB_KERNELS": "0",  # transformers would fetch compiled code and run it
}
NO_PROXY = ("NO_PROXY", "no_proxy")
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def settle(environment: MutableMapping[str, str]) -> None:
    """Remove and set, in place. Proxies stay for downloads, but never stand before loopback."""
    for name in list(environment):
        if name.upper().startswith(REMOVED_PREFIXES) or name.upper() in REMOVED:
            del environment[name]
    environment.update(FIXED)
    named = [entry for name in NO_PROXY for entry in environment.get(name, "").split(",")]
    exceptions = dict.fromkeys(entry.strip() for entry in (*named, *LOOPBACK_NAMES))
    for name in NO_PROXY:
        environment[name] = ",".join(entry for entry in exceptions if entry)
