"""Whether this Redis keeps what it acknowledged when it is killed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from router.errors import ConfigError

from .database import Database, items, text
from .errors import StoreRefused, StoreUnavailable

_log = logging.getLogger("causeway.cloud.jobs")
_WANTED: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}


def faults(settings: Mapping[str, str]) -> tuple[str, ...]:
    """What would lose an accepted job, as `name is …: set it to …`."""
    return tuple(
        f"{name} is {settings.get(name, 'unknown')}: set it to {value}"
        for name, value in _WANTED.items()
        if settings.get(name) != value and not (name == "maxmemory-policy" and settings.get("maxmemory") == "0")
    )


async def check(database: Database, durability: Literal["require", "warn"]) -> None:
    """Raises ConfigError, or with `warn` logs it. A Redis that hides its settings counts as one that may forget."""
    settings: dict[str, str] = {}
    hidden = ""
    try:
        for name in (*_WANTED, "maxmemory"):
            flat = items(await database.command("CONFIG", "GET", name))
            settings |= {text(key): text(value) for key, value in zip(flat[::2], flat[1::2], strict=True)}
    except StoreRefused as error:
        hidden = f"its settings are hidden: {error.message}"
    except StoreUnavailable as error:
        raise ConfigError(error.message, where="jobs.redis") from error
    found = (hidden,) if hidden else faults(settings)
    if not found:
        return
    message = f"an accepted job could be lost by this Redis: {'; '.join(found)}"
    if durability == "require":
        raise ConfigError(f"{message}. Or accept that with `durability: warn`.", where="jobs.redis")
    _log.warning(message)
