"""The keys of the daemon's configuration, with their types, limits and defaults; `meaning` describes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.addresses import is_loopback
from router.errors import ConfigError
from router.jobs.webhooks.payload import WebhookFormat
from router.openai.wire import Tag
from router.serving.config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig
from router.web_origins import HostName, Origin

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
    host: str = "127.0.0.1"
    port: Port = 8080
    socket: str = ""
    hosts: tuple[HostName, ...] = ()
    origins: tuple[Origin, ...] = ()
    max_connections: Positive = 1024
    max_body_bytes: Positive = 8 * 1024 * 1024
    read_timeout_s: Seconds = 20.0
    drain_s: Pause = 20.0
    keys: tuple[KeyConfig, ...] = ()
    default_deadline_s: Seconds = 120.0
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


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_dirs: tuple[str, ...] = ()
    sequences: Annotated[int, Meta(ge=1, le=256)] = 16
    batch_tokens: Positive = 512
    context_tokens: Count = 0
    threads: Count = 0
    gpu_layers: Annotated[int, Meta(ge=-1)] | Literal["auto"] = "auto"
    kv_type: Literal["f16", "q8_0"] = "f16"
    prompt_lookup: bool = True
    stored_prompts_bytes: Count = 0
    restrict_tool_arguments: bool = True
    unload_after_s: Pause = 0.0
    enabled: bool = True


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = ""
    api_key: str = ""
    api_key_file: str = ""
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 10.0
    timeout_s: Seconds = 60.0
    max_connections: Positive = 100
    probe_interval_s: Seconds = 5.0
    ca_file: str = ""


class ResponseCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: Count = 32 * 1024 * 1024
    disk_bytes: Count = 256 * 1024 * 1024


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_records: Positive = 2000
    max_age_s: Seconds = 7 * 86400.0
    record: Literal["cheap", "all"] = "cheap"


class OutboxWebhookConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    allowed_networks: tuple[str, ...] = ()
    allow_http: bool = False
    ca_file: str = ""
    timeout_s: Seconds = 15.0
    concurrency: Positive = 8
    concurrency_per_receiver: Positive = 2
    max_age_s: Seconds = 35 * 86400.0
    format: WebhookFormat = "standard"

    def format_of(self, _owner: str) -> WebhookFormat:
        return self.format


class OutboxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_jobs: Positive = 20_000
    max_bytes: Positive = 256 * 1024 * 1024
    bulk_share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    default_deadline_s: Seconds = 86400.0
    max_deadline_s: Seconds = 60 * 86400.0
    result_ttl_s: Seconds = 86400.0
    dead_letter_ttl_s: Seconds = 7 * 86400.0
    max_result_bytes: Positive = 4 * 1024 * 1024
    max_attempts: Positive = 5
    device_concurrency: Positive = 2
    cloud_concurrency: Positive = 16
    steady_per_s: Seconds = 5.0
    jitter_s: Pause = 30.0
    accept_parts: bool = False
    max_revise_s: Seconds = 120.0
    webhooks: OutboxWebhookConfig = OutboxWebhookConfig()


class DeviceFilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    accept: bool = False
    max_files: Positive = 200
    max_bytes: Positive = 256 * 1024 * 1024
    ttl_s: Annotated[float, Meta(ge=1)] = 7 * 86400.0


class RealtimeConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    partial_s: Pause = 1.0


class MqttTopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are taken as requests: those on topics that `filter` matches."""

    filter: Annotated[str, Meta(min_length=1)]
    form: Literal["chat", "text"] = "chat"
    tags: tuple[Tag, ...] = ()  # added to every request of these topics
    priority: Literal["interactive", "standard", "bulk"] = "standard"
    deadline_s: Seconds | None = None
    answer_topic: str = ""  # of messages without a response topic; {topic} is the message's own
    system: str = ""  # the system prompt; with `form: text` only


class MqttConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    receive_maximum: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_message_bytes: Positive = 256 * 1024
    session_expiry_s: Annotated[float, Meta(ge=0, le=4294967295)] = 86400.0
    keepalive_s: Annotated[float, Meta(ge=1, le=65535)] = 30.0


class ModalitiesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = True
    max_parts: Positive = 8
    max_audio_s: Seconds = 120.0
    max_pixels: Positive = 24_000_000
    max_text_bytes: Positive = 256 * 1024
    audio_timeout_s: Seconds = 20.0
    image_timeout_s: Seconds = 10.0
    decoder_memory_bytes: Positive = 512 * 1024 * 1024
    remembered: Count = 256
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    voice: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}$")] = "en-us"


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trial_s: Seconds = 600.0
    trial_requests: Count = 200
    trial_max_s: Seconds = 86400.0
    telemetry_s: Seconds = 60.0
    check_s: Seconds = 900.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one daemon."""

    policy: str = ""
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
    modalities: ModalitiesConfig = ModalitiesConfig()
    tracing: TracingConfig = TracingConfig()
    fleet: FleetConfig = FleetConfig()
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
