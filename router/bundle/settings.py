"""The keys of `edge.yaml` that a fleet may set: sections of the daemon's configuration, whole or in part.

Never among them: where the daemon listens and which API keys it accepts (`server.*`), where requests may go or come
from (`cloud.url`, `tracing.endpoint`, `mqtt.url` and its topics), credentials, paths, and the trial by which a device
undoes a bundle (`fleet.*`). The device refuses a signed bundle with such a key, so not even the holders of the signing
keys can open a device to others. The daemon's schema adds such keys to the structs here, in structs of its own.

The comment of each field is its meaning, for `causeway-edge config --keys` and the table in edge_node/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig, leaves_of
from ..documents.reader import did_you_mean
from ..jobs.webhooks import WebhookFormat
from ..numbers import bytes_of, seconds_of

SettingValue = bool | int | float | str


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    enabled: bool = True  # run a model on this device; false: every request goes to the cloud


class CloudSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    connect_timeout_s: Seconds = 2.0  # maximum time to connect
    first_token_timeout_s: Seconds = 10.0  # maximum time to the first token, for targets whose policy sets none
    timeout_s: Seconds = 60.0  # maximum time of a whole answer, for targets whose policy sets none
    max_connections: Positive = 100  # maximum open connections to the cloud
    probe_interval_s: Seconds = 5.0  # interval of reachability probes while no requests go to the cloud


class ResponseCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: Count = 32 * 1024 * 1024  # maximum size of the response cache in memory
    disk_bytes: Count = 256 * 1024 * 1024  # maximum size of the response cache on disk; 0: memory only


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_records: Positive = 2000  # decision records kept in memory, newest first
    max_age_s: Seconds = 7 * 86400.0  # maximum age of decision records on disk
    # `named`: every signal but prompt tokens and quality, which are recorded if the policy names them; `all`: these as
    # well, computed for each request that is decided, so that any policy can be replayed
    signals: Literal["named", "all"] = "named"


class OutboxWebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: Seconds = 15.0  # longest time of one delivery
    concurrency: Positive = 8  # webhooks that are sent at the same time
    concurrency_per_receiver: Positive = 2  # the same to one scheme, host and port
    # how long after the end of its job a webhook is given up, where its receiver is away; until then the job is listed,
    # its answer is deleted as ever
    max_age_s: Seconds = 35 * 86400.0
    # of their bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` (structured) or
    # `cloudevents-binary`
    format: WebhookFormat = "standard"


class OutboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    # jobs per second that this device is expected to send to the cloud; it never sends more than three times as many
    cloud_rate_per_s: Seconds = 5.0
    jitter_s: Pause = 30.0  # longest random pause before waiting jobs are sent when the cloud comes back
    max_revise_s: Seconds = 120.0  # longest time in which late parts may revise a job's answer (`revise_within_ms`)
    webhooks: OutboxWebhookSettings = OutboxWebhookSettings()


class DeviceFilesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_files: Positive = 200  # maximum of uploaded files, those that are being uploaded included
    max_bytes: Positive = 256 * 1024 * 1024  # maximum size of all uploaded files together


class RealtimeConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    partial_interval_s: Pause = 1.0  # new audio between two partial transcripts while somebody speaks; 0: none are made


class MqttSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # messages that may wait here for the outbox; the others wait at the broker
    receive_maximum: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_message_bytes: Positive = 256 * 1024  # maximum size of a message; a larger one is answered with an error
    # how long the broker keeps messages for this device while it is away
    session_expiry_s: Annotated[float, Meta(ge=0, le=4294967295)] = 86400.0
    # time without a word of the broker after which a ping asks for one
    keepalive_s: Annotated[float, Meta(ge=1, le=65535)] = 30.0


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # turn audio, images and files of requests into text for models that take text only; audio clips need the extra
    # `voice`, images `images`
    enabled: bool = True
    max_parts: Positive = 8  # maximum audio, images and files of one request
    max_audio_s: Seconds = 120.0  # maximum length of an audio clip; a longer one is rejected before it is decoded
    # maximum size of an image, width × height; a larger one is rejected before it is decoded
    max_pixels: Positive = 24_000_000
    max_text_bytes: Positive = 256 * 1024  # maximum size of a file of text
    # maximum time to decode and understand an audio clip, loading the model included; after it the request goes on
    # without
    audio_timeout_s: Seconds = 20.0
    image_timeout_s: Seconds = 10.0  # the same for an image or a file
    decoder_memory_bytes: Positive = 512 * 1024 * 1024  # maximum memory of each process that decodes files
    fact_cache_entries: Count = 256  # facts kept in memory by the hash of their audio or image; 0: none
    # what is spoken at this device, ISO 639-1; `en`: short audio clips are heard as commands, in a fraction of the
    # time; empty: it is detected, which a short command can defeat
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
    # voice of requests for `auto`, and of live sessions that name none: one that was added by `causeway-models
    # add-voice`, or a language of espeak-ng
    voice: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}$")] = "en-us"


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sections that a fleet may set."""

    engine: EngineSettings
    cloud: CloudSettings
    cache: ResponseCacheConfig
    decisions: DecisionsConfig
    jobs: OutboxSettings
    files: DeviceFilesSettings
    realtime: RealtimeConfig
    mqtt: MqttSettings
    parts: PartsConfig
    log: Literal["debug", "info", "warning", "error"]
    log_format: Literal["text", "json"]


_SAMPLE_RATIO = {"tracing.sample_ratio": leaves_of(TracingConfig)["sample_ratio"]}  # not where the traces go
SETTINGS: Mapping[str, object] = {**leaves_of(FleetSettings), **_SAMPLE_RATIO}
"""The type of each key, with its limits."""


def read_setting(key: str, written: SettingValue) -> SettingValue:
    """Return a value as a person writes it (``30s``, ``64MiB``) in the type of its key.

    Raises:
        ValueError: The key is unknown or not the fleet's to set, or the value does not fit it.
    """
    value: SettingValue | None = written
    if isinstance(written, str) and key.endswith("_s"):
        value = seconds_of(written)
    elif isinstance(written, str) and key.endswith("_bytes"):
        value = bytes_of(written)
    return check_setting(key, written if value is None else value)


def check_setting(key: str, value: SettingValue) -> SettingValue:
    """Return the value in the type of its key.

    Raises:
        ValueError: The key is unknown or not the fleet's to set, or the value does not fit it.
    """
    if key not in SETTINGS:
        raise ValueError(f"not a key that a fleet may set{did_you_mean(key, SETTINGS)}")
    try:
        checked: SettingValue = msgspec.convert(value, SETTINGS[key])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError("must be a finite number")
    return checked
