"""The parts that the operators' routes share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from router.errors import InvalidRequest, NotFound
from router.numbers import whole_number

from ..controller.loop import Controller
from ..controller.publisher import Publisher
from ..store.database import Store
from .sign_in import SignIn

_MOST = 1000


class OperatorParts(msgspec.Struct, frozen=True):
    """The operators' side of one process.

    Attributes:
        name: The fleet's name.
        clock: Unix seconds.
    """

    name: str
    folder: Path
    cohorts: tuple[str, ...]
    store: Store
    publisher: Publisher
    controller: Controller
    sign_in: SignIn
    clock: Callable[[], float]


def path_part(http: web.Request) -> str:
    """Return the id in the path. Raises NotFound if no object can have this name."""
    value = http.match_info["id"]
    if not value or len(value) > 128:
        raise NotFound(f"there is no {value[:128]!r}")
    return value


def number(http: web.Request, name: str, default: int, most: int = _MOST) -> int:
    """Return a whole number of the query, from 0 to `most`. Raises InvalidRequest."""
    text = http.query.get(name, "")
    if not text:
        return default
    value = whole_number(text, most)
    if value is None:
        raise InvalidRequest(f"{name} is a whole number from 0 to {most}, not {text[:40]!r}", param=name)
    return value
