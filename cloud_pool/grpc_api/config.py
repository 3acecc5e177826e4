"""The section `grpc` of the gateway's configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ..http.config import Port


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service `causeway.v1.Generation`; needs the extra `grpc`."""

    host: str = "127.0.0.1"  # address of the gRPC service; any other than loopback needs tokens, as `server.host`
    port: Port | None = None  # its TCP port; 0: any free port, which the ready line names; not set: no gRPC service
    max_calls: Annotated[int, Meta(ge=1)] = (
        1024  # calls in progress, of one tenant at most half; beyond: RESOURCE_EXHAUSTED
    )
