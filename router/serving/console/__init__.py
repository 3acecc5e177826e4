"""The pages of device and fleet at `/console`: theme, icon and scripts of both (`page`), and responses with files.

The files of a page are public: they are the same for all users.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Final

from ..request import AiohttpRequest
from ..responses import ServerResponse, WholeResponse

SHARED: Final = Path(__file__).parent / "page"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files(folder: Path) -> dict[str, Path]:
    """Return the files of a page by path. `folder`: the page's own files."""
    files = sorted(path for path in (*folder.iterdir(), *SHARED.iterdir()) if path.suffix in _TYPES)
    return {"/console" if path.name == "index.html" else f"/console/{path.name}": path for path in files}


def media_type(file: Path) -> str:
    """Return the content type of a file of a page."""
    return _TYPES[file.suffix]


async def file_response(path: Path, http: AiohttpRequest) -> ServerResponse:
    """Return a file of a page; 304 if the browser has it."""
    if path.name == "index.html" and http.raw_path.partition("?")[0].endswith("/"):
        # The page names its files relative to its plain path.
        return WholeResponse(status=308, headers={**HEADERS, "Location": "../console"})
    content = await asyncio.to_thread(path.read_bytes)
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "Cache-Control": "no-cache", "ETag": tag}
    if http.headers.get("If-None-Match") == tag:
        return WholeResponse(status=304, headers=headers)
    return WholeResponse(body=content, headers={**headers, "Content-Type": media_type(path)})
