"""Files: the operators' page at `/console`, and the published folder of signed metadata, manifests and blobs.

The page is public and uses the operators' API. The published folder has a layout for CDNs: all files except two never
change, so a cache may keep them forever. `timestamp.json` and `root.json` are revalidated on each request. Ranges are
served, so that a device can resume a download.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web, web_fileresponse

from causeway_server.router.errors import NotFound
from causeway_server.router.serving.aiohttp_connection import aiohttp_response
from causeway_server.router.serving.console import HEADERS, file_response, page_files

from .routes import ApiRoute

_PAGE: Final = Path(__file__).parents[1] / "console" / "page"
IMMUTABLE = "public, max-age=31536000, immutable"
FRESH = "no-cache"
_FOREVER = re.compile(
    r"tuf/metadata/[0-9]+\.[a-z]+\.json"
    r"|tuf/targets/(bundles|rollouts)/[0-9a-f]{64}\.[A-Za-z0-9._-]{1,128}\.json"
    r"|blobs/[0-9a-f]{64}"
)
web_fileresponse.NOSENDFILE = True  # type: ignore[misc]  # which asyncio's loop refuses over TLS, and uvloop always
_CHANGING = ("tuf/metadata/timestamp.json", "tuf/metadata/root.json")


def file_routes(published: Path) -> list[ApiRoute]:
    async def send(request: web.Request) -> web.StreamResponse:
        name = request.path.lstrip("/")
        changes = name in _CHANGING
        if not changes and _FOREVER.fullmatch(name) is None:
            raise NotFound(f"File {name[:200]} not found.")
        if not (published / name).is_file():
            raise NotFound(f"File {name[:200]} not found.")
        kind = "application/json" if name.endswith(".json") else "application/octet-stream"
        headers = {"cache-control": FRESH if changes else IMMUTABLE, "content-type": kind}
        return web.FileResponse(published / name, headers=headers)

    return [ApiRoute("GET", "/tuf/{path:.+}", send), ApiRoute("GET", "/blobs/{sha256}", send)]


def page() -> Mapping[str, Path]:
    """Return the files of the operators' page by their paths in URLs."""
    return page_files(_PAGE)


def console_routes() -> list[ApiRoute]:
    """Return the routes of the page; `/` redirects to it."""
    files = [ApiRoute("GET", name, partial(_send, path)) for name, path in page().items()]
    return [ApiRoute("GET", "/", _to_page), *files]


async def _send(file: Path, http: web.Request) -> web.StreamResponse:
    return aiohttp_response(await file_response(file, http))


async def _to_page(_http: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={**HEADERS, "Cache-Control": "no-cache", "Location": "console"})
