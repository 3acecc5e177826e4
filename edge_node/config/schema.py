"""The keys of the daemon's configuration; those that a fleet may set are in `router.bundle.settings`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.bundle.settings import (
    CloudSettings,
    DecisionsConfig,
    DeviceFilesSettings,
    EngineSettings,
    MqttSettings,
    OutboxSettings,
    OutboxWebhookSettings,
    PartsConfig,
    RealtimeConfig,
    ResponseCacheConfig,
)
from causeway_server.router.config import (
    Count,
    EgressLedgerConfig,
    ListenerTls,
    Pause,
    Positive,
    Seconds,
    TracingConfig,
)
from causeway_server.router.errors import ConfigError
from causeway_server.router.openai.wire import Tag
from causeway_server.router.policy.signals import CLOUD_NAME
from causeway_server.router.serving.issuers.config import IssuerConfig, check_issuers
from causeway_server.router.trackers import network_of
from causeway_server.router.types import Priority
from causeway_server.router.web_origins import HostName, Origin, is_loopback

CloudName = Annotated[str, Meta(pattern=rf"^{CLOUD_NAME}\Z")]
Port = Annotated[int, Meta(ge=0, le=65535)]

KeyRight = Literal["decisions", "erasure"]
"""`decisions`: read the decision records of all clients. `erasure`: erase the data of all clients."""


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An API key of the daemon."""

    name: Annotated[str, Meta(min_length=1)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tags: tuple[Tag, ...] = ()
    rights: tuple[KeyRight, ...] = ()


class DeviceIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `identity`: clients with tokens of an owner's issuers."""

    issuers: tuple[IssuerConfig, ...] = ()
    clock_skew_s: Annotated[float, Meta(ge=0, le=300)] = 30.0


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8080
    socket: str = ""
    tls: ListenerTls = ListenerTls()
    hosts: tuple[HostName, ...] = ()
    origins: tuple[Origin, ...] = ()
    max_connections: Positive = 1024
    max_body_bytes: Positive = 8 * 1024 * 1024
    read_timeout_s: Seconds = 20.0
    drain_s: Pause = 20.0
    keys: tuple[KeyConfig, ...] = ()
    default_deadline_s: Seconds = 120.0
    heartbeat_s: Pause = 0.0


class EngineConfig(EngineSettings, frozen=True, forbid_unknown_fields=True):
    model_dirs: tuple[str, ...] = ()


class CloudServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cloud that the device may use."""

    url: str
    key: str = ""
    key_file: str = ""
    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    region: str = ""
    fleet_token: bool | None = None


class CloudConfig(CloudSettings, frozen=True):
    """A cloud with the settings that all clouds share."""

    name: str = "main"
    url: str = ""
    key: str = ""
    ca_file: str = ""
    client_cert_file: str = ""
    client_key_file: str = ""
    region: str = ""
    fleet_token: bool = False


class OutboxWebhookConfig(OutboxWebhookSettings, frozen=True, forbid_unknown_fields=True):
    allowed_networks: tuple[str, ...] = ()
    allow_http: bool = False
    ca_file: str = ""
    regions: dict[str, str] = msgspec.field(default_factory=dict)


class OutboxConfig(OutboxSettings, frozen=True, forbid_unknown_fields=True):
    accept_parts: bool = False
    webhooks: OutboxWebhookConfig = OutboxWebhookConfig()


class DeviceFilesConfig(DeviceFilesSettings, frozen=True, forbid_unknown_fields=True):
    accept: bool = False
    ttl_s: Annotated[float, Meta(ge=1)] = 7 * 86400.0


class ResponsesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_responses: Positive = 1000
    max_bytes: Positive = 16 * 1024 * 1024
    max_total_bytes: Positive = 128 * 1024 * 1024
    ttl_s: Annotated[float, Meta(ge=1)] = 30 * 86400.0


class MqttTopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are taken as requests: those on topics that `filter` matches."""

    filter: Annotated[str, Meta(min_length=1)]
    form: Literal["chat", "text"] = "chat"
    tags: tuple[Tag, ...] = ()
    priority: Literal["interactive", "standard", "bulk"] = "standard"
    deadline_s: Seconds | None = None
    answer_topic: str = ""
    system: str = ""


class MqttConfig(MqttSettings, frozen=True, forbid_unknown_fields=True):
    url: str = ""
    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    client_id: str = ""
    topics: tuple[MqttTopicConfig, ...] = ()
    response_topics: tuple[str, ...] = ()
    state_topic: str = "causeway/{client_id}/state"


class EncryptionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_file: str = ""
    rotate_s: Seconds = 90 * 86400.0


class GuardModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Detectors of personal data, whose rules are in the policy."""

    names_model: str = ""


class ClientLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a client; 0 is unlimited."""

    priority: Priority = "interactive"
    tokens_per_minute: Count = 0
    usd_per_day: Pause = 0.0


class NamedLimits(ClientLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1)]


class LimitsConfig(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """The section `limits`: those of clients. The policy's `limits` bound all of them together."""

    default: ClientLimits = ClientLimits()  # of each client without an entry in `overrides`
    overrides: tuple[NamedLimits, ...] = ()

    @property
    def bound(self) -> bool:
        """Whether any client has a rate or a budget."""
        return any(each.tokens_per_minute or each.usd_per_day for each in (self.default, *self.overrides))

    def of(self, client: str) -> tuple[str, ClientLimits]:
        """Return whose limits are a client's, and what they are: its own, its tenant's, or the default."""
        for name in (client, client.partition("/")[0]):
            if (found := self._by_name.get(name)) is not None:
                return name, found
        return network_of(client), self.default

    @cached_property
    def _by_name(self) -> dict[str, ClientLimits]:
        return {each.name: each for each in self.overrides}

    def check(self) -> None:
        """Raise ConfigError for a name that is listed twice."""
        names = [each.name for each in self.overrides]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"The name {name!r} is listed twice.", where=f"limits.overrides[{index}]")


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trial_s: Seconds = 600.0
    trial_requests: Count = 200
    trial_max_s: Seconds = 86400.0
    telemetry_interval_s: Seconds = 60.0
    records_per_hour: Count = 120
    check_interval_s: Seconds = 900.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one daemon."""

    policy: str = ""
    state_dir: str = ""
    server: ServerConfig = ServerConfig()
    identity: DeviceIdentityConfig = DeviceIdentityConfig()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    clouds: dict[CloudName, CloudServer] = {}
    cloud: CloudSettings = CloudSettings()  # of all clouds
    cache: ResponseCacheConfig = ResponseCacheConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    jobs: OutboxConfig = OutboxConfig()
    files: DeviceFilesConfig = DeviceFilesConfig()
    responses: ResponsesConfig = ResponsesConfig()
    realtime: RealtimeConfig = RealtimeConfig()
    mqtt: MqttConfig = MqttConfig()
    encryption: EncryptionConfig = EncryptionConfig()
    parts: PartsConfig = PartsConfig()
    guard: GuardModelConfig = GuardModelConfig()
    tracing: TracingConfig = TracingConfig()
    egress_ledger: EgressLedgerConfig = EgressLedgerConfig()
    fleet: FleetConfig = FleetConfig()
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    @property
    def needs_key(self) -> bool:
        """Whether each client needs an API key or a token."""
        return bool(self.server.keys or self.identity.issuers)

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may ask without an API key, a token or a client certificate."""
        return not (self.needs_key or self.server.tls.client_ca_file or is_loopback(self.server.host))

    def check_clients(self) -> None:
        """Raise ConfigError for unusable issuers or limits, or if other machines would be answered without a key."""
        check_issuers(self.identity.issuers)
        self.limits.check()
        if self.is_exposed:
            raise ConfigError(
                f"The daemon would answer other machines on {self.server.host or 'all addresses'} without an API key. "
                "Set server.keys, identity.issuers or server.tls.client_ca_file, or listen on 127.0.0.1.",
                where="server.host",
            )

    @property
    def cloud_configs(self) -> tuple[CloudConfig, ...]:
        """The clouds in order, each with the settings of all clouds."""
        settings = msgspec.structs.asdict(self.cloud)
        only = len(self.clouds) == 1
        return tuple(
            CloudConfig(
                **settings,
                name=name,
                url=one.url,
                key=one.key,
                ca_file=one.ca_file,
                client_cert_file=one.client_cert_file,
                client_key_file=one.client_key_file,
                region=one.region,
                fleet_token=only and not one.key if one.fleet_token is None else one.fleet_token,
            )
            for name, one in self.clouds.items()
        )
