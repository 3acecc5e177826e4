"""Redis, behind one narrow door: commands and scripts in, plain replies out, its faults translated once."""

from __future__ import annotations

from collections.abc import Mapping
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
_ANSWER_S = 5.0
_CONNECTIONS = 512  # a client that follows events holds one


class RedisClient:
    """`scripts` by name; each gets the prefix as KEYS[1]. Retried when the connection breaks: all are repeatable."""

    def __init__(self, url: str, prefix: str, scripts: Mapping[str, str]) -> None:
        """Raises ConfigError for a URL that is none."""
        try:
            self._redis = redis.asyncio.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=_ANSWER_S,
                socket_connect_timeout=_ANSWER_S,
                max_connections=_CONNECTIONS,
                retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.25), _RETRIES),
                retry_on_error=[RedisConnectionError, RedisTimeoutError],
            )
        except ValueError as error:
            raise ConfigError(str(error), where="jobs.redis") from error
        self._redis.response_callbacks.clear()  # replies as they come: lists, bytes, numbers
        self.prefix = prefix
        self._scripts = {name: self._redis.register_script(text) for name, text in scripts.items()}

    def key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    async def command(self, *arguments: Argument) -> Reply:
        """Raises StoreUnavailable."""
        try:
            return cast("Reply", await self._redis.execute_command(*arguments))  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise _translated(error) from error

    async def run(self, script: str, *arguments: Argument) -> Reply:
        """Raises StoreUnavailable."""
        try:
            return cast("Reply", await self._scripts[script](keys=[self.prefix], args=list(arguments)))
        except (RedisError, OSError) as error:
            raise _translated(error) from error

    async def close(self) -> None:
        await self._redis.aclose()


def _translated(error: Exception) -> JobStoreUnavailable:
    # Redis's own words may quote arguments, and those hold prompts: only the first word, its error code, is kept.
    if isinstance(error, ResponseError):
        return JobStoreRefused(f"the job store refuses ({str(error).partition(' ')[0][:32]})", retry_after_s=2.0)
    return JobStoreUnavailable(f"the job store does not answer ({type(error).__name__})", retry_after_s=2.0)


def pairs(reply: Reply) -> dict[str, bytes]:
    """HGETALL's flat list as a dict."""
    flat = items(reply)
    return {text(name): data(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def items(reply: Reply) -> list[Reply]:
    return reply if isinstance(reply, list) else []


def data(reply: Reply) -> bytes:
    return reply if isinstance(reply, bytes) else b"" if reply is None else str(reply).encode()


def text(reply: Reply) -> str:
    return data(reply).decode("utf-8", "replace")


def number(reply: Reply) -> int:
    return int(data(reply) or 0)
