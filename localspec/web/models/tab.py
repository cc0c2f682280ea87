"""The Models tab: its one component, its routes, and the desk behind them.

Contract: `lay_out` makes the tab in the Tabs that are open, `wire` lets it look up what is new when
it is opened, `add_models_routes` adds GET /models (what is shown) and POST /models (what a button
asks). static/models.js shows the parts and asks again every second while the tab is seen, and not
otherwise. A folder is looked into by its path only for a browser on this machine.

Not here: what the parts say (models_html), what buttons do (models_desk).
"""

from __future__ import annotations

import atexit
import json
from typing import Any, NamedTuple

import gradio as gr

from localspec.chat.service import ChatService
from localspec.config import settings_for
from localspec.errors import LocalspecError, RequestError
from localspec.machine.catalogue import Catalogue
from localspec.web.guard.security import is_loopback
from localspec.web.models.desk import ModelsDesk

PATH = "/models"
NO_STORE = {"cache-control": "no-store"}
ORDER = ("found", "loaded", "downloads", "first", "near", "tune", "here", "folder", "others")
MODELS_HTML = (
    '<div id="ls-models" aria-busy="true">'
    + "".join(f'<section data-part="{part}"></section>' for part in ORDER)
    + '<p id="ls-models-said" role="status" aria-live="polite"></p></div>'
)
OPENED = "() => { if (window.lsModels) window.lsModels(); }"


class ModelsPage(NamedTuple):
    """The components of the Models tab."""

    tab: gr.Tab
    content: gr.HTML


def lay_out() -> ModelsPage:
    with gr.Tab("Models", id="models") as tab:
        content = gr.HTML(
            MODELS_HTML, elem_id="ls-models-box", padding=False, apply_default_css=False
        )
    return ModelsPage(tab, content)


def wire(blocks: gr.Blocks, service: ChatService, page: ModelsPage) -> None:
    """Opening the tab shows what is there at once."""
    page.tab.select(None, None, None, js=OPENED, api_visibility="private")


def desk_of(service: ChatService) -> ModelsDesk:
    """The desk of a service: profiles and downloads lie where its log lies."""
    catalogue = Catalogue(settings_for(service.data_folder), measured=service.measurements)
    atexit.register(catalogue.close)  # a download must not outlive the app
    return ModelsDesk(service, catalogue)


def add_models_routes(api: Any, desk: ModelsDesk) -> None:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    def view(request: Request) -> Response:
        return JSONResponse(desk.view(), headers=NO_STORE)

    async def act(request: Request) -> Response:
        try:
            said = json.loads(await request.body())
            if not isinstance(said, dict):
                raise RequestError("What the page sent is no request. Reload it.")
            if said.get("act") == "folder" and not is_here(request.client):
                raise RequestError("A folder can be named only from a browser on this machine.")
            message = await run_in_threadpool(desk.act, said)
        except (ValueError, LocalspecError) as error:
            return JSONResponse({"error": str(error)}, 409, headers=NO_STORE)
        return JSONResponse({"message": message}, headers=NO_STORE)

    api.add_route(PATH, view)
    api.add_route(PATH, act, methods=["POST"])


def is_here(client: Any) -> bool:
    """Whether a request comes from this very machine."""
    return client is not None and is_loopback(client.host)
