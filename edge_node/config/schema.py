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
    NamesModel,
    Pause,
    Positive,
    Seconds,
    TracingConfig,
    doc,
)
from causeway_server.router.errors import ConfigError
from causeway_server.router.jobs.webhooks import WebhookFormat
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

    name: Annotated[str, Meta(min_length=1), doc("Name of the client that uses the key.")]
    sha256: Annotated[
        str, Meta(pattern="^[0-9a-f]{64}$"), doc("SHA-256 of the key in hex. The key itself is not stored.")
    ]
    tags: Annotated[tuple[Tag, ...], doc("Tags added to every request that uses this key.")] = ()
    rights: Annotated[
        tuple[KeyRight, ...],
        doc("Additional rights. `decisions`: read all keys' decision records; `erasure`: erase all clients' data."),
    ] = ()


class DeviceIdentityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The section `identity`: clients with tokens of an owner's issuers."""

    issuers: Annotated[
        tuple[IssuerConfig, ...],
        doc("OpenID Connect issuers of the owner whose tokens are accepted beside `server.keys`."),
    ] = ()
    clock_skew_s: Annotated[float, Meta(ge=0, le=300), doc("Accepted clock difference to an issuer.")] = 30.0


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: Annotated[
        str,
        doc(
            "Address to listen on. Any other than loopback needs `server.keys`, `identity.issuers`, or client "
            "certificates (`server.tls.client_ca_file`)."
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, doc("TCP port. 0: any free port.")] = 8080
    socket: Annotated[str, doc("Path of an additional Unix socket to listen on. Empty: none.")] = ""
    tls: ListenerTls = ListenerTls()
    hosts: Annotated[
        tuple[HostName, ...],
        doc(
            "Additional names, without a port, that a request's `Host` may have; other names get 421. Loopback names "
            "and `server.host` are always accepted. Any name is accepted on the Unix socket, with `server.keys`, and "
            "beyond loopback."
        ),
    ] = ()
    origins: Annotated[
        tuple[Origin, ...],
        doc(
            "Web origins, besides the daemon's own, whose pages may use the daemon, such as `https://app.example`. "
            "`null` and `file://` are embedded web views; `null` is also any sandboxed page."
        ),
    ] = ()
    max_connections: Annotated[
        Positive,
        doc(
            "Maximum open TCP connections, and as many on the Unix socket. A further one closes the connection that "
            "has been idle longest."
        ),
    ] = 1024
    max_body_bytes: Annotated[Positive, doc("Maximum size of a request body; a larger one gets 413.")] = 8 * 1024 * 1024
    read_timeout_s: Annotated[Seconds, doc("Maximum time to receive a whole request.")] = 20.0
    drain_s: Annotated[Pause, doc("Maximum time on SIGTERM for running requests to finish.")] = 20.0
    keys: Annotated[
        tuple[KeyConfig, ...],
        doc(
            "API keys. Empty: requests need no key. A key reads the decision records of its own requests only, unless "
            "it has the right `decisions`."
        ),
    ] = ()
    default_deadline_s: Annotated[Seconds, doc("Deadline of a request that sets none.")] = 120.0
    heartbeat_s: Annotated[
        Pause,
        doc(
            "Maximum silence of a stream before a comment is sent. A stream without a route by then starts with "
            "status 200 and without route headers. 0: no limit."
        ),
    ] = 0.0


class EngineConfig(EngineSettings, frozen=True, forbid_unknown_fields=True):
    model_dirs: Annotated[
        tuple[str, ...],
        doc("Folders searched for models before `~/.local/share/causeway/models` and the models that ship."),
    ] = ()


class CloudServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cloud that the device may use."""

    url: Annotated[str, doc("Base URL of an OpenAI-compatible server, usually ending in `/v1`.")]
    key: Annotated[str, doc("Bearer token for the cloud. Prefer `clouds.NAME.key_file`.")] = ""
    key_file: Annotated[str, doc("File with the bearer token on one line, read at start.")] = ""
    ca_file: Annotated[str, doc("PEM file of the CA of the cloud's certificate. Empty: the system's CAs.")] = ""
    client_cert_file: Annotated[
        str,
        doc(
            "PEM file of this device's certificate, for clouds that require one. Empty: that of the fleet, for the "
            "cloud that gets the fleet's token."
        ),
    ] = ""
    client_key_file: Annotated[str, doc("PEM file with the private key of `clouds.NAME.client_cert_file`.")] = ""
    region: Annotated[
        str, doc("Region of the cloud, for requests that are bound to regions. Empty: outside every region.")
    ] = ""
    fleet_token: Annotated[
        bool | None,
        doc(
            "Send the fleet's token to this cloud, in place of a key. By default a cloud without a key gets it if it "
            "is the only one."
        ),
    ] = None


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
    allowed_networks: Annotated[
        tuple[str, ...],
        doc(
            "Private networks that webhooks may reach, such as `10.1.0.0/16`. With `127.0.0.0/8`, applications can "
            "have the device send POST requests to any of its loopback services."
        ),
    ] = ()
    allow_http: Annotated[bool, doc("Allow webhooks to `http://` URLs.")] = False
    ca_file: Annotated[str, doc("PEM file of the CA of the receivers' certificates. Empty: the system's CAs.")] = ""
    regions: Annotated[
        dict[str, str],
        doc("Regions of receivers, by host. Jobs that are bound to regions have webhooks only to receivers in them."),
    ] = msgspec.field(default_factory=dict)

    def format_of(self, _owner: str) -> WebhookFormat:
        return self.format


class OutboxConfig(OutboxSettings, frozen=True, forbid_unknown_fields=True):
    accept_parts: Annotated[
        bool, doc("Accept jobs with audio, images and files, whose bytes stay on disk until the job has ended.")
    ] = False
    webhooks: OutboxWebhookConfig = OutboxWebhookConfig()


class DeviceFilesConfig(DeviceFilesSettings, frozen=True, forbid_unknown_fields=True):
    accept: Annotated[
        bool,
        doc("Let clients upload files and name them in requests. Files stay on disk until they expire or are deleted."),
    ] = False
    ttl_s: Annotated[
        float, Meta(ge=1), doc("Time for which an uploaded file is kept, unless its upload asks for less.")
    ] = 7 * 86400.0


class ResponsesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_responses: Annotated[
        Positive,
        doc("Maximum stored responses and conversations' turns of one client. Its oldest ones give way to new ones."),
    ] = 1000
    max_bytes: Annotated[Positive, doc("Maximum size of what is stored for one client, likewise.")] = 16 * 1024 * 1024
    max_total_bytes: Annotated[Positive, doc("Maximum size of what is stored for all clients, likewise.")] = (
        128 * 1024 * 1024
    )
    ttl_s: Annotated[
        float,
        Meta(ge=1),
        doc("Time for which a response is kept. A conversation is kept for as long after its last change."),
    ] = 30 * 86400.0


class MqttTopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are taken as requests: those on topics that `filter` matches."""

    filter: Annotated[str, Meta(min_length=1), doc("Topic filter of the messages to handle as requests.")]
    form: Annotated[
        Literal["chat", "text"], doc("Form of a message: `chat`, an OpenAI chat body, or `text`, a user's message.")
    ] = "chat"
    tags: Annotated[tuple[Tag, ...], doc("Tags added to every request of these topics.")] = ()
    priority: Annotated[
        Literal["interactive", "standard", "bulk"],
        doc("Priority of these requests: `interactive`, `standard` or `bulk`."),
    ] = "standard"
    deadline_s: Annotated[Seconds | None, doc("Deadline of these requests. Default: `jobs.default_deadline_s`.")] = None
    answer_topic: Annotated[
        str, doc("Topic of answers to messages without a response topic. `{topic}` stands for the message's own topic.")
    ] = ""
    system: Annotated[str, doc("System prompt, with `form: text` only.")] = ""


class MqttConfig(MqttSettings, frozen=True, forbid_unknown_fields=True):
    url: Annotated[
        str,
        doc("MQTT 5 broker, `mqtt://HOST[:PORT]` or (TLS) `mqtts://HOST[:PORT]`. Empty: none. Needs the extra `mqtt`."),
    ] = ""
    username: Annotated[str, doc("User name of this device at the broker. Empty: none.")] = ""
    password_file: Annotated[str, doc("File with the password on one line, read at each connect.")] = ""
    ca_file: Annotated[str, doc("PEM file of the CA of the broker's certificate. Empty: the system's CAs.")] = ""
    cert_file: Annotated[str, doc("PEM file of this device's certificate, for brokers that require one.")] = ""
    key_file: Annotated[str, doc("PEM file with the private key of `mqtt.cert_file`.")] = ""
    client_id: Annotated[
        str, doc("Session name at the broker, unique to this device. Empty: `causeway-` and the outbox's own name.")
    ] = ""
    topics: Annotated[tuple[MqttTopicConfig, ...], doc("Topics whose messages are handled as requests.")] = ()
    response_topics: Annotated[
        tuple[str, ...],
        doc("Topic filters for the response topics that messages may name. Empty: only the `answer_topic` is used."),
    ] = ()
    state_topic: Annotated[
        str, doc("Topic of the retained state, `online` or `offline`; `offline` is also the last will. Empty: none.")
    ] = "causeway/{client_id}/state"


class EncryptionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key_file: Annotated[
        str,
        doc(
            "File with the key that encrypts the state folder: 32 bytes in base64, or a passphrase. A missing file is "
            "made for a new folder. Empty: `<state_dir>.key`. The credential `causeway.state-key` comes first."
        ),
    ] = ""
    rotate_s: Annotated[
        Seconds, doc("Age at which the key of new content is replaced, and older content is encrypted again.")
    ] = 90 * 86400.0


class GuardModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Detectors of personal data, whose rules are in the policy."""

    names_model: NamesModel = ""


class ClientLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a client; 0 is unlimited."""

    priority: Annotated[
        Priority,
        doc("Highest priority of requests and jobs, here and at the cloud. A higher `x-causeway-priority` is lowered."),
    ] = "interactive"
    tokens_per_minute: Annotated[
        Count, doc("Maximum rate of tokens, prompt and answer together; a minute's worth may be used at once. 0: any.")
    ] = 0
    usd_per_day: Annotated[Pause, doc("Budget per UTC day in USD, by the policy's prices. 0: none.")] = 0.0


class NamedLimits(ClientLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[
        str, Meta(min_length=1), doc("Name of an API key, or of a tenant, whose tokens share these limits.")
    ]


class LimitsConfig(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """The section `limits`: those of clients. The policy's `limits` bound all of them together."""

    default: ClientLimits = ClientLimits()  # of each client without an entry in `overrides`
    overrides: Annotated[
        tuple[NamedLimits, ...], doc("Limits of named clients and tenants instead of `limits.default`.")
    ] = ()

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
                raise ConfigError(f"{name!r} is listed twice.", where=f"limits.overrides[{index}]")


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trial_s: Annotated[
        Seconds,
        doc(
            "Minimum duration of a new bundle's trial, in which this device may roll it back. All keys of `fleet` "
            "apply to devices that joined a fleet."
        ),
    ] = 600.0
    trial_requests: Annotated[Count, doc("Minimum number of requests in a trial.")] = 200
    trial_max_s: Annotated[
        Seconds, doc("Maximum duration of a trial; a bundle with too few requests by then is kept as unproven.")
    ] = 86400.0
    telemetry_interval_s: Annotated[Seconds, doc("Mean interval between two telemetry messages.")] = 60.0
    check_interval_s: Annotated[
        Seconds, doc("Interval between two checks for updates, unless the control plane announces one.")
    ] = 900.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one daemon."""

    policy: Annotated[str, doc("Path of the policy file. Empty: the default policy that ships.")] = ""
    state_dir: Annotated[
        str,
        doc(
            "Folder of the cache, decision records, spending and last good policy. Empty: `$STATE_DIRECTORY`, or else "
            "`~/.local/state/causeway`."
        ),
    ] = ""
    server: ServerConfig = ServerConfig()
    identity: DeviceIdentityConfig = DeviceIdentityConfig()
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    clouds: Annotated[
        dict[CloudName, CloudServer],
        doc(
            "Clouds by name: a lower-case letter, then letters, digits and single underscores. The first one is that "
            "of `at: cloud` in the policy. Empty: no cloud."
        ),
    ] = {}
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
    log: Annotated[
        Literal["debug", "info", "warning", "error"],
        doc("Log level: `debug`, `info`, `warning` or `error`. Prompts and answers are never logged."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], doc("Format of log lines: `text` or `json`. Prompts and answers are never logged.")
    ] = "text"

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
