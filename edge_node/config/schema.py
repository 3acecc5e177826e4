"""The keys of the daemon's configuration, with their types, limits and defaults, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.errors import ConfigError
from router.jobs.webhooks import WebhookFormat
from router.openai.wire import Tag
from router.serving.config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig
from router.web_origins import HostName, Origin, is_loopback

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


# For `causeway-edge config --keys` and the table in edge_node/README.md.
MEANING: Mapping[str, str] = {
    "policy": "path of the policy file; empty: the default policy that ships",
    "state_dir": "folder of the cache, decision records, spending and last good policy; "
    "empty: `$STATE_DIRECTORY`, else `~/.local/state/causeway`",
    "server.host": "address to listen on; any other than loopback needs `server.keys`",
    "server.port": "TCP port; 0: any free port",
    "server.socket": "path of a Unix socket to listen on as well; empty: none",
    "server.hosts": "further names, without a port, that a request's `Host` may have; others get 421. Loopback names "
    "and `server.host` are always taken, and any name on the Unix socket, with `server.keys`, or beyond loopback",
    "server.origins": "web pages of other origins that may use the daemon, as `https://app.example` or "
    "`http://localhost:3000`; `null` and `file://` are embedded web views, and `null` is any sandboxed page, too",
    "server.max_connections": "maximum open connections over TCP, and as many over the Unix socket; "
    "one more closes the connection that has been idle longest",
    "server.max_body_bytes": "maximum request body; a larger one is rejected with 413",
    "server.read_timeout_s": "maximum time to receive a whole request",
    "server.drain_s": "on SIGTERM, maximum time for running requests to finish",
    "server.keys": "API keys: a list of `{name, sha256, tags, rights}`, `sha256` in hex; empty: requests need no key. "
    "A key reads the decision records of its own requests, and with `rights: [decisions]` those of all",
    "server.default_deadline_s": "deadline of a request that sets none",
    "server.heartbeat_s": "longest silence of a stream: a comment ends it, and a stream whose target is not known by "
    "then begins with status 200 and without the headers of its route; 0: no limit",
    "engine.model_dirs": "folders searched for models before `~/.local/share/causeway/models` and the models that ship",
    "engine.sequences": "requests decoded together (continuous batching); further requests wait",
    "engine.batch_tokens": "maximum tokens of one decode step, prefill chunks included",
    "engine.context_tokens": "maximum tokens of one request, prompt and answer; "
    "0: the model's own limit, bounded by memory",
    "engine.prompt_lookup": "draft tokens from text that repeats, where it pays; answers keep their distribution",
    "engine.stored_prompts_bytes": "disk for decoded system prompts in `state_dir`, of each model, so that an "
    "engine knows them after a restart; 0: none",
    "engine.threads": "CPU threads; 0: found by trying, as many as help",
    "engine.gpu_layers": "layers offloaded to the GPU; -1: all; `auto`: as many as fit into its free memory",
    "engine.kv_type": "how keys and values of the context are kept: f16, or q8_0 in about half the memory",
    "engine.restrict_tool_arguments": "restrict tool-call arguments to words of the user's message, "
    "for models whose manifest says `answers: calls`",
    "engine.unload_after_s": "a model without requests for so long leaves memory, and the next request loads it again; "
    "0: never",
    "engine.enabled": "run a model on this box; false: every request goes to the cloud",
    "cloud.url": "base URL of an OpenAI-compatible server, usually ending in `/v1`; empty: no cloud",
    "cloud.api_key": "bearer token for the cloud; prefer `cloud.api_key_file`",
    "cloud.api_key_file": "file with the bearer token on one line, read at start",
    "cloud.connect_timeout_s": "maximum time to connect",
    "cloud.first_token_timeout_s": "maximum time to the first token, for targets whose policy sets none",
    "cloud.timeout_s": "maximum time of a whole answer, for targets whose policy sets none",
    "cloud.max_connections": "maximum open connections to the cloud",
    "cloud.probe_interval_s": "interval of reachability probes while no requests go to the cloud",
    "cloud.ca_file": "PEM file of the CA that signed the cloud's certificate; empty: the system's CAs",
    "cache.memory_bytes": "maximum size of the response cache in memory",
    "cache.disk_bytes": "maximum size of the response cache on disk; 0: memory only",
    "decisions.memory_records": "decision records kept in memory, newest first",
    "decisions.max_age_s": "maximum age of decision records on disk",
    "decisions.record": "`cheap`: every signal but prompt tokens and quality, which are recorded if the policy names "
    "them; `all`: these as well, computed for each request that is decided, so that any policy can be replayed",
    "jobs.max_jobs": "maximum of jobs that have not ended; a job beyond it takes the place of bulk jobs, or is refused",
    "jobs.max_bytes": "maximum size of all requests and results of jobs on disk",
    "jobs.bulk_share": "share of both that bulk jobs may fill; the rest is reserved for the others",
    "jobs.default_deadline_s": "deadline of a job that sets none",
    "jobs.max_deadline_s": "latest deadline of a job",
    "jobs.result_ttl_s": "how long a job that ended, and its result, are kept",
    "jobs.dead_letter_ttl_s": "how long a dead letter is kept",
    "jobs.max_result_bytes": "maximum size of one result; a job with a larger one fails",
    "jobs.max_attempts": "runs that may fail before a job is a dead letter; waiting for the cloud is no run",
    "jobs.device_concurrency": "jobs that run on the device at the same time, beside requests",
    "jobs.cloud_concurrency": "jobs that are in the cloud at the same time",
    "jobs.steady_per_s": "jobs per second that this box is expected to send to the cloud; it never sends more than "
    "three times as many",
    "jobs.jitter_s": "longest random pause before waiting jobs are sent when the cloud comes back",
    "jobs.accept_parts": "`true`: jobs may have sound, pictures and files, whose bytes then wait on the disk until the "
    "job has ended; `false`: such jobs are refused",
    "jobs.max_revise_s": "longest time in which late parts may revise a job's answer (`revise_within_ms`)",
    "jobs.webhooks.allowed_networks": "private networks that webhooks may reach, as `10.1.0.0/16`; `127.0.0.0/8` lets "
    "an application have the box send POST requests to every service of its own that listens on loopback",
    "jobs.webhooks.allow_http": "`true`: webhooks may go to `http://`, too",
    "jobs.webhooks.ca_file": "PEM file of the CA that signed the receivers' certificates; empty: the system's CAs",
    "jobs.webhooks.timeout_s": "longest time of one delivery",
    "jobs.webhooks.concurrency": "webhooks that are sent at the same time",
    "jobs.webhooks.concurrency_per_receiver": "the same to one scheme, host and port",
    "jobs.webhooks.max_age_s": "how long after the end of its job a webhook is given up, where its receiver is away; "
    "until then the job is listed, its answer is deleted as ever",
    "jobs.webhooks.format": "of their bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` "
    "(structured) or `cloudevents-binary`",
    "files.accept": "`true`: clients may upload files and name them in requests; the bytes are on the disk until they "
    "expire or are deleted",
    "files.max_files": "maximum of uploaded files, those that are being uploaded included",
    "files.max_bytes": "maximum size of all uploaded files together",
    "files.ttl_s": "how long an uploaded file is kept, unless its upload asks for less",
    "realtime.max_sessions": "maximum of live sessions, of one client at most half; beyond: 429, unless a cut one "
    "gives way. "
    "Keep it below `server.max_connections`",
    "realtime.max_items": "maximum items of a session's conversation; the oldest ones give way",
    "realtime.max_bytes": "maximum size of a session's conversation; a client's event may have twice as much",
    "realtime.replay_bytes": "sent events that are kept for a connection that is cut",
    "realtime.max_audio_s": "maximum length of the sounds of a session's conversation together, and of the one that is "
    "being sent; the oldest items give way. A second takes 64 kB",
    "realtime.partial_s": "new sound between two partial transcripts while somebody speaks; 0: none are made",
    "realtime.resume_s": "how long a session whose connection was cut can be resumed; its running answer goes on so "
    "long; 0: it ends at once",
    "realtime.idle_s": "a session without an event of its client and without an answer ends after this time",
    "realtime.ping_s": "time between two pings; a client that answers none within half of it is gone",
    "mqtt.url": "broker, `mqtt://HOST[:PORT]` or `mqtts://HOST[:PORT]` (TLS), which speaks MQTT 5; empty: none. "
    "It needs the extra `mqtt`",
    "mqtt.username": "name that the broker knows this box by; empty: none",
    "mqtt.password_file": "file with the password on one line, read at each connect",
    "mqtt.ca_file": "PEM file of the CA that signed the broker's certificate; empty: the system's CAs",
    "mqtt.cert_file": "PEM file of this box's certificate, for brokers that ask for one",
    "mqtt.key_file": "PEM file of its key",
    "mqtt.client_id": "name of the session at the broker, of this box alone; "
    "empty: `causeway-` and the outbox's own name",
    "mqtt.topics": "what is taken: a list of `{filter, form, tags, priority, deadline_s, answer_topic, system}`",
    "mqtt.response_topics": "filters of the response topics that messages may name; empty: answers go to the "
    "`answer_topic` alone",
    "mqtt.state_topic": "topic of the retained `online` or `offline`, the latter also as last will; empty: none",
    "mqtt.receive_maximum": "messages that may wait here for the outbox; the others wait at the broker",
    "mqtt.max_message_bytes": "maximum size of a message; a larger one is answered with an error",
    "mqtt.session_expiry_s": "how long the broker keeps messages for this box while it is away",
    "mqtt.keepalive_s": "time without a word of the broker after which a ping asks for one",
    "modalities.enabled": "turn sounds, pictures and files of requests into text for models that take text only; "
    "sounds need the extra `voice`, pictures `pictures`",
    "modalities.max_parts": "maximum sounds, pictures and files of one request",
    "modalities.max_audio_s": "maximum length of a sound; a longer one is rejected before it is decoded",
    "modalities.max_pixels": "maximum size of a picture, width × height; a larger one is rejected before it is decoded",
    "modalities.max_text_bytes": "maximum size of a file of text",
    "modalities.audio_timeout_s": "maximum time to decode and understand a sound, loading the model included; "
    "after it the request goes on without",
    "modalities.image_timeout_s": "the same for a picture or a file",
    "modalities.decoder_memory_bytes": "maximum memory of each process that decodes files",
    "modalities.language": "what is spoken at this box, ISO 639-1; `en`: short sounds are heard as commands, in a "
    "fraction of the time; empty: it is detected, which a short command can defeat",
    "modalities.voice": "voice of requests for `auto`, and of live sessions that name none: one that was added by "
    "`causeway-models add-voice`, or a language of espeak-ng",
    "modalities.remembered": "facts kept in memory by the hash of their sound or picture; 0: none",
    "tracing.endpoint": "OpenTelemetry collector (OTLP over HTTP), such as `http://host:4318`; empty: no traces",
    "tracing.sample_ratio": "share of requests without an incoming trace context that are traced, 0 to 1",
    "fleet.trial_s": "least duration of the trial of a new bundle, in which this box may undo it; "
    "for a box that joined a fleet, as all of `fleet`",
    "fleet.trial_requests": "least number of requests of a trial",
    "fleet.trial_max_s": "maximum duration; a bundle with fewer requests by then is kept as unproven",
    "fleet.telemetry_s": "mean time between two telemetry messages",
    "fleet.check_s": "time between two looks for updates, if the control plane wakes nothing",
    "log": "log level: debug, info, warning or error",
    "log_format": "text or json; prompts and answers are never logged",
}
