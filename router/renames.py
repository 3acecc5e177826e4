"""Names of the previous version that were changed or removed: configuration, signals, metrics, commands.

One table serves the messages that refuse an old name, the commands that rewrite files (`router.migrate`) and the page
router/UPGRADING.md. Names in a device's state are in constants below, which the readers of the state use.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

Kind = Literal[
    "edge.yaml", "gateway.yaml", "fleet.yaml", "policy", "cases", "signal", "metric", "command", "extra", "model"
]


class Renamed(msgspec.Struct, frozen=True):
    """A name of the previous version. In keys, `NAME` stands for any key and `[]` for any item of a list.

    Attributes:
        old: The previous name.
        new: The present name; "" if it was removed, or must be changed by hand.
        values: The values whose names have changed, too.
        advice: The advice for a name without a successor, or about the values of a new one; a sentence.
        per_million: The new form of a price of 1,000 tokens, in which `#` stands for that of a million; "" for others.
    """

    old: str
    new: str = ""
    values: Mapping[str, str] = {}
    advice: str = ""
    per_million: str = ""

    @property
    def note(self) -> str:
        """Advice in addition to the new name; "" if there is none."""
        return self.advice or " ".join(f"Its value `{old}` is now `{new}`." for old, new in self.values.items())

    @property
    def sentence(self) -> str:
        """The name and its successor as sentences of a message."""
        old = f"`{self.old.rpartition('.')[2] if is_pattern(self.old) else self.old}`"
        if not self.new:
            return f"{old} was removed. {self.note}"
        new = f"`{self.new.rpartition('.')[2] if is_pattern(self.old) else self.new}`"
        return f"{old} is now {new}. {self.note}".rstrip()


def is_pattern(path: str) -> bool:
    """Return whether the path of a key stands for several keys."""
    return "[]" in path or "NAME." in path


def _same(section: str, successor: str, *names: str) -> tuple[Renamed, ...]:
    return tuple(Renamed(f"{section}{name}", f"{successor}{name}") for name in names)


_BY_HAND = "Its labels are `gen_ai_request_model` and `gen_ai_response_model` instead of `tier`; rewrite it by hand"
_GATEWAY_METRICS = (
    "audit_records_lost body_bytes breaker_open cache_faults cache_requests concurrency_limit degraded_answers "
    "endpoint_draining endpoint_ejected endpoint_ejections endpoint_outstanding endpoint_slow endpoint_ttft_seconds "
    "fleet_unreachable key_file_stale local_rate_checks model_reloads preemptions queue_seconds request_seconds "
    "requests requests_queued requests_rejected requests_running requests_shed retries retry_budget_remaining "
    "revocations_restored sessions sessions_ended sessions_opened sessions_refused sessions_resumed "
    "stale_revocation_accepts stream_active stream_in_flight stream_lag stream_messages stream_oldest_seconds "
    "stream_recovered stream_retries stream_seconds tenant_tokens tier_answers tier_share tokens usage_records_lost"
).split()
_TRAINING = (
    "average catalog compare convert-bert distill evaluate evaluate-routing evaluate-semantic export importance "
    "publish quantize train train-encoder train-heard-words train-quality train-semantic train-spoken"
).split()

_MILLION = "Prices are those of a million tokens: multiply by 1,000."
_NO_ONNX = "Projectors in ONNX are no longer read: name the `mmproj` file of a vision model, and delete the key."
_ASK = ("ask", "route", "listen")
_PRINT_JSON = (
    *(f"causeway-cloud {name}" for name in ("doctor", "usage", "plan", "jobs reconcile")),
    *(f"causeway-edge {name}" for name in (*_ASK, "doctor", "fleet status")),
    *(f"causeway-edge jobs {name}" for name in ("list", "show", "retry", "purge")),
    "causeway-fleet route",
)
GATEWAY_METRICS = "causeway_cloud_"
"""The prefix of the gateway's metrics in the previous version."""

MOVED_CLOUD_KEYS: Mapping[str, str] = {"url": "url", "api_key": "key", "api_key_file": "key_file", "ca_file": "ca_file"}
"""The keys of the section `cloud` that are now those of each cloud in `clouds`."""

RENAMED: Mapping[Kind, tuple[Renamed, ...]] = {
    "edge.yaml": (
        Renamed("modalities", "parts"),
        *_same("modalities.", "parts.", "enabled", "max_parts", "max_audio_s", "max_pixels", "max_text_bytes"),
        *_same("modalities.", "parts.", "audio_timeout_s", "image_timeout_s", "decoder_memory_bytes"),
        *_same("modalities.", "parts.", "language", "voice"),
        Renamed("modalities.remembered", "parts.fact_cache_entries"),
        *(Renamed(f"cloud.{old}", f"clouds.main.{new}") for old, new in MOVED_CLOUD_KEYS.items()),
        Renamed("decisions.record", "decisions.signals", {"cheap": "named"}),
        Renamed("jobs.steady_per_s", "jobs.cloud_rate_per_s"),
        Renamed("realtime.partial_s", "realtime.partial_interval_s"),
        Renamed("fleet.check_s", "fleet.check_interval_s"),
        Renamed("fleet.telemetry_s", "fleet.telemetry_interval_s"),
    ),
    "gateway.yaml": (
        Renamed("parts.remembered", "parts.fact_cache_entries"),
        Renamed("parts.remembered_s", "parts.fact_cache_ttl_s"),
        Renamed(
            "load_balancing.load_factor",
            advice="With `prefix_affinity` load is weighed in tokens (`load_balancing.load_tokens`): delete the key.",
        ),
        Renamed("tiers[].hedge", advice="Requests are no longer hedged: delete the key."),
        *(
            Renamed(f"tenants.prices[].{old}", f"tenants.prices[].{new}", advice=_MILLION, per_million="#")
            for old, new in (("per_1k_prompt", "input"), ("per_1k_completion", "output"))
        ),
    ),
    "policy": (
        Renamed(
            "targets.NAME.usd_per_1k_tokens",
            "targets.NAME.price",
            advice="Prices are those of a million tokens: 0.07 is now `price: {input: 70, output: 70}`.",
            per_million="{input: #, output: #}",
        ),
    ),
    "fleet.yaml": (
        Renamed("cohorts.NAME.models.NAME.golden[].picture", "cohorts.NAME.models.NAME.golden[].image"),
        Renamed(
            "cohorts.NAME.models.NAME.adapters.NAME.golden[].picture",
            "cohorts.NAME.models.NAME.adapters.NAME.golden[].image",
        ),
        Renamed("cohorts.NAME.models.NAME.projector.encoder", advice=_NO_ONNX),
        Renamed("cohorts.NAME.models.NAME.projector.tokens", advice=_NO_ONNX),
    ),
    "cases": (Renamed("cases[].snapshot.pictures", "cases[].snapshot.images"),),
    "signal": (Renamed("pictures.text", "images.text"),),
    "metric": (
        *_same(GATEWAY_METRICS, "causeway_gateway_", *_GATEWAY_METRICS),
        Renamed(f"{GATEWAY_METRICS}tenant_usd", "causeway_gateway_tenant_cost_usd"),
        Renamed(f"{GATEWAY_METRICS}ttft_seconds", advice=f"See `gen_ai_server_time_to_first_token`. {_BY_HAND}."),
        Renamed(f"{GATEWAY_METRICS}tpot_seconds", advice=f"See `gen_ai_server_time_per_output_token`. {_BY_HAND}."),
        Renamed(f"{GATEWAY_METRICS}hedges", advice="Requests are no longer hedged: delete its panels and rules."),
        Renamed("causeway_edge_running_requests", "causeway_edge_requests_running"),
        Renamed("causeway_edge_waiting_requests", "causeway_edge_requests_queued"),
        Renamed("causeway_edge_rejected_requests", "causeway_edge_requests_rejected"),
        Renamed("causeway_edge_engine_waiting_requests", "causeway_edge_engine_requests_queued"),
        Renamed("causeway_fleet_boxes_ahead", "causeway_fleet_devices_ahead"),
    ),
    "command": (
        Renamed(
            "causeway-cloud triton --http-port",
            advice="Triton serves only gRPC, because its model control needs a key: leave the flag out.",
        ),
        *(Renamed(f"{command} --json", f"{command} --format json") for command in _PRINT_JSON),
        *(Renamed(f"causeway-edge {name} --deadline", f"causeway-edge {name} --deadline-s") for name in _ASK),
        Renamed("causeway-edge listen --seconds", "causeway-edge listen --duration-s"),
        Renamed("causeway-cloud plan --at", "causeway-cloud plan --sequences"),
        Renamed("causeway-cloud keys issue --days", "causeway-cloud keys issue --lifetime-s"),
        Renamed("causeway-fleet serve --data", "causeway-fleet serve --state-dir"),
        Renamed("causeway-models calibrate --run", "causeway-models calibrate --run-dir"),
        *_same("causeway-models ", "causeway-train ", *_TRAINING),
        Renamed("causeway-models train-scope", advice="Nothing read the signal that it trained."),
        Renamed("causeway-models evaluate-scope", advice="Nothing read the signal that it measured."),
        Renamed("causeway-models train-panels", advice="Its data set was drawn only for a demonstration."),
    ),
    "extra": (
        Renamed("causeway[…]", "causeway-router[…]"),
        Renamed("causeway[pictures]", "causeway-router[images]"),
        Renamed("causeway[train]", "causeway-train[torch]"),
    ),
    "model": (Renamed("pictures", "images"),),
}
"""All names of the previous version, by kind. A fleet's settings are the keys of edge.yaml."""

TOKEN_TYPES: Mapping[str, str] = {"prompt": "input", "completion": "output"}
"""The values of the label `type` of metrics that count tokens."""
REWRITES: Mapping[Kind, str] = {
    "edge.yaml": "`causeway-edge migrate` rewrites the file.",
    "gateway.yaml": "`causeway-cloud migrate` rewrites the file.",
    "fleet.yaml": "`causeway-fleet lint --fix` rewrites the file.",
    "policy": "`causeway-fleet lint --fix` rewrites the file.",
    "cases": "`causeway-fleet lint --fix` rewrites the file.",
    "signal": "`causeway-fleet lint --fix` rewrites the file.",
    "model": "`causeway-edge migrate` renames its folder.",
}
"""The command that replaces the names in files."""

GOLDEN_IMAGE = "picture"
"""The key of a golden prompt's image in bundles of the previous version."""
IMAGES_TEXT = "pictures_text"
"""The field of the previous version's decision records that holds the signal `images.text`."""


def image_file_before(name: str) -> str:
    """Return the previous name of a golden prompt's image file, in the folder of an installed bundle."""
    return f"{GOLDEN_IMAGE}-{name.partition('-')[2]}"


@functools.cache
def _patterns(kind: Kind) -> tuple[tuple[re.Pattern[str], Renamed], ...]:
    quoted = ((re.escape(one.old).replace("NAME", ".+?").replace(r"\[\]", r"\[\d+\]"), one) for one in RENAMED[kind])
    return tuple((re.compile(pattern), one) for pattern, one in quoted)


def find(kind: Kind, name: str) -> Renamed | None:
    """Return the entry of a previous name; None if the name is not a previous one.

    Args:
        name: A name, or the path of a key (``cases[3].snapshot.images``).
    """
    return next((one for pattern, one in _patterns(kind) if pattern.fullmatch(name)), None)


def advice(kind: Kind, name: str, *, rewrites: bool = True) -> str:
    """Return advice about the successor of a previous name, in sentences; "" if the name is not a previous one.

    Args:
        rewrites: Whether to name the command that rewrites the file.
    """
    found = find(kind, name)
    if found is None:
        return ""
    return f"{found.sentence} {REWRITES.get(kind, '')}".rstrip() if rewrites else found.sentence
