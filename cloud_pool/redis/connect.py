"""Clients of a Redis deployment: one server, the master behind Sentinels, or a cluster; and the diagnosis of faults.

Messages for operators name the service, its address without a password, and the fix. A Redis that evicts keys is
detected before it loses budgets, usage and revocations without an error.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import anyio
import msgspec
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

from .config import RedisAddress, RedisTarget, parse_redis, shown_address

_TO_DO = "Start Redis, or correct its address (`redis` in the configuration, or --redis)."
_WRONG_DATA = ("WRONGTYPE", "is not an integer", "is not a valid float", "would overflow", "arithmetic on", "with nil")
_addresses: WeakKeyDictionary[redis.asyncio.Redis, str] = WeakKeyDictionary()
"""Addresses of clients, without a password, for messages about their faults."""
_CHECK_AGAIN_S: Final = 30.0  # the setting can be changed while Redis runs, and another Redis may take its place
_ANSWER_S: Final = 5.0
log = logging.getLogger(__name__)


def client_fault(error: Exception, client: redis.asyncio.Redis | None) -> str:
    """Describe an error raised by a call of `client`, like `redis_fault`."""
    return redis_fault(error, "" if client is None else _addresses.get(client, ""))


def redis_fault(error: Exception, address: str) -> str:
    """Describe a RedisError, OSError or TimeoutError of a call. `address`: without a password; "" if unknown."""
    name = f"Redis at {address}" if address else "Redis"
    if isinstance(error, BusyLoadingError):
        return f"{name} is still loading its data: {error}"
    if isinstance(error, AuthenticationError):
        return f"{name} refuses the login: {error}. Correct the user and the password in the configuration."
    if isinstance(error, MasterNotFoundError):
        return f"{name}: the Sentinels do not name a master: {error}. {_TO_DO}"
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return f"{name} does not answer in time. Check whether it is overloaded, stopped or unreachable."
    if isinstance(error, RedisConnectionError | OSError):
        return f"{name} cannot be reached: {_reason(error)}. {_TO_DO}"
    return f"{name} answers with an error: {str(error) or type(error).__name__}"


def is_wrong_data(error: BaseException | None) -> bool:
    """Return whether a command failed because of the data in its keys. It then fails again, and only for these keys."""
    return isinstance(error, ResponseError) and any(text in str(error) for text in _WRONG_DATA)


def is_unreachable(error: BaseException | None) -> bool:
    """Return whether Redis did not answer at all; False if it answered with an error."""
    return isinstance(error, RedisConnectionError | RedisTimeoutError | OSError)


def _reason(error: Exception) -> str:
    """Return the operating system's message instead of redis-py's, which repeats the error number and the host."""
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return "its host name is unknown"
        if isinstance(cause, OSError) and cause.errno and not isinstance(cause, RedisError):
            return os.strerror(cause.errno).lower() if cause.errno > 0 else str(cause)
    return (str(error) or type(error).__name__).rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


async def eviction_fault(client: redis.asyncio.Redis) -> str:
    """Return why a Redis, or a cluster's primary, may evict keys, and the fix; "" if it does not. Raises RedisError.

    INFO is used because managed services that refuse CONFIG allow it.
    """
    name = f"Redis at {_addresses[client]}" if client in _addresses else "Redis"
    try:
        nodes = await _memory(client)
    except NoPermissionError:
        return f"{name} does not tell whether it evicts keys: permit INFO for its user."
    policies = sorted({str(node["maxmemory_policy"]) for node in nodes if _evicts(node)})
    if not policies:
        return ""
    return (
        f"{name} evicts keys when its memory is full (maxmemory-policy {', '.join(policies)}), and so "
        "loses tenants' budgets, usage and revocations. Set maxmemory-policy to noeviction."
    )


@dataclass(eq=False, repr=False)
class EvictionCheck:
    """Checks for eviction at the start and every 30 s."""

    client: redis.asyncio.Redis | None  # client; None without a Redis, which means no fault
    fault: str = ""  # last result of `eviction_fault`

    async def watch(self) -> None:
        """Check until cancelled."""
        while self.client is not None:
            await self.check()
            await anyio.sleep(_CHECK_AGAIN_S)

    async def check(self) -> None:
        """Check once, and log changes. If Redis does not answer, the last result is kept."""
        if self.client is None:
            return
        try:
            with anyio.fail_after(_ANSWER_S):
                fault = await eviction_fault(self.client)
        except (RedisError, OSError, TimeoutError):
            return  # Others report that.
        if fault and fault != self.fault:
            log.error(fault)
        elif self.fault and not fault:
            log.info("Redis no longer evicts keys.")
        self.fault = fault


async def _memory(client: redis.asyncio.Redis) -> tuple[Mapping[str, Any], ...]:
    opened: object = client  # of a cluster it is a RedisCluster, which has the same methods
    if not isinstance(opened, redis.asyncio.RedisCluster):
        return (await client.info("memory"),)
    nodes = await opened.info("memory", target_nodes=redis.asyncio.RedisCluster.PRIMARIES)
    return tuple(nodes.values()) if "maxmemory_policy" not in nodes else (nodes,)


def _evicts(memory: Mapping[str, Any]) -> bool:
    return bool(memory["maxmemory"]) and memory["maxmemory_policy"] != "noeviction"


_CLUSTER_RETRIES = 3  # each asks the cluster again which node has the key
_CLUSTER_CONNECTIONS = 1024  # to each node; a cluster's client does not wait for a free one


class ConnectionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Connection options of a client. Times are in seconds."""

    connections: int = 64  # maximum number of connections; further calls wait for one
    connect_timeout_s: float = 2.0
    timeout_s: float | None = None  # time limit of each reply; None for redis-py's
    retry: Retry | None = None  # retry policy; None if callers retry
    raw: bool = False  # whether replies keep their RESP2 types: lists, bytes, numbers


_SHARED = ConnectionOptions()


class PasswordFile(CredentialProvider):
    """A user's password file, which is read for each connection, because it may change while the process runs."""

    def __init__(self, username: str, path: Path) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, or user and password. Raises AuthenticationError if the file cannot be read."""
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthenticationError(f"{self._path}: {error}") from error
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same as `get_credentials`; reading a line of a file does not block noticeably."""
        return self.get_credentials()


class _MasterPool(SentinelConnectionPool, redis.asyncio.BlockingConnectionPool):
    """Connections to the master that the Sentinels name. If all are in use, calls wait for one."""

    async def aclose(self) -> None:
        """Close the connections to the master and to the Sentinels."""
        await super().aclose()
        await self.sentinel_manager.aclose()


class _Cluster(redis.asyncio.RedisCluster):
    """A cluster's client that raises only RedisError."""

    async def initialize(
        self,
        additional_startup_nodes_info: list[tuple[str, int]] | None = None,
        last_failed_node_name: str | None = None,
    ) -> _Cluster:
        """Read the assignment of slots to nodes. Raises RedisError."""
        try:
            await super().initialize(additional_startup_nodes_info, last_failed_node_name)
        except RedisClusterException as error:  # no RedisError
            raise RedisConnectionError(str(error)) from error
        return self


async def _require_master(connection: Any) -> None:
    """Raise RedisConnectionError for a replica, which a late Sentinel may name: its reads would miss accepted data."""
    await connection.on_connect()
    await connection.send_command("ROLE")
    role, *_ = await connection.read_response()
    if role not in (b"master", "master"):
        raise RedisConnectionError("The Sentinel named a server that is not a master.")


def open_redis(
    address: RedisAddress, where: str = "redis", options: ConnectionOptions = _SHARED
) -> redis.asyncio.Redis:
    """Create a client (of a cluster a RedisCluster) that connects on first use. Raises ConfigError for a bad address.

    Without `options` it never retries, because each caller has its own timeout.
    """
    target = parse_redis(address, where)
    try:
        if target.topology == "cluster":
            client = _open_cluster(target, where, options)
        elif target.topology == "sentinel":
            client = _open_master(target, where, options)
        else:
            client = _open_server(target, where, options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"The URL is not a Redis URL: {error}", where=where) from error
    _addresses[client] = shown_address(address)
    if options.raw and target.topology == "cluster":
        client.set_response_callback("XREAD", _raw)  # the client itself needs the other callbacks
    elif options.raw:
        client.response_callbacks.clear()
    return client


def _open_server(target: RedisTarget, where: str, options: ConnectionOptions) -> redis.asyncio.Redis:
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        target.config.url, max_connections=options.connections, timeout=None, **_keywords(target, where, options)
    )
    if target.tls:
        pool.connection_class = _connection_class(target, where, Connection)
    return redis.asyncio.Redis.from_pool(pool)


def _open_master(target: RedisTarget, where: str, options: ConnectionOptions) -> redis.asyncio.Redis:
    config = target.config
    keywords = _keywords(target, where, options)
    without_retry = Retry(NoBackoff(), 0)  # the next Sentinel is asked instead
    at_sentinels = keywords | {"socket_timeout": options.connect_timeout_s, "retry": without_retry}
    at_sentinels["credential_provider"] = _password(
        config.sentinel_username, config.sentinel_password_file, f"{where}.sentinel_password_file"
    )
    sentinels = Sentinel(target.hosts, sentinel_kwargs=at_sentinels)  # type: ignore[no-untyped-call]
    for sentinel in sentinels.sentinels:
        sentinel.connection_pool.connection_class = _connection_class(target, where, Connection)
    keywords |= {
        "db": target.database,
        "redis_connect_func": _require_master,
        "connection_class": _connection_class(target, where, SentinelManagedConnection),
    }
    pool = _MasterPool(  # type: ignore[no-untyped-call]
        target.master, sentinels, max_connections=options.connections, timeout=None, **keywords
    )
    return redis.asyncio.Redis.from_pool(pool)


def _open_cluster(target: RedisTarget, where: str, options: ConnectionOptions) -> redis.asyncio.Redis:
    keywords = _keywords(target, where, options) | {"retry": Retry(NoBackoff(), _CLUSTER_RETRIES)}
    nodes = [ClusterNode(host, port) for host, port in target.hosts]
    cluster = _Cluster(startup_nodes=nodes, max_connections=_CLUSTER_CONNECTIONS, **keywords)
    connection = _connection_class(target, where, Connection)
    cluster.connection_kwargs["connection_class"] = connection  # of nodes that are found later
    for node in cluster.startup_nodes:
        node.connection_class = connection
    return cast("redis.asyncio.Redis", cluster)


def _raw(response: Any, **_options: Any) -> Any:
    return response


def _keywords(target: RedisTarget, where: str, options: ConnectionOptions) -> dict[str, Any]:
    """Return redis-py's arguments for each connection. Raises ConfigError."""
    config = target.config
    keywords: dict[str, Any] = {"socket_connect_timeout": options.connect_timeout_s, "retry": options.retry}
    if options.timeout_s is not None:
        keywords["socket_timeout"] = options.timeout_s
    if options.raw:
        keywords["protocol"] = 2
    password = _password(config.username, config.password_file, f"{where}.password_file")
    if password is not None:
        keywords["credential_provider"] = password
    return keywords


def _password(username: str, path: str, where: str) -> PasswordFile | None:
    if not path:
        return None
    password = PasswordFile(username, Path(path))
    try:
        password.get_credentials()
    except AuthenticationError as error:
        raise ConfigError(str(error), where=where) from error
    return password


def _connection_class(target: RedisTarget, where: str, base: type[Connection]) -> type[Connection]:
    """Return `base`, or with TLS one that reads changed certificates again, unlike redis-py's. Raises ConfigError."""
    if not target.tls:
        return base
    config = target.config
    files = TlsFiles(where=where, ca_file=config.ca_file, cert_file=config.cert_file, key_file=config.key_file)
    context = client_tls(files, alpn=())

    class TlsConnection(base):  # type: ignore[misc, valid-type]
        def _connection_arguments(self) -> Mapping[str, Any]:
            return {**super()._connection_arguments(), "ssl": context}

    return TlsConnection
