"""The gateway's configuration as frozen structs; `loader` reads and checks the file.

The comment of each field is its meaning in the reference table of cloud_pool/README.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.types import Modality
from router.web_origins import HostName, Origin, WebOrigins, listener_hosts

from ..accounts.identity.config import IdentityConfig
from ..accounts.tenants.config import TenantsConfig
from ..admission.config import AdmissionConfig, AdmissionSettings
from ..balancing.config import LoadBalancing, LoadBalancingConfig
from ..balancing.discovery import EndpointAddress, parse_endpoint_address
from ..cache.config import CacheConfig
from ..degradation.config import DegradationConfig
from ..dispatch.config import RetryBudgetConfig
from ..jobs.config import JobsConfig
from ..parts.config import PartsConfig
from ..redis.config import RedisAddress
from ..streams.config import StreamsConfig
from ..upstreams.triton.sampling_parameters import GuidedKey

MAX_PORT = 65535
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
TierAbility = Literal["chat", "completion", "embedding", "audio", "image", "file"]
PARTS: tuple[Modality, ...] = ("audio", "image", "file")
"""What an encoder reads."""
DEFAULT_TIER = "assistant-large"
OPERATOR_PORT_OFFSET = 100
"""From `server.port` to the operators' port, unless that is configured."""
DEFAULT_TRITON = "127.0.0.1:8001"


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
    # bodies, and sounds of live sessions, above 64 KiB in memory at once; one tenant has half at most; beyond: 429
    max_body_memory_bytes: Annotated[int, Meta(ge=8 * 1024 * 1024)] = 256 * 1024 * 1024
    # open connections, fewer where the kernel allows the process few files; idle ones make room, and one tenant's
    # requests have half of them at most
    max_connections: Positive = 4096
    read_timeout_s: Seconds = 20.0  # a whole request must have arrived by then
    drain_s: Pause = 20.0  # on SIGTERM, how long requests in progress may still take
    default_deadline_s: Seconds = 120.0  # time for a whole request; `x-causeway-deadline-ms` may shorten it
    readiness_cache_s: Pause = 5.0  # how long the result of /readyz, a real inference, is cached
    zone: str = ""  # zone of this gateway: endpoints of the same zone are preferred; empty: no preference


class OperatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operators' own address: metrics, readiness in detail, and calls that change the gateway."""

    host: str = "127.0.0.1"  # any other than loopback needs `token_file` or `identity.key_file`
    port: Port | None = None  # TCP port; 0: any free one; default: 100 above `server.port`, or 0 if that is 0
    # lines of `<name> <token>` or `<name> sha256:<hex>`, beside signed tokens with the scope `admin`; empty, and no
    # `identity.key_file`: the token of `state_dir`/operator-token, for all but GET of /metrics and /readyz
    token_file: str = ""


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model in Triton under the name that callers use."""

    name: Annotated[str, Meta(min_length=1)] = DEFAULT_TIER  # what clients write as `model`
    aliases: tuple[str, ...] = ()  # other names for the tier
    triton: str = DEFAULT_TRITON  # host:port of Triton's gRPC
    # instead of `triton`, many: `host:port` or `dns:name:port`, each with an optional `@zone`
    endpoints: tuple[str, ...] = ()
    # `least_loaded`, or `prefix_affinity`: a conversation also returns to the endpoint that cached its prefix
    load_balancing: LoadBalancing = "least_loaded"
    model: str = ""  # the model's name in Triton; empty: the tier's name
    # what clients may ask of it: `chat`, `completion`, `embedding`; or what it reads, being an encoder: `audio`,
    # `image`, `file`; a tier of `[embedding]` and an encoder need no template
    can: Annotated[tuple[TierAbility, ...], Meta(min_length=1)] = ("chat", "completion")
    # LoRA adapter of the model that the tier's requests use, `lora_name` in Triton's vLLM backend; empty: none
    adapter: str = ""
    artifact: str = ""  # supplies chat template, control tokens and context length; empty: the tier's name
    template_file: str = ""  # a Jinja chat template instead of the artifact's, for a stock vLLM or TensorRT-LLM tier
    special_tokens: tuple[str, ...] = ()  # with `template_file`: tokens that a user's text must not be able to spell
    bos: str = ""  # with `template_file`: the beginning-of-sequence token
    eos: str = ""  # with `template_file`: the end-of-sequence token
    context_tokens: Count = 0  # context length; 0: the artifact's
    max_tokens: Count = 0  # limit of an answer where the request has none; 0: the whole context
    max_sequences: Positive = 128  # sequences (prompts × n) of one request; more are refused with 400
    # upper bound of sequences in one endpoint's Triton at once; the tier's permits are this times
    # the endpoints that take requests, divided between the gateways and workers that share a Redis
    concurrency: Positive = 16
    # lower bound of a gateway's limit, which follows the times to first token; 0: the limit is its part of the permits
    min_concurrency: Count = 1
    ttft_objective_s: Seconds = 2.0  # objective for interactive requests, from arrival to first token
    max_queued: Count = 64  # sequences that may wait for their request to begin; beyond that clients get 429
    admission: AdmissionConfig = AdmissionConfig()
    max_attempts: Positive = 3  # endpoints that one request may be sent to before its first token; 1: no retry
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    # restrict tool-call arguments to words of the user's message, for artifacts with `answers: calls`
    restrict_tool_arguments: bool = True
    # where the tier's vLLM backend reads grammars: `structured_outputs` since release 25.09
    guided_key: GuidedKey = "guided_decoding"

    @property
    def is_encoder(self) -> bool:
        """Whether it reads parts of requests, and generates nothing."""
        return set(self.can).issubset(PARTS)

    @property
    def admission_settings(self) -> AdmissionSettings:
        """Those of a gateway that starts, before it knows how many endpoints take requests."""
        return AdmissionSettings(
            permits=self.concurrency * len(self.endpoint_addresses),
            # What an encoder takes says nothing about how many wait inside: it depends on the part.
            min_permits=0 if self.is_encoder else self.min_concurrency,
            max_queued=self.max_queued,
            ttft_objective_s=self.ttft_objective_s,
            config=self.admission,
        )

    @property
    def endpoint_addresses(self) -> tuple[EndpointAddress, ...]:
        """Raises ConfigError."""
        return tuple(parse_endpoint_address(text) for text in self.endpoints or (self.triton,))


class RealtimeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Live sessions over WebSocket."""

    # live sessions of this gateway, of one tenant at most half; beyond: 429, unless one that was cut gives way
    max_sessions: Positive = 1024
    max_items: Annotated[int, Meta(ge=2)] = 256  # items of a session's conversation; the oldest ones give way
    # size of a session's conversation; a client's event may have twice as much
    max_bytes: Annotated[int, Meta(ge=4096)] = 256 * 1024
    replay_bytes: Count = 256 * 1024  # sent events that are kept for a connection that is cut
    # sounds of a session's conversation together, and of the one that is being sent; a second takes 64 kB
    max_audio_s: Seconds = 30.0
    # how long a session whose connection was cut can be resumed, its running answer going on; 0: it ends at once
    resume_s: Pause = 30.0
    idle_s: Seconds = 900.0  # a session without an event of its client and without an answer ends after this time
    ping_s: Annotated[float, Meta(ge=1)] = 20.0  # between pings; a client that is silent for half of it then is gone


class GrpcConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gRPC service `causeway.v1.Generation`; needs the extra `grpc`."""

    host: str = "127.0.0.1"  # address of the gRPC service; any other than loopback needs tokens, as `server.host`
    port: Port | None = None  # its TCP port; 0: any free port, which the ready line names; not set: no gRPC service
    max_calls: Positive = 1024  # calls in progress, of one tenant at most half; beyond: RESOURCE_EXHAUSTED


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str = ""  # OpenTelemetry collector that accepts OTLP over HTTP, as `http://host:4318`; empty: no traces
    # share of the requests without a trace context that are traced
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0


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
    realtime: RealtimeConfig = RealtimeConfig()
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
