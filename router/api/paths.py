"""Paths as clients send them: with doubled or trailing slashes from a base URL, and HEAD where there is a GET."""

from __future__ import annotations

_STREAMED = ("/events", "/content", "/realtime")  # a body without end, a file, or another protocol


def plain_path(path: str) -> str:
    """Return the path without doubled and trailing slashes."""
    return "/" + "/".join(filter(None, path.split("/")))


def takes(methods: str, method: str, path: str) -> bool:
    """Return whether a path that takes these methods takes this one: HEAD like GET, whose body is then not sent.

    Args:
        methods: Such as `GET, DELETE`.
        path: Of the request.
    """
    known = methods.split(", ")
    return method in known or (method == "HEAD" and "GET" in known and not path.endswith(_STREAMED))
