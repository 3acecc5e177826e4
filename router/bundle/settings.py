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

from ..config import Count, Pause, Positive, Seconds, SessionConfig, TracingConfig, leaves_of
from ..documents.reader import did_you_mean
from ..numbers import without_unit
from ..renames import find

SettingValue = bool | int | float | str


class EngineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class CloudSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    connect_timeout_s: Seconds = 2.0
    first_token_timeout_s: Seconds = 10.0
    timeout_s: Seconds = 60.0
    max_connections: Positive = 100
    probe_interval_s: Seconds = 5.0


class ResponseCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_bytes: Count = 32 * 1024 * 1024
    disk_bytes: Count = 256 * 1024 * 1024


class DecisionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    memory_records: Positive = 2000
    max_age_s: Seconds = 7 * 86400.0
    signals: Literal["named", "all"] = "named"


class OutboxWebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timeout_s: Seconds = 15.0
    concurrency: Positive = 8
    concurrency_per_receiver: Positive = 2
    max_age_s: Seconds = 35 * 86400.0


class OutboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
    cloud_rate_per_s: Seconds = 5.0
    jitter_s: Pause = 30.0
    webhooks: OutboxWebhookSettings = OutboxWebhookSettings()


class DeviceFilesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_files: Positive = 200
    max_bytes: Positive = 256 * 1024 * 1024


class RealtimeConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    partial_interval_s: Pause = 1.0


class MqttSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    receive_maximum: Annotated[int, Meta(ge=1, le=1024)] = 16
    max_message_bytes: Positive = 256 * 1024
    session_expiry_s: Annotated[float, Meta(ge=0, le=4294967295)] = 86400.0
    keepalive_s: Annotated[float, Meta(ge=1, le=65535)] = 30.0


class PartsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    enabled: bool = True
    max_parts: Positive = 8
    max_audio_s: Seconds = 120.0
    max_pixels: Positive = 24_000_000
    max_text_bytes: Positive = 256 * 1024
    audio_timeout_s: Seconds = 20.0
    image_timeout_s: Seconds = 10.0
    decoder_memory_bytes: Positive = 512 * 1024 * 1024
    fact_cache_entries: Count = 256
    language: Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")] = ""
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
    """Return a value as a person writes it (``30s``, ``64MiB``) in the type of its key. Raises as `check_setting`."""
    return check_setting(key, without_unit(key, written))


def check_setting(key: str, value: SettingValue) -> SettingValue:
    """Return the value in the type of its key. Raise ValueError if it does not fit, or a fleet may not set the key."""
    if key not in SETTINGS:
        renamed = find("edge.yaml", key)
        hint = renamed.sentence.removesuffix(".") if renamed and (not renamed.new or renamed.new in SETTINGS) else ""
        raise ValueError(hint or f"not a key that a fleet may set{did_you_mean(key, SETTINGS)}")
    try:
        checked: SettingValue = msgspec.convert(value, SETTINGS[key])
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if isinstance(checked, float) and not math.isfinite(checked):
        raise ValueError("must be a finite number")
    return checked
