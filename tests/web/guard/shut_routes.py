"""Every route of Gradio's that was looked at and is not answered, by the reason."""

from __future__ import annotations

UPLOADS = "no file comes in: attachments are read in the browser"
FILES = "no file of this machine is handed out by its path"
CLIENTS = "for programs; the page is the only client of its queue"
CODE = "an editor of the page's own code; whoever reaches it runs what he likes"
LOGINS = "Gradio's own accounts; the key of the launch does this"
UNUSED = "not needed by the page"
SHUT: dict[str, tuple[str, ...]] = {
    UPLOADS: (
        "POST /gradio_api/upload",
        "GET /gradio_api/upload_progress",
        "POST /gradio_api/process_recording",
        "POST /gradio_api/stream/{event_id}",
        "POST /gradio_api/stream/{event_id}/close",
    ),
    FILES: (
        "GET /gradio_api/file={path_or_url:path}",
        "HEAD /gradio_api/file={path_or_url:path}",
        "GET /gradio_api/file/{path:path}",
        "GET /gradio_api/proxy={url_path:path}",
        "HEAD /gradio_api/proxy={url_path:path}",
        "GET /gradio_api/deep_link",
        "GET /gradio_api/custom_component/{id}/{environment}/{type}/{file_name}",
        "GET /gradio_api/stream/{session_hash}/{run}/{component_id}/playlist.m3u8",
        "GET /gradio_api/stream/{session_hash}/{run}/{component_id}/{segment_id}.{ext}",
        "GET /gradio_api/stream/{session_hash}/{run}/{component_id}/playlist-file",
        "GET /static/{path:path}",  # but for its scripts
        "GET /svelte/{path:path}",
    ),
    CLIENTS: (
        "POST /gradio_api/api/{api_name}",
        "POST /gradio_api/call/{api_name}",
        "POST /gradio_api/call/v2/{api_name}",
        "GET /gradio_api/call/{api_name}/{event_id}",
        "GET /gradio_api/call/v2/{api_name}/{event_id}",
        "GET /gradio_api/queue/status",
        "GET /gradio_api/info",
        "GET /gradio_api/openapi.json",
        "POST /gradio_api/component_server",
    ),
    CODE: (
        "GET /gradio_api/vibe-code",
        "POST /gradio_api/vibe-code",
        "POST /gradio_api/vibe-edit",
        "POST /gradio_api/undo-vibe-edit",
        "POST /gradio_api/vibe-starter-queries",
    ),
    LOGINS: (
        "POST /login",
        "GET /logout",
        "GET /gradio_api/user",
        "GET /gradio_api/login_check",
        "GET /gradio_api/token",
    ),
    UNUSED: (
        "HEAD /",
        "GET /robots.txt",
        "GET /pwa_icon",
        "GET /pwa_icon/{size}",
        "GET /manifest.json",
        "GET /monitoring",
        "GET /monitoring/summary",
        "GET /monitoring/{key}",
        "GET /gradio_api/startup-events",
        "GET /gradio_api/theme.css",
        "GET /gradio_api/runs",
        "GET /gradio_api/dev/reload",
    ),
}
