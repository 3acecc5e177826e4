"""The sections `server`, `operator` and `grpc` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import ListenerTls, Pause, Positive, Seconds
from causeway_server.router.web_origins import HostName, Origin

MAX_PORT = 65535
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8090
    tls: ListenerTls = ListenerTls()  # of the gRPC service, too
    token_file: str = ""
    hosts: tuple[HostName, ...] = ()
    origins: tuple[Origin, ...] = ()
    max_body_bytes: Positive = 8 * 1024 * 1024
    max_body_memory_bytes: Annotated[int, Meta(ge=8 * 1024 * 1024)] = 256 * 1024 * 1024
    max_connections: Positive = 4096
    read_timeout_s: Seconds = 20.0
    drain_s: Pause = 20.0
    default_deadline_s: Seconds = 120.0
    heartbeat_s: Pause = 0.0
    readiness_cache_s: Pause = 5.0
    zone: str = ""


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operators' own address: metrics, readiness in detail, and calls that change the gateway."""

    host: str = "127.0.0.1"
    port: Port | None = None
    tls: ListenerTls = ListenerTls()
    token_file: str = ""


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service `causeway.v1.Generation`; needs the extra `grpc`."""

    host: str = "127.0.0.1"
    port: Port | None = None
    max_calls: Positive = 1024
