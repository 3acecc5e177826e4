"""The published folder: signed metadata, manifests and blobs, as a CDN would carry them.

Every file but two never changes under its name: a cache may keep it for ever. `timestamp.json` and `root.json` are
revalidated on each request. Ranges are served, so a box resumes a download.
"""

from __future__ import annotations

import re
from pathlib import Path

from aiohttp import web

from router.errors import NotFound

from .routes import ApiRoute

IMMUTABLE = "public, max-age=31536000, immutable"
FRESH = "no-cache"
_FOREVER = re.compile(
    r"tuf/metadata/[0-9]+\.[a-z]+\.json"
    r"|tuf/targets/(bundles|rollouts)/[0-9a-f]{64}\.[A-Za-z0-9._-]{1,128}\.json"
    r"|blobs/[0-9a-f]{64}"
)
_CHANGING = ("tuf/metadata/timestamp.json", "tuf/metadata/root.json")


def file_routes(published: Path) -> list[ApiRoute]:
    """Return the routes of the files in this folder."""

    async def send(request: web.Request) -> web.StreamResponse:
        name = request.path.lstrip("/")
        changes = name in _CHANGING
        if not changes and _FOREVER.fullmatch(name) is None:
            raise NotFound(f"no such file: {name[:200]}")
        if not (published / name).is_file():
            raise NotFound(f"no such file: {name[:200]}")
        kind = "application/json" if name.endswith(".json") else "application/octet-stream"
        headers = {"cache-control": FRESH if changes else IMMUTABLE, "content-type": kind}
        return web.FileResponse(published / name, headers=headers)

    summary = "Signed metadata and manifests (The Update Framework)."
    octets = "application/octet-stream"
    return [
        ApiRoute("GET", "/tuf/{path:.+}", send, summary, errors=(NotFound,)),
        ApiRoute("GET", "/blobs/{sha256}", send, "A file by its hash.", errors=(NotFound,), content_type=octets),
    ]
