"""The sections `server`, `operator` and `grpc` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import ListenerTls, Pause, Positive, Seconds, doc
from causeway_server.router.web_origins import HostName, Origin

MAX_PORT = 65535
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[
        str, doc("Address to listen on. Any other than loopback needs tokens: `server.token_file` or `identity`.")
    ] = "127.0.0.1"
    port: Annotated[Port, doc("TCP port. 0: any free port, which the ready line names.")] = 8090
    tls: ListenerTls = ListenerTls()  # of the gRPC service, too
    token_file: Annotated[str, doc("File with lines of `<device> <token or sha256:hex> [grants]`. Empty: none.")] = ""
    hosts: Annotated[
        tuple[HostName, ...],
        doc(
            "Additional names, without a port, that `Host` may have while requests need no token; other names get "
            "421. Loopback names and `server.host` are always accepted."
        ),
    ] = ()
    origins: Annotated[
        tuple[Origin, ...],
        doc(
            "Web origins, besides the gateway's own, whose pages may use the gateway, such as `https://app.example`. "
            "`null` and `file://` are embedded web views; `null` is also any sandboxed page."
        ),
    ] = ()
    max_body_bytes: Annotated[Positive, doc("Maximum size of a request body; a larger one gets 413.")] = 8 * 1024 * 1024
    max_body_memory_bytes: Annotated[
        int,
        Meta(ge=8 * 1024 * 1024),
        doc(
            "Maximum memory for request bodies above 64 KiB and audio of live sessions. One tenant may use half; a "
            "request beyond that gets 429."
        ),
    ] = 256 * 1024 * 1024
    max_connections: Annotated[
        Positive,
        doc(
            "Maximum open connections, lowered to the process's file limit. Idle ones are closed to make room; one "
            "tenant's requests may hold half."
        ),
    ] = 4096
    read_timeout_s: Annotated[Seconds, doc("Maximum time to receive a whole request.")] = 20.0
    drain_s: Annotated[Pause, doc("Maximum time on SIGTERM for running requests to finish.")] = 20.0
    default_deadline_s: Annotated[Seconds, doc("Time limit of a request; `x-causeway-deadline-ms` may lower it.")] = (
        120.0
    )
    heartbeat_s: Annotated[
        Pause,
        doc(
            "Maximum silence of a stream before a comment is sent. A stream without an answer by then starts with "
            "status 200 and without tier headers. 0: no limit."
        ),
    ] = 0.0
    readiness_cache_s: Annotated[Pause, doc("Time for which the result of `/readyz`, an inference, is cached.")] = 5.0
    zone: Annotated[str, doc("Zone of this gateway, whose endpoints are preferred. Empty: no preference.")] = ""


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operators' own address: metrics, readiness in detail, and calls that change the gateway."""

    host: Annotated[
        str, doc("Address to listen on. Any other than loopback needs `operator.token_file` or `identity.key_file`.")
    ] = "127.0.0.1"
    port: Annotated[
        Port | None, doc("TCP port. 0: any free port. Default: `server.port` + 100, or 0 if that is 0.")
    ] = None
    tls: ListenerTls = ListenerTls()
    token_file: Annotated[
        str,
        doc(
            "File with lines of `<name> <token>` or `<name> sha256:<hex>`; signed tokens with the scope `admin` are "
            "also accepted. Empty, without `identity.key_file`: the token in `state_dir`/operator-token, for all but "
            "GET of `/metrics` and `/readyz`."
        ),
    ] = ""


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service `causeway.v1.Generation`; needs the extra `grpc`."""

    host: Annotated[
        str, doc("Address of the gRPC service. Any other than loopback needs tokens, as for `server.host`.")
    ] = "127.0.0.1"
    port: Annotated[
        Port | None,
        doc("TCP port of the gRPC service. 0: any free port, which the ready line names. Default: no gRPC service."),
    ] = None
    max_calls: Annotated[
        Positive, doc("Maximum calls in progress; one tenant may have half. A further one gets RESOURCE_EXHAUSTED.")
    ] = 1024
