"""Redis client: commands and scripts in, plain replies out; its errors are translated here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.errors import ConfigError

from ..errors import JobStoreRefused, JobStoreUnavailable

Reply = bytes | int | None | list["Reply"]
Argument = bytes | str | int | float
_RETRIES = 3
_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 512  # a client that follows events holds one


def redis_time() -> float:
    """Stand for Redis's own clock, as the clock of a store: Redis then reads the time itself."""
    return -1.0


class RedisClient:
    """Runs commands and scripts, and retries them when the connection breaks: all of them can be repeated.

    Args:
        prefix: of all keys; each script gets it as KEYS[1]
        scripts: Lua by name
    """

    def __init__(self, url: str, prefix: str, scripts: Mapping[str, str]) -> None:
        """Raises ConfigError for an invalid URL."""
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                max_connections=_MAX_CONNECTIONS,
                retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), _RETRIES),
                retry_on_error=[RedisConnectionError, RedisTimeoutError],
            )
        except ValueError as error:
            raise ConfigError(str(error), where="jobs.redis") from error
        self._redis.response_callbacks.clear()  # replies as Redis sends them: lists, bytes, numbers
        self.prefix = prefix
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts.items()}

    def key(self, *parts: str) -> str:
        """Return a key below the prefix."""
        return ":".join((self.prefix, *parts))

    async def command(self, *arguments: Argument) -> Reply:
        """Run a command. Raises JobStoreUnavailable."""
        try:
            return cast("Reply", await self._redis.execute_command(*arguments))  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def run(self, script: str, *arguments: Argument) -> Reply:
        """Run a script by its name. Raises JobStoreUnavailable."""
        try:
            return cast("Reply", await self._scripts[script](keys=[self.prefix], args=list(arguments)))
        except (RedisError, OSError) as error:
            raise _translate(error) from error

    async def now_ms(self, clock: Callable[[], float]) -> int:
        """Return the unix time of `clock`; for `redis_time` ask Redis. Raises JobStoreUnavailable."""
        now = int(clock() * 1000)
        if now >= 0:
            return now
        seconds, micros = as_list(await self.command("TIME"))
        return as_int(seconds) * 1000 + as_int(micros) // 1000

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()


def _translate(error: Exception) -> JobStoreUnavailable:
    # Redis's message may quote arguments, and those hold prompts: keep only its first word, the error code.
    if isinstance(error, ResponseError):
        return JobStoreRefused(f"the job store refuses ({str(error).partition(' ')[0][:32]})", retry_after_s=2.0)
    return JobStoreUnavailable(f"the job store does not answer ({type(error).__name__})", retry_after_s=2.0)


def as_fields(reply: Reply) -> dict[str, bytes]:
    """Return a flat list of names and values, as of HGETALL, as a dict."""
    flat = as_list(reply)
    return {as_text(name): as_bytes(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def as_list(reply: Reply) -> list[Reply]:
    """Return a list; empty for any other reply."""
    return reply if isinstance(reply, list) else []


def as_bytes(reply: Reply) -> bytes:
    """Return bytes; empty for nil."""
    return reply if isinstance(reply, bytes) else b"" if reply is None else str(reply).encode()


def as_text(reply: Reply) -> str:
    """Return a string; empty for nil."""
    return as_bytes(reply).decode("utf-8", "replace")


def as_int(reply: Reply) -> int:
    """Return a number; 0 for nil."""
    return int(as_bytes(reply) or 0)
