"""Serves the page at `/ui`: a few static files, read once, under a strict Content-Security-Policy.

Owns the files' headers. The page holds no data and so needs no key; all it shows it asks of the API and of the admin
surface, with the keys its reader types in. Whatever a model says is text to it: scripts come from here alone, and
the policy has the browser refuse any string that would become markup (`require-trusted-types-for`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response

PAGE = Path(__file__).parent / "page"
INDEX = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # Asked for again each time, and answered by the tag.
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def build_ui_router(page: Path = PAGE) -> APIRouter:
    """The routes over the files of a folder. Paths in the page are relative: it works behind any prefix."""
    router = APIRouter()
    files = _read(page)

    def add(path: str, name: str) -> None:
        content, headers = files[name]

        async def serve(request: Request) -> Response:
            if request.headers.get("if-none-match") == headers["etag"]:
                return Response(status_code=304, headers=headers)
            return Response(content, headers=headers)

        router.add_api_route(path, serve, methods=["GET", "HEAD"])

    add("/ui", INDEX)
    for name in files:
        add(f"/ui/{name}", name)

    @router.get("/ui/")
    async def with_slash() -> Response:
        return RedirectResponse("../ui", 308)

    return router


def _read(page: Path) -> Mapping[str, tuple[bytes, Mapping[str, str]]]:
    """The files by name, each with its headers."""
    return {path.name: _file(path) for path in sorted(page.iterdir()) if path.suffix in MEDIA_TYPES}


def _file(path: Path) -> tuple[bytes, Mapping[str, str]]:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return content, HEADERS | {"content-type": MEDIA_TYPES[path.suffix], "etag": tag}
