"""A real Redis on a Unix socket that can be killed and restarted on the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from tests import redis_server


class RedisServer(redis_server.RedisServer):
    @property
    def socket(self) -> Path:
        return self._folder / "r.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def listen(self) -> tuple[str, ...]:
        return ("--port", "0", "--unixsocket", str(self.socket))

    def client(self, **more: Any) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), **more)
