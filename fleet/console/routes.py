"""The files of the operators' page, at `/console`. They are the same for everyone; the page asks the operators' API."""

from __future__ import annotations

import asyncio
import hashlib
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import hdrs, web

from ..server.routes import ApiRoute

_PAGE: Final = Path(__file__).parent / "page"
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def console_routes() -> list[ApiRoute]:
    """Return the routes of the page; `/` leads to it."""
    files = sorted(path for path in _PAGE.iterdir() if path.suffix in _TYPES)
    names = {path: "/console" if path.name == "index.html" else f"/console/{path.name}" for path in files}
    summary = "The operators' page."
    return [
        ApiRoute("GET", "/", _to_page, summary, status=302, content_type="text/html"),
        *(
            ApiRoute("GET", name, partial(_file, path), summary, content_type=_TYPES[path.suffix])
            for path, name in names.items()
        ),
    ]


async def _to_page(_http: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={**HEADERS, "Location": "console"})


async def _file(path: Path, http: web.Request) -> web.StreamResponse:
    if path.name == "index.html" and http.raw_path.partition("?")[0].endswith("/"):
        # The page names its files relative to its plain path.
        return web.Response(status=308, headers={**HEADERS, "Location": "../console"})
    content = await asyncio.to_thread(path.read_bytes)
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    if http.headers.get(hdrs.IF_NONE_MATCH) == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type=_TYPES[path.suffix], charset="utf-8", headers=headers)
