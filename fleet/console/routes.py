"""The files of the operators' page, at `/console`. They are the same for everyone; the page asks the operators' API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web

from router.serving.console.page_files import HEADERS, file_response, media_type, page_files

from ..server.routes import ApiRoute

_PAGE: Final = Path(__file__).parent / "page"


def console_routes() -> list[ApiRoute]:
    """Return the routes of the page; `/` leads to it."""
    summary = "The operators' page."
    return [
        ApiRoute("GET", "/", _to_page, summary, status=302, content_type="text/html"),
        *(
            ApiRoute("GET", name, partial(file_response, path), summary, content_type=media_type(path))
            for name, path in page_files(_PAGE).items()
        ),
    ]


async def _to_page(_http: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={**HEADERS, "Cache-Control": "no-cache", "Location": "console"})
