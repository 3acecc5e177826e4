"""Builds the gRPC address where it is configured. Imports nothing of gRPC otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.errors import ConfigError

from ..config.schema import Config
from ..core.body_memory import BodyMemory
from ..http.readiness import Readiness
from ..http.request_admission import RequestAdmission
from ..http.request_runner import RequestRunner

if TYPE_CHECKING:
    from .server import GrpcServer


def build_grpc(
    config: Config, admission: RequestAdmission, runner: RequestRunner, bodies: BodyMemory, readiness: Readiness
) -> GrpcServer | None:
    """Return None if no gRPC address is configured. Raises ConfigError if its packages are not installed."""
    if config.grpc.port is None:
        return None
    try:
        from .calls import GenerateCalls
        from .server import GrpcServer
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'causeway[grpc]'", where="grpc.port") from error
    timeout_s = config.server.read_timeout_s
    calls = GenerateCalls(admission, runner, bodies, max_calls=config.grpc.max_calls, read_timeout_s=timeout_s)
    return GrpcServer(config.grpc, config.server, calls, readiness.ready)
