"""The path and the method of an HTTP request, as every listener reads them.

Clients join a base URL and a path with a slash too many. The handler of the plain path answers: many clients turn a
redirected POST into a GET.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

_SLASHES: Final = re.compile("/{2,}")


def plain_path(path: str) -> str:
    """Return a path, still percent-encoded, without empty segments: `//v1/models/` is `/v1/models`."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path[:-1] if len(path) > 1 and path.endswith("/") else path


def served_method(method: str, headers: Container[str]) -> str:
    """Return the method whose handler answers: GET also answers HEAD, and the HTTP server leaves the body out.

    GET alone opens a WebSocket (RFC 6455, 4.1).
    """
    return "GET" if method == "HEAD" and "Upgrade" not in headers else method


def allowed_methods(methods: str) -> str:
    """Return the value of `Allow` for methods that have a handler: HEAD goes with GET."""
    return methods.replace("GET", "GET, HEAD")
