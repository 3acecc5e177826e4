"""The gateway's configuration as frozen structs; `loader` reads and checks the file.

Each section is in the room that it configures; the comment of each field is its meaning in the reference table of
cloud_pool/README.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.serving.config import TracingConfig
from router.web_origins import WebOrigins, listener_hosts

from ..accounts.identity.config import IdentityConfig
from ..accounts.tenants.config import TenantsConfig
from ..cache.config import CacheConfig
from ..degradation.config import DegradationConfig
from ..dispatch.config import LoadBalancingConfig
from ..http.config import GrpcConfig, OperatorConfig, ServerConfig
from ..parts.config import PartsConfig
from ..redis.config import RedisAddress
from ..sessions.config import GatewaySessionConfig
from ..storage.config import JobsConfig
from ..streams.config import StreamsConfig
from ..tiers.config import TierConfig

OPERATOR_PORT_OFFSET = 100
"""From `server.port` to the operators' port, unless that is configured."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    operator: OperatorConfig = OperatorConfig()
    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)] = (TierConfig(),)
    # key of Triton's model control, the --key-file of `causeway-cloud triton`; empty: the account's own,
    # ~/.local/state/causeway-triton/key
    triton_key_file: str = ""
    load_balancing: LoadBalancingConfig = LoadBalancingConfig()
    degradation: DegradationConfig = DegradationConfig()
    # folder of the operators' token, which is made at start; empty: `$STATE_DIRECTORY`, else
    # `~/.local/state/causeway-cloud`
    state_dir: str = ""
    model_dirs: tuple[str, ...] = ()  # folders searched for artifacts before the account's own and the ones that ship
    # that all gateways and workers share: a URL, or the keys below; empty: none
    redis: RedisAddress = ""
    identity: IdentityConfig = IdentityConfig()
    tenants: TenantsConfig = TenantsConfig()
    jobs: JobsConfig = JobsConfig()
    streams: StreamsConfig = StreamsConfig()
    cache: CacheConfig = CacheConfig()
    realtime: GatewaySessionConfig = GatewaySessionConfig()
    parts: PartsConfig = PartsConfig()
    grpc: GrpcConfig = GrpcConfig()
    tracing: TracingConfig = TracingConfig()
    audit_file: str = ""  # file of audit records, one per request and without content; `-`: stdout; empty: none
    # level: debug, info, warning or error; none of them logs prompts or answers
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"  # `text`, or `json`: one object per line, with the request's id

    @property
    def web_origins(self) -> WebOrigins:
        """The web pages that may use the public address."""
        needs_key = bool(self.server.token_file) or self.identity.signed
        hosts = listener_hosts(self.server.host, self.server.hosts, needs_key=needs_key)
        return WebOrigins(self.server.origins, hosts, "server.origins")

    @property
    def has_operator_tokens(self) -> bool:
        """Whether the configuration says which tokens operators have; else the gateway makes one."""
        return bool(self.operator.token_file or self.identity.key_file)

    @property
    def operator_web_origins(self) -> WebOrigins:
        """The operators' address is for programs: no page of another origin may use it."""
        hosts = listener_hosts(self.operator.host, self.server.hosts, needs_key=self.has_operator_tokens)
        return WebOrigins(hosts=hosts)

    @property
    def operator_server(self) -> ServerConfig:
        """The operators' address, with the limits of `server`."""
        port = self.operator.port
        if port is None:
            port = self.server.port and self.server.port + OPERATOR_PORT_OFFSET
        return msgspec.structs.replace(self.server, host=self.operator.host, port=port)
