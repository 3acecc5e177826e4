"""The keys of `edge.yaml` that a fleet may set, with their types and bounds.

Never among them: where the daemon listens and which API keys it accepts (`server.*`), where requests may go or come
from (`cloud.url`, `tracing.endpoint`, `mqtt.url` and its topics), credentials, paths, and the trial by which a box
undoes a bundle (`fleet.*`). The box refuses a signed bundle with such a key, so not even the holders of the signing
keys can open a box to others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..documents.reader import did_you_mean
from ..jobs.webhooks import WebhookFormat
from ..numbers import bytes_of, seconds_of

SettingValue = bool | int | float | str

_NonNegative = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0)]

SETTINGS: Mapping[str, object] = {
    "engine.sequences": Annotated[int, Meta(ge=1, le=256)],
    "engine.batch_tokens": _Positive,
    "engine.context_tokens": _NonNegative,
    "engine.threads": _NonNegative,
    "engine.gpu_layers": Annotated[int, Meta(ge=-1)] | Literal["auto"],
    "engine.restrict_tool_arguments": bool,
    "engine.unload_after_s": Annotated[float, Meta(ge=0)],
    "engine.enabled": bool,
    "engine.kv_type": Literal["f16", "q8_0"],
    "engine.prompt_lookup": bool,
    "engine.stored_prompts_bytes": _NonNegative,
    "cloud.connect_timeout_s": _Seconds,
    "cloud.first_token_timeout_s": _Seconds,
    "cloud.timeout_s": _Seconds,
    "cloud.max_connections": _Positive,
    "cloud.probe_interval_s": _Seconds,
    "cache.memory_bytes": _NonNegative,
    "cache.disk_bytes": _NonNegative,
    "jobs.max_jobs": _Positive,
    "jobs.max_bytes": _Positive,
    "jobs.bulk_share": Annotated[float, Meta(gt=0, le=1)],
    "jobs.default_deadline_s": _Seconds,
    "jobs.max_deadline_s": _Seconds,
    "jobs.result_ttl_s": _Seconds,
    "jobs.dead_letter_ttl_s": _Seconds,
    "jobs.max_result_bytes": _Positive,
    "jobs.max_attempts": _Positive,
    "jobs.device_concurrency": _Positive,
    "jobs.cloud_concurrency": _Positive,
    "jobs.steady_per_s": _Seconds,
    "jobs.jitter_s": Annotated[float, Meta(ge=0)],
    "jobs.max_revise_s": _Seconds,
    "jobs.webhooks.timeout_s": _Seconds,
    "jobs.webhooks.concurrency": _Positive,
    "jobs.webhooks.concurrency_per_receiver": _Positive,
    "jobs.webhooks.max_age_s": _Seconds,
    "jobs.webhooks.format": WebhookFormat,
    "files.max_files": _Positive,
    "files.max_bytes": _Positive,
    "realtime.max_sessions": _Positive,
    "realtime.max_items": Annotated[int, Meta(ge=2)],
    "realtime.max_bytes": Annotated[int, Meta(ge=4096)],
    "realtime.replay_bytes": _NonNegative,
    "realtime.max_audio_s": _Seconds,
    "realtime.partial_s": Annotated[float, Meta(ge=0)],
    "realtime.resume_s": Annotated[float, Meta(ge=0)],
    "realtime.idle_s": _Seconds,
    "realtime.ping_s": Annotated[float, Meta(ge=1)],
    "mqtt.receive_maximum": Annotated[int, Meta(ge=1, le=1024)],
    "mqtt.max_message_bytes": _Positive,
    "mqtt.session_expiry_s": Annotated[float, Meta(ge=0, le=4294967295)],
    "mqtt.keepalive_s": Annotated[float, Meta(ge=1, le=65535)],
    "modalities.enabled": bool,
    "modalities.max_parts": _Positive,
    "modalities.max_audio_s": _Seconds,
    "modalities.max_pixels": _Positive,
    "modalities.max_text_bytes": _Positive,
    "modalities.audio_timeout_s": _Seconds,
    "modalities.image_timeout_s": _Seconds,
    "modalities.decoder_memory_bytes": _Positive,
    "modalities.remembered": _NonNegative,
    "modalities.language": Annotated[str, Meta(pattern=r"^([a-z]{2,3})?$")],
    "modalities.voice": Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{1,64}$")],
    "decisions.memory_records": _Positive,
    "decisions.max_age_s": _Seconds,
    "decisions.record": Literal["cheap", "all"],
    "tracing.sample_ratio": Annotated[float, Meta(ge=0, le=1)],
    "log": Literal["debug", "info", "warning", "error"],
    "log_format": Literal["text", "json"],
}
"""The type of each key, the same as in the daemon's schema (a test compares them)."""


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
