"""The fleet's settings are keys of `edge.yaml`, with its types and bounds, and never those that open a device."""

from __future__ import annotations

from operator import attrgetter

import pytest
from msgspec import inspect

from causeway_server.edge_node.config.loader import config_keys
from causeway_server.edge_node.config.schema import Config
from causeway_server.edge_node.daemon.fleet import with_settings
from causeway_server.router.bundle.settings import SETTINGS, check_setting, read_setting
from causeway_server.router.config import leaves_of

# Where the daemon listens, whom it admits, where requests and traces may go, what may be on the disk, credentials,
# paths, and the trial by which a device undoes a bundle.
REFUSED = {
    *("policy", "state_dir", "engine.model_dirs", "tracing.endpoint", "tracing.region", "guard.names_model"),
    *(
        "fleet.trial_s",
        "fleet.trial_requests",
        "fleet.trial_max_s",
        "fleet.telemetry_interval_s",
        "fleet.check_interval_s",
        "fleet.records_per_hour",  # what leaves the device is its owner's word
    ),
    *("egress_ledger.enabled", "egress_ledger.commit_s", "egress_ledger.max_bytes"),  # the owner's own evidence
    *("identity.issuers", "identity.clock_skew_s", "limits.overrides"),
    *(f"limits.default.{name}" for name in ("priority", "tokens_per_minute", "usd_per_day")),
    *("encryption.key_file", "encryption.rotate_s"),
    "jobs.accept_parts",
    "jobs.webhooks.allow_http",
    "jobs.webhooks.allowed_networks",
    "jobs.webhooks.ca_file",
    "jobs.webhooks.regions",
    *("files.accept", "files.ttl_s"),
    *(f"responses.{name}" for name in ("max_responses", "max_bytes", "max_total_bytes", "ttl_s")),
    *(f"clouds.NAME.{name}" for name in ("url", "key", "key_file", "ca_file", "region", "fleet_token")),
    *(f"clouds.NAME.client_{name}_file" for name in ("cert", "key")),
    *("mqtt.url", "mqtt.client_id", "mqtt.topics", "mqtt.response_topics", "mqtt.state_topic"),
    *("mqtt.username", "mqtt.password_file", "mqtt.ca_file", "mqtt.cert_file", "mqtt.key_file"),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_types_and_bounds_are_those_of_the_daemon(key: str) -> None:
    assert inspect.type_info(SETTINGS[key]) == inspect.type_info(leaves_of(Config)[key])


@pytest.mark.parametrize("key", SETTINGS)
def test_a_daemon_starts_with_a_bundle_that_sets_the_key(key: str) -> None:
    """Also a key of a section in a section, such as `jobs.webhooks.timeout_s`."""
    value = attrgetter(key)(Config())
    assert attrgetter(key)(with_settings(Config(), {key: value})) == value


def test_each_key_of_the_daemon_is_allowed_or_refused_on_purpose() -> None:
    """A new key of `edge.yaml` fails here until somebody decides, also one in a section that a fleet may set whole."""
    assert {key for key in config_keys() if not key.startswith("server.")} - set(SETTINGS) == REFUSED
    assert len(SETTINGS) == 67, "this many keys were allowed on purpose"


def test_a_fleet_sets_no_free_text() -> None:
    """No address, path or credential: a text that a fleet may set has a pattern, or is one of a few words."""
    kinds = {key: inspect.type_info(annotation) for key, annotation in SETTINGS.items()}
    bare = {key: kind.type if isinstance(kind, inspect.Metadata) else kind for key, kind in kinds.items()}
    texts = {key for key, kind in bare.items() if isinstance(kind, inspect.StrType)}
    assert texts == {"parts.language", "parts.voice"}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("cloud.timeout_s", "30s", 30.0),
        ("cloud.timeout_s", 30, 30.0),
        ("decisions.max_age_s", "7d", 604800.0),
        ("cache.memory_bytes", "64MiB", 1 << 26),
        ("engine.threads", 4, 4),
        ("engine.enabled", False, False),
        ("log", "debug", "debug"),
    ],
)
def test_values_are_read_as_the_daemon_reads_them(key: str, written: bool | int | str, value: object) -> None:
    read = read_setting(key, written)
    assert (read, type(read)) == (value, type(value))
    assert check_setting(key, read) == read


@pytest.mark.parametrize(
    ("key", "written", "words"),
    [
        ("engine.thread", 4, "did you mean `engine.threads`"),
        ("server.host", "0.0.0.0", "not a key that a fleet may set"),
        ("cloud.timeout_s", "soon", "Expected `float`"),
        ("cloud.timeout_s", float("inf"), "finite"),
        ("engine.sequences", 257, "<= 256"),
        ("log", "loud", "loud"),
        ("engine.enabled", 1, "Expected `bool`"),
        ("engine.threads", True, "Expected `int`"),
    ],
)
def test_another_value_is_refused(key: str, written: bool | float | str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_setting(key, written)
