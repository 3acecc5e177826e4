"""The keys of `edge.yaml` that a fleet may set: sections of the daemon's configuration, whole or in part.

A fleet may never set the listening address and the accepted API keys (`server.*`), the places that requests may go to
or come from (`clouds`, `tracing.endpoint`, `mqtt.url` and its topics), credentials, paths, and the trial after which
a device rolls a bundle back (`fleet.*`). The device refuses a signed bundle with such a key, so not even the holders of
the signing keys can open a device to others. The daemon's schema adds such keys to the structs here, in structs of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig, doc, leaves_of
from ..documents.reader import did_you_mean
from ..jobs.webhooks import WebhookFormat
from ..numbers import without_unit
from ..renames import find

SettingValue = bool | int | float | str


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sequences: Annotated[
        int, Meta(ge=1, le=256), doc("Maximum requests decoded together (continuous batching); further requests wait.")
    ] = 16
    batch_tokens: Annotated[Positive, doc("Maximum tokens in one decode step, prefill chunks included.")] = 512
    context_tokens: Annotated[
        Count, doc("Maximum tokens of one request, prompt and answer. 0: the model's own limit, bounded by memory.")
    ] = 0
    threads: Annotated[Count, doc("Number of CPU threads. 0: the number that trials find fastest.")] = 0
    gpu_layers: Annotated[
        Annotated[int, Meta(ge=-1)] | Literal["auto"],
        doc("Number of layers offloaded to the GPU. -1: all; `auto`: as many as fit into its free memory."),
    ] = "auto"
    kv_type: Annotated[Literal["f16", "q8_0"], doc("Format of the KV cache: `f16`, or `q8_0` in half the memory.")] = (
        "f16"
    )
    prompt_lookup: Annotated[
        bool,
        doc(
            "Whether to draft tokens from text that repeats, if it saves time. The distribution of "
            "answers does not change."
        ),
    ] = True
    stored_prompts_bytes: Annotated[
        Count,
        doc("Disk space per model in `state_dir` for prefilled system prompts, which survive a restart. 0: none."),
    ] = 0
    restrict_tool_arguments: Annotated[
        bool, doc("Restrict tool-call arguments to words of the user's message, for models with `answers: calls`.")
    ] = True
    unload_after_s: Annotated[
        Pause,
        doc("Unload a model from memory after this time without requests; the next request loads it again. 0: never."),
    ] = 0.0
    enabled: Annotated[bool, doc("Whether this device runs models. `false`: every request goes to the cloud.")] = True


class CloudSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    connect_timeout_s: Annotated[Seconds, doc("Maximum time to connect to the cloud.")] = 2.0
    first_token_timeout_s: Annotated[Seconds, doc("Time limit to the first token, if the policy sets none.")] = 10.0
    timeout_s: Annotated[Seconds, doc("Time limit for a whole answer, if the policy sets none.")] = 60.0
    max_connections: Annotated[Positive, doc("Maximum open connections to the cloud.")] = 100
    probe_interval_s: Annotated[Seconds, doc("Interval between reachability probes while no requests are sent.")] = 5.0


class ResponseCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: Annotated[Count, doc("Maximum size of the response cache in memory.")] = 32 * 1024 * 1024
    disk_bytes: Annotated[Count, doc("Maximum size of the response cache on disk. 0: memory only.")] = 256 * 1024 * 1024


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_records: Annotated[Positive, doc("Maximum decision records kept in memory; the oldest are dropped.")] = 2000
    max_age_s: Annotated[Seconds, doc("Maximum age of decision records on disk.")] = 7 * 86400.0
    signals: Annotated[
        Literal["named", "all"],
        doc(
            "`named`: prompt tokens and quality are recorded only if the policy names them. `all`: both are computed "
            "for every decided request, so that any policy can be replayed."
        ),
    ] = "named"


class OutboxWebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: Annotated[Seconds, doc("Maximum time of one delivery.")] = 15.0
    concurrency: Annotated[Positive, doc("Maximum concurrent webhooks.")] = 8
    concurrency_per_receiver: Annotated[Positive, doc("Maximum concurrent webhooks to one scheme, host and port.")] = 2
    max_age_s: Annotated[
        Seconds,
        doc(
            "Time after a job's end at which an undelivered webhook is given up. The job stays listed until then; its "
            "result is still deleted after `jobs.result_ttl_s`."
        ),
    ] = 35 * 86400.0
    format: Annotated[
        WebhookFormat,
        doc(
            "Format of the request bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` "
            "(structured) or `cloudevents-binary`."
        ),
    ] = "standard"


class OutboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_jobs: Annotated[Positive, doc("Maximum unfinished jobs. A further job displaces bulk jobs or is refused.")] = (
        20_000
    )
    max_bytes: Annotated[Positive, doc("Maximum size of all requests and results of jobs on disk.")] = 256 * 1024 * 1024
    bulk_share: Annotated[
        float, Meta(gt=0, le=1), doc("Share of `jobs.max_jobs` and `jobs.max_bytes` that bulk jobs may fill.")
    ] = 0.75
    default_deadline_s: Annotated[Seconds, doc("Deadline of a job that sets none.")] = 86400.0
    max_deadline_s: Annotated[Seconds, doc("Latest deadline that a job may set.")] = 60 * 86400.0
    result_ttl_s: Annotated[Seconds, doc("Time for which an ended job and its result are kept.")] = 86400.0
    dead_letter_ttl_s: Annotated[Seconds, doc("Time for which a dead letter is kept.")] = 7 * 86400.0
    max_result_bytes: Annotated[Positive, doc("Maximum size of one result. A job with a larger result fails.")] = (
        4 * 1024 * 1024
    )
    max_attempts: Annotated[
        Positive,
        doc("Failed runs after which a job becomes a dead letter. Waiting for the cloud does not count as a run."),
    ] = 5
    device_concurrency: Annotated[
        Positive, doc("Maximum jobs on the device at the same time, in addition to requests.")
    ] = 2
    cloud_concurrency: Annotated[Positive, doc("Maximum jobs in the cloud at the same time.")] = 16
    cloud_rate_per_s: Annotated[
        Seconds, doc("Expected rate of jobs sent to the cloud. The actual rate never exceeds three times this value.")
    ] = 5.0
    jitter_s: Annotated[
        Pause, doc("Maximum random pause before waiting jobs are sent when the cloud becomes reachable again.")
    ] = 30.0
    max_revise_s: Annotated[
        Seconds, doc("Maximum time in which late parts may revise an answer (`revise_within_ms`).")
    ] = 120.0
    webhooks: OutboxWebhookSettings = OutboxWebhookSettings()


class DeviceFilesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_files: Annotated[Positive, doc("Maximum uploaded files, including those being uploaded.")] = 200
    max_bytes: Annotated[Positive, doc("Maximum size of all uploaded files together.")] = 256 * 1024 * 1024


class RealtimeConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    partial_interval_s: Annotated[
        Pause, doc("Amount of new audio between two partial transcripts of a speech turn. 0: no partial transcripts.")
    ] = 1.0


class MqttSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    receive_maximum: Annotated[
        int,
        Meta(ge=1, le=1024),
        doc("Maximum messages that wait on this device for the outbox. Others wait at the broker."),
    ] = 16
    max_message_bytes: Annotated[
        Positive, doc("Maximum size of a message. A larger message is answered with an error.")
    ] = 256 * 1024
    session_expiry_s: Annotated[
        float,
        Meta(ge=0, le=4294967295),
        doc("Time for which the broker keeps messages while this device is disconnected."),
    ] = 86400.0
    keepalive_s: Annotated[
        float,
        Meta(ge=1, le=65535),
        doc("MQTT keep-alive: time without traffic from the broker after which a ping is sent."),
    ] = 30.0


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: Annotated[
        bool,
        doc(
            "Whether audio, images and files of requests are turned into text for text-only models. "
            "Audio needs the extra `voice`, images the extra `images`."
        ),
    ] = True
    max_parts: Annotated[Positive, doc("Maximum audio, image and file parts in one request.")] = 8
    max_audio_s: Annotated[
        Seconds, doc("Maximum length of one audio part. Longer parts are rejected before decoding.")
    ] = 120.0
    max_pixels: Annotated[
        Positive, doc("Maximum size of an image, width × height. Larger images are rejected before decoding.")
    ] = 24_000_000
    max_text_bytes: Annotated[Positive, doc("Maximum size of a text file.")] = 256 * 1024
    audio_timeout_s: Annotated[
        Seconds,
        doc(
            "Maximum time to load the model, decode and transcribe audio. After it the request continues "
            "without the audio."
        ),
    ] = 20.0
    image_timeout_s: Annotated[
        Seconds,
        doc(
            "Maximum time to load the model, decode and read an image or file. After it the request "
            "continues without the part."
        ),
    ] = 10.0
    decoder_memory_bytes: Annotated[Positive, doc("Maximum memory of each process that decodes.")] = 512 * 1024 * 1024
    fact_cache_entries: Annotated[Count, doc("Maximum facts cached, by the hash of their audio or image. 0: none.")] = (
        256
    )
    language: Annotated[
        str,
        Meta(pattern=r"^([a-z]{2,3})?$"),
        doc(
            "Language spoken at this device, ISO 639-1. `en`: short audio is recognised as commands, "
            "which is much faster. Empty: the language is detected, which may fail for a short command."
        ),
    ] = ""
    voice: Annotated[
        str,
        Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}$"),
        doc(
            "Voice for requests with `auto` and for live sessions that name none: one added by `causeway-models "
            "add-voice`, or a language of espeak-ng."
        ),
    ] = "en-us"


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
    log: Annotated[
        Literal["debug", "info", "warning", "error"],
        doc("Log level: `debug`, `info`, `warning` or `error`. Prompts and answers are never logged."),
    ]
    log_format: Annotated[
        Literal["text", "json"], doc("Format of log lines: `text` or `json`. Prompts and answers are never logged.")
    ]


_SAMPLE_RATIO = {"tracing.sample_ratio": leaves_of(TracingConfig)["sample_ratio"]}  # not where the traces go
SETTINGS: Mapping[str, object] = {**leaves_of(FleetSettings), **_SAMPLE_RATIO}
"""The type of each key, with its limits."""


def read_setting(key: str, written: SettingValue) -> SettingValue:
    """Return a value as a person writes it (``30s``, ``64MiB``) in the type of its key.

    Raises:
        ValueError: The key is unknown, a fleet may not set it, or the value does not fit it.
    """
    return check_setting(key, without_unit(key, written))


def check_setting(key: str, value: SettingValue) -> SettingValue:
    """Return the value in the type of its key.

    Raises:
        ValueError: The key is unknown, a fleet may not set it, or the value does not fit it.
    """
    if key not in SETTINGS:
        renamed = find("edge.yaml", key)
        hint = renamed.sentence.removesuffix(".") if renamed is not None and renamed.new in SETTINGS else ""
        raise ValueError(hint or f"not a key that a fleet may set{did_you_mean(key, SETTINGS)}")
    try:
        checked: SettingValue = msgspec.convert(value, SETTINGS[key])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError("must be a finite number")
    return checked
