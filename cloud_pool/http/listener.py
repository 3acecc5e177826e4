"""The gateway's addresses: how many connections they take, and which web pages may send requests there."""

from __future__ import annotations

import logging
import resource
import time

from router.serving.listener import Address, ConnectionTable, Listener
from router.serving.request import Handler
from router.web_origins import WebOrigins

from .config import ServerConfig

_log = logging.getLogger("causeway.cloud.listener")


def gateway_listener(config: ServerConfig, handle: Handler, origins: WebOrigins, key: str = "server.port") -> Listener:
    """Return the listener of one address; the caller starts and closes it.

    Args:
        handle: handles each request.
        origins: which web pages may send requests.
        key: the configuration key of the address, for errors.
    """
    connections = ConnectionTable("tcp", allowed_connections(config.max_connections), time.monotonic)
    address = Address(connections, origins, key, config.host, config.port)
    return Listener(handle, (address,), config.read_timeout_s)


def allowed_connections(most: int) -> int:
    """Raise the process's file limit as far as needed and return how many connections, of `most`, may use it.

    The other half of the files is for Triton, Redis and logs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * most:
        _log.warning("this process may open only %d files: %d connections", hard, hard // 2)
    wanted = 2 * most if hard == resource.RLIM_INFINITY else min(2 * most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return min(most, wanted // 2)
