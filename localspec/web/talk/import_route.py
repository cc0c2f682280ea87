"""The route that takes in a file of conversations: POST /import, the file as it is.

Contract: the body is the file, no longer than the guard lets through; the answer says how many
conversations came of it and which is the last, or a sentence. It never reaches Gradio, whose events
would carry it as text of a third more.

Not here: reading it (chat.importing), choosing it (static/side.js).
"""

from __future__ import annotations

from typing import Any

from localspec.chat.service import ChatService
from localspec.errors import LocalspecError
from localspec.web.guard.routes import IMPORT_PATH

NO_STORE = {"cache-control": "no-store"}


def add_import_route(api: Any, service: ChatService) -> None:
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    async def take_in(request: Request) -> Response:
        try:
            found = await run_in_threadpool(service.import_conversations, await request.body())
        except LocalspecError as error:
            return JSONResponse({"error": str(error)}, 409, headers=NO_STORE)
        return JSONResponse({"imported": len(found), "last": found[-1]}, headers=NO_STORE)

    api.add_route(IMPORT_PATH, take_in, methods=["POST"])
