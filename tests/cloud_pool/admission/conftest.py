from __future__ import annotations

from tests.redis_server import redis_server as redis_server  # a fixture
