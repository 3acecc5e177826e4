"""The keys of the daemon's configuration, with their types, limits and defaults; those that a fleet may set are in
`router.bundle.settings`.

The comment of each field is its meaning, for `causeway-edge config --keys` and the table in edge_node/README.md.
"""

from __future__ import annotations

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
from causeway_server.router.config import Count, Pause, Positive, Seconds, TracingConfig
from causeway_server.router.errors import ConfigError
from causeway_server.router.jobs.webhooks import WebhookFormat
from causeway_server.router.openai.wire import Tag
from causeway_server.router.web_origins import HostName, Origin, is_loopback

Port = Annotated[int, Meta(ge=0, le=65535)]

KeyRight = Literal["decisions"]
"""`decisions`: read the decision records of all clients."""


class KeyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key of the daemon."""

    name: Annotated[str, Meta(min_length=1)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256 of the key, hex: the key itself is never stored
    tags: tuple[Tag, ...] = ()  # added to every request that uses this key
    rights: tuple[KeyRight, ...] = ()  # what it may do beside its own requests


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"  # address to listen on; any other than loopback needs `server.keys`
    port: Port = 8080  # TCP port; 0: any free port
    socket: str = ""  # path of a Unix socket to listen on as well; empty: none
    # further names, without a port, that a request's `Host` may have; others get 421. Loopback names and `server.host`
    # are always taken, and any name on the Unix socket, with `server.keys`, or beyond loopback
    hosts: tuple[HostName, ...] = ()
    # web pages of other origins that may use the daemon, as `https://app.example` or `http://localhost:3000`; `null`
    # and `file://` are embedded web views, and `null` is any sandboxed page, too
    origins: tuple[Origin, ...] = ()
    # maximum open connections over TCP, and as many over the Unix socket; one more closes the connection that has been
    # idle longest
    max_connections: Positive = 1024
    max_body_bytes: Positive = 8 * 1024 * 1024  # maximum request body; a larger one is rejected with 413
    read_timeout_s: Seconds = 20.0  # maximum time to receive a whole request
    drain_s: Pause = 20.0  # on SIGTERM, maximum time for running requests to finish
    # API keys: a list of `{name, sha256, tags, rights}`, `sha256` in hex; empty: requests need no key. A key reads the
    # decision records of its own requests, and with `rights: [decisions]` those of all
    keys: tuple[KeyConfig, ...] = ()
    default_deadline_s: Seconds = 120.0  # deadline of a request that sets none
    # longest silence of a stream: a comment ends it, and a stream whose target is not known by then begins with status
    # 200 and without the headers of its route; 0: no limit
    heartbeat_s: Pause = 0.0

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may ask without an API key."""
        return not (self.keys or is_loopback(self.host))

    def check_exposure(self) -> None:
        """Raises ConfigError."""
        if self.is_exposed:
            raise ConfigError(
                f"The daemon would answer other machines on {self.host or 'all addresses'} without an API key. "
                "Set server.keys, or listen on 127.0.0.1.",
                where="server.host",
            )


class EngineConfig(EngineSettings, frozen=True, forbid_unknown_fields=True):
    # folders searched for models before `~/.local/share/causeway/models` and the models that ship
    model_dirs: tuple[str, ...] = ()


class CloudConfig(CloudSettings, frozen=True, forbid_unknown_fields=True):
    url: str = ""  # base URL of an OpenAI-compatible server, usually ending in `/v1`; empty: no cloud
    api_key: str = ""  # bearer token for the cloud; prefer `cloud.api_key_file`
    api_key_file: str = ""  # file with the bearer token on one line, read at start
    ca_file: str = ""  # PEM file of the CA that signed the cloud's certificate; empty: the system's CAs


class OutboxWebhookConfig(OutboxWebhookSettings, frozen=True, forbid_unknown_fields=True):
    # private networks that webhooks may reach, as `10.1.0.0/16`; `127.0.0.0/8` lets an application have the device send
    # POST requests to every service of its own that listens on loopback
    allowed_networks: tuple[str, ...] = ()
    allow_http: bool = False  # `true`: webhooks may go to `http://`, too
    ca_file: str = ""  # PEM file of the CA that signed the receivers' certificates; empty: the system's CAs

    def format_of(self, _owner: str) -> WebhookFormat:
        return self.format


class OutboxConfig(OutboxSettings, frozen=True, forbid_unknown_fields=True):
    # `true`: jobs may have audio, images and files, whose bytes then wait on the disk until the job has ended;
    # `false`: such jobs are refused
    accept_parts: bool = False
    webhooks: OutboxWebhookConfig = OutboxWebhookConfig()


class DeviceFilesConfig(DeviceFilesSettings, frozen=True, forbid_unknown_fields=True):
    # `true`: clients may upload files and name them in requests; the bytes are on the disk until they expire or are
    # deleted
    accept: bool = False
    # how long an uploaded file is kept, unless its upload asks for less
    ttl_s: Annotated[float, Meta(ge=1)] = 7 * 86400.0


class MqttTopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are taken as requests: those on topics that `filter` matches."""

    filter: Annotated[str, Meta(min_length=1)]
    form: Literal["chat", "text"] = "chat"
    tags: tuple[Tag, ...] = ()  # added to every request of these topics
    priority: Literal["interactive", "standard", "bulk"] = "standard"
    deadline_s: Seconds | None = None
    answer_topic: str = ""  # of messages without a response topic; {topic} is the message's own
    system: str = ""  # the system prompt; with `form: text` only


class MqttConfig(MqttSettings, frozen=True, forbid_unknown_fields=True):
    # broker, `mqtt://HOST[:PORT]` or `mqtts://HOST[:PORT]` (TLS), which speaks MQTT 5; empty: none. It needs the extra
    # `mqtt`
    url: str = ""
    username: str = ""  # name that the broker knows this device by; empty: none
    password_file: str = ""  # file with the password on one line, read at each connect
    ca_file: str = ""  # PEM file of the CA that signed the broker's certificate; empty: the system's CAs
    cert_file: str = ""  # PEM file of this device's certificate, for brokers that ask for one
    key_file: str = ""  # PEM file of its key
    # name of the session at the broker, of this device alone; empty: `causeway-` and the outbox's own name
    client_id: str = ""
    # what is taken: a list of `{filter, form, tags, priority, deadline_s, answer_topic, system}`
    topics: tuple[MqttTopicConfig, ...] = ()
    # filters of the response topics that messages may name; empty: answers go to the `answer_topic` alone
    response_topics: tuple[str, ...] = ()
    # topic of the retained `online` or `offline`, the latter also as last will; empty: none
    state_topic: str = "causeway/{client_id}/state"


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # least duration of the trial of a new bundle, in which this device may undo it; for a device that joined a fleet,
    # as all of `fleet`
    trial_s: Seconds = 600.0
    trial_requests: Count = 200  # least number of requests of a trial
    trial_max_s: Seconds = 86400.0  # maximum duration; a bundle with fewer requests by then is kept as unproven
    telemetry_interval_s: Seconds = 60.0  # mean time between two telemetry messages
    check_interval_s: Seconds = 900.0  # time between two looks for updates, if the control plane wakes nothing


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one daemon."""

    policy: str = ""  # path of the policy file; empty: the default policy that ships
    # folder of the cache, decision records, spending and last good policy; empty: `$STATE_DIRECTORY`, else
    # `~/.local/state/causeway`
    state_dir: str = ""
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    cloud: CloudConfig = CloudConfig()
    cache: ResponseCacheConfig = ResponseCacheConfig()
    decisions: DecisionsConfig = DecisionsConfig()
    jobs: OutboxConfig = OutboxConfig()
    files: DeviceFilesConfig = DeviceFilesConfig()
    realtime: RealtimeConfig = RealtimeConfig()
    mqtt: MqttConfig = MqttConfig()
    parts: PartsConfig = PartsConfig()
    tracing: TracingConfig = TracingConfig()
    fleet: FleetConfig = FleetConfig()
    log: Literal["debug", "info", "warning", "error"] = "info"  # log level: debug, info, warning or error
    log_format: Literal["text", "json"] = "text"  # text or json; prompts and answers are never logged
