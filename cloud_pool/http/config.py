"""The sections `server`, `operator` and `grpc` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds
from causeway_server.router.web_origins import HostName, Origin

MAX_PORT = 65535
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"  # address to listen on; any other than loopback needs tokens: `token_file` or `identity`
    port: Port = 8090  # TCP port; 0: any free port, which the ready line names
    token_file: str = ""  # file with lines of `<device> <token or sha256:hex> [grants]`; empty: no static tokens
    # further names, without a port, that `Host` may have while no token is needed; others get 421. Loopback names and
    # `host` are always taken; where tokens are needed, any name is
    hosts: tuple[HostName, ...] = ()
    # web pages of other origins that may use the gateway, as `https://app.example`; `null` and `file://` are embedded
    # web views, and `null` is any sandboxed page, too
    origins: tuple[Origin, ...] = ()
    max_body_bytes: Positive = 8 * 1024 * 1024  # a larger request body is refused with 413
    # bodies, and audio clips of live sessions, above 64 KiB in memory at once; one tenant has half at most; beyond: 429
    max_body_memory_bytes: Annotated[int, Meta(ge=8 * 1024 * 1024)] = 256 * 1024 * 1024
    # open connections, fewer where the kernel allows the process few files; idle ones make room, and one tenant's
    # requests have half of them at most
    max_connections: Positive = 4096
    read_timeout_s: Seconds = 20.0  # a whole request must have arrived by then
    drain_s: Pause = 20.0  # on SIGTERM, how long requests in progress may still take
    default_deadline_s: Seconds = 120.0  # time for a whole request; `x-causeway-deadline-ms` may shorten it
    # longest silence of a stream: a comment ends it, and a stream without an answer by then begins with status 200 and
    # without the headers of its tier; 0: no limit
    heartbeat_s: Pause = 0.0
    readiness_cache_s: Pause = 5.0  # how long the result of /readyz, a real inference, is cached
    zone: str = ""  # zone of this gateway: endpoints of the same zone are preferred; empty: no preference


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operators' own address: metrics, readiness in detail, and calls that change the gateway."""

    host: str = "127.0.0.1"  # any other than loopback needs `token_file` or `identity.key_file`
    port: Port | None = None  # TCP port; 0: any free one; default: 100 above `server.port`, or 0 if that is 0
    # lines of `<name> <token>` or `<name> sha256:<hex>`, beside signed tokens with the scope `admin`; empty, and no
    # `identity.key_file`: the token of `state_dir`/operator-token, for all but GET of /metrics and /readyz
    token_file: str = ""


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service `causeway.v1.Generation`; needs the extra `grpc`."""

    host: str = "127.0.0.1"  # address of the gRPC service; any other than loopback needs tokens, as `server.host`
    port: Port | None = None  # its TCP port; 0: any free port, which the ready line names; not set: no gRPC service
    max_calls: Annotated[int, Meta(ge=1)] = (
        1024  # calls in progress, of one tenant at most half; beyond: RESOURCE_EXHAUSTED
    )
