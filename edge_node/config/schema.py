"""The keys of the daemon's configuration, with their types, limits and defaults.

The comment of each field is its meaning, for `causeway-edge config --keys` and the table in edge_node/README.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from router.config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig
from router.errors import ConfigError
from router.jobs.webhooks import WebhookFormat
from router.openai.wire import Tag
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


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # folders searched for models before `~/.local/share/causeway/models` and the models that ship
    model_dirs: tuple[str, ...] = ()
    # requests decoded together (continuous batching); further requests wait
    sequences: Annotated[int, Meta(ge=1, le=256)] = 16
    batch_tokens: Positive = 512  # maximum tokens of one decode step, prefill chunks included
    # maximum tokens of one request, prompt and answer; 0: the model's own limit, bounded by memory
    context_tokens: Count = 0
    threads: Count = 0  # CPU threads; 0: found by trying, as many as help
    # layers offloaded to the GPU; -1: all; `auto`: as many as fit into its free memory
    gpu_layers: Annotated[int, Meta(ge=-1)] | Literal["auto"] = "auto"
    # how keys and values of the context are kept: f16, or q8_0 in about half the memory
    kv_type: Literal["f16", "q8_0"] = "f16"
    prompt_lookup: bool = True  # draft tokens from text that repeats, where it pays; answers keep their distribution
    # disk for decoded system prompts in `state_dir`, of each model, so that an engine knows them after a restart; 0:
    # none
    stored_prompts_bytes: Count = 0
    # restrict tool-call arguments to words of the user's message, for models whose manifest says `answers: calls`
    restrict_tool_arguments: bool = True
    # a model without requests for so long leaves memory, and the next request loads it again; 0: never
    unload_after_s: Pause = 0.0
    enabled: bool = True  # run a model on this box; false: every request goes to the cloud


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = ""  # base URL of an OpenAI-compatible server, usually ending in `/v1`; empty: no cloud
    api_key: str = ""  # bearer token for the cloud; prefer `cloud.api_key_file`
    api_key_file: str = ""  # file with the bearer token on one line, read at start
    connect_timeout_s: Seconds = 2.0  # maximum time to connect
    first_token_timeout_s: Seconds = 10.0  # maximum time to the first token, for targets whose policy sets none
    timeout_s: Seconds = 60.0  # maximum time of a whole answer, for targets whose policy sets none
    max_connections: Positive = 100  # maximum open connections to the cloud
    probe_interval_s: Seconds = 5.0  # interval of reachability probes while no requests go to the cloud
    ca_file: str = ""  # PEM file of the CA that signed the cloud's certificate; empty: the system's CAs


class ResponseCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: Count = 32 * 1024 * 1024  # maximum size of the response cache in memory
    disk_bytes: Count = 256 * 1024 * 1024  # maximum size of the response cache on disk; 0: memory only


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_records: Positive = 2000  # decision records kept in memory, newest first
    max_age_s: Seconds = 7 * 86400.0  # maximum age of decision records on disk
    # `cheap`: every signal but prompt tokens and quality, which are recorded if the policy names them; `all`: these as
    # well, computed for each request that is decided, so that any policy can be replayed
    record: Literal["cheap", "all"] = "cheap"


class OutboxWebhookConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # private networks that webhooks may reach, as `10.1.0.0/16`; `127.0.0.0/8` lets an application have the box send
    # POST requests to every service of its own that listens on loopback
    allowed_networks: tuple[str, ...] = ()
    allow_http: bool = False  # `true`: webhooks may go to `http://`, too
    ca_file: str = ""  # PEM file of the CA that signed the receivers' certificates; empty: the system's CAs
    timeout_s: Seconds = 15.0  # longest time of one delivery
    concurrency: Positive = 8  # webhooks that are sent at the same time
    concurrency_per_receiver: Positive = 2  # the same to one scheme, host and port
    # how long after the end of its job a webhook is given up, where its receiver is away; until then the job is listed,
    # its answer is deleted as ever
    max_age_s: Seconds = 35 * 86400.0
    # of their bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` (structured) or
    # `cloudevents-binary`
    format: WebhookFormat = "standard"

    def format_of(self, _owner: str) -> WebhookFormat:
        return self.format


class OutboxConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # maximum of jobs that have not ended; a job beyond it takes the place of bulk jobs, or is refused
    max_jobs: Positive = 20_000
    max_bytes: Positive = 256 * 1024 * 1024  # maximum size of all requests and results of jobs on disk
    # share of both that bulk jobs may fill; the rest is reserved for the others
    bulk_share: Annotated[float, Meta(gt=0, le=1)] = 0.75
    default_deadline_s: Seconds = 86400.0  # deadline of a job that sets none
    max_deadline_s: Seconds = 60 * 86400.0  # latest deadline of a job
    result_ttl_s: Seconds = 86400.0  # how long a job that ended, and its result, are kept
    dead_letter_ttl_s: Seconds = 7 * 86400.0  # how long a dead letter is kept
    max_result_bytes: Positive = 4 * 1024 * 1024  # maximum size of one result; a job with a larger one fails
    max_attempts: Positive = 5  # runs that may fail before a job is a dead letter; waiting for the cloud is no run
    device_concurrency: Positive = 2  # jobs that run on the device at the same time, beside requests
    cloud_concurrency: Positive = 16  # jobs that are in the cloud at the same time
    # jobs per second that this box is expected to send to the cloud; it never sends more than three times as many
    steady_per_s: Seconds = 5.0
    jitter_s: Pause = 30.0  # longest random pause before waiting jobs are sent when the cloud comes back
    # `true`: jobs may have sound, pictures and files, whose bytes then wait on the disk until the job has ended;
    # `false`: such jobs are refused
    accept_parts: bool = False
    max_revise_s: Seconds = 120.0  # longest time in which late parts may revise a job's answer (`revise_within_ms`)
    webhooks: OutboxWebhookConfig = OutboxWebhookConfig()


class DeviceFilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # `true`: clients may upload files and name them in requests; the bytes are on the disk until they expire or are
    # deleted
    accept: bool = False
    max_files: Positive = 200  # maximum of uploaded files, those that are being uploaded included
    max_bytes: Positive = 256 * 1024 * 1024  # maximum size of all uploaded files together
    # how long an uploaded file is kept, unless its upload asks for less
    ttl_s: Annotated[float, Meta(ge=1)] = 7 * 86400.0


class RealtimeConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    partial_s: Pause = 1.0  # new sound between two partial transcripts while somebody speaks; 0: none are made


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
    # broker, `mqtt://HOST[:PORT]` or `mqtts://HOST[:PORT]` (TLS), which speaks MQTT 5; empty: none. It needs the extra
    # `mqtt`
    url: str = ""
    username: str = ""  # name that the broker knows this box by; empty: none
    password_file: str = ""  # file with the password on one line, read at each connect
    ca_file: str = ""  # PEM file of the CA that signed the broker's certificate; empty: the system's CAs
    cert_file: str = ""  # PEM file of this box's certificate, for brokers that ask for one
    key_file: str = ""  # PEM file of its key
    # name of the session at the broker, of this box alone; empty: `causeway-` and the outbox's own name
    client_id: str = ""
    # what is taken: a list of `{filter, form, tags, priority, deadline_s, answer_topic, system}`
    topics: tuple[MqttTopicConfig, ...] = ()
    # filters of the response topics that messages may name; empty: answers go to the `answer_topic` alone
    response_topics: tuple[str, ...] = ()
    # topic of the retained `online` or `offline`, the latter also as last will; empty: none
    state_topic: str = "causeway/{client_id}/state"
    # messages that may wait here for the outbox; the others wait at the broker
    receive_maximum: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_message_bytes: Positive = 256 * 1024  # maximum size of a message; a larger one is answered with an error
    # how long the broker keeps messages for this box while it is away
    session_expiry_s: Annotated[float, Meta(ge=0, le=4294967295)] = 86400.0
    # time without a word of the broker after which a ping asks for one
    keepalive_s: Annotated[float, Meta(ge=1, le=65535)] = 30.0


class ModalitiesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # turn sounds, pictures and files of requests into text for models that take text only; sounds need the extra
    # `voice`, pictures `pictures`
    enabled: bool = True
    max_parts: Positive = 8  # maximum sounds, pictures and files of one request
    max_audio_s: Seconds = 120.0  # maximum length of a sound; a longer one is rejected before it is decoded
    # maximum size of a picture, width × height; a larger one is rejected before it is decoded
    max_pixels: Positive = 24_000_000
    max_text_bytes: Positive = 256 * 1024  # maximum size of a file of text
    # maximum time to decode and understand a sound, loading the model included; after it the request goes on without
    audio_timeout_s: Seconds = 20.0
    image_timeout_s: Seconds = 10.0  # the same for a picture or a file
    decoder_memory_bytes: Positive = 512 * 1024 * 1024  # maximum memory of each process that decodes files
    remembered: Count = 256  # facts kept in memory by the hash of their sound or picture; 0: none
    # what is spoken at this box, ISO 639-1; `en`: short sounds are heard as commands, in a fraction of the time; empty:
    # it is detected, which a short command can defeat
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    # voice of requests for `auto`, and of live sessions that name none: one that was added by `causeway-models
    # add-voice`, or a language of espeak-ng
    voice: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}$")] = "en-us"


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # least duration of the trial of a new bundle, in which this box may undo it; for a box that joined a fleet, as all
    # of `fleet`
    trial_s: Seconds = 600.0
    trial_requests: Count = 200  # least number of requests of a trial
    trial_max_s: Seconds = 86400.0  # maximum duration; a bundle with fewer requests by then is kept as unproven
    telemetry_s: Seconds = 60.0  # mean time between two telemetry messages
    check_s: Seconds = 900.0  # time between two looks for updates, if the control plane wakes nothing


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
    modalities: ModalitiesConfig = ModalitiesConfig()
    tracing: TracingConfig = TracingConfig()
    fleet: FleetConfig = FleetConfig()
    log: Literal["debug", "info", "warning", "error"] = "info"  # log level: debug, info, warning or error
    log_format: Literal["text", "json"] = "text"  # text or json; prompts and answers are never logged
