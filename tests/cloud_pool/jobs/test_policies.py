"""Pure decisions of jobs: states, delays, priorities, addresses, failures, durability."""

from __future__ import annotations

import ipaddress
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.jobs.worker.execution import TURNS, WorkerSlots, classify_failure, is_tier_unavailable
from causeway_server.cloud_pool.storage.config import job_retry_delay_s
from causeway_server.cloud_pool.storage.durability import durability_problems
from causeway_server.cloud_pool.upstreams.triton.errors import StubProcessDied
from causeway_server.router.errors import (
    CausewayError,
    CloudFailed,
    CloudUnreachable,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    QueueFull,
    StreamBroken,
)
from causeway_server.router.jobs.job import (
    FINAL_STATES,
    TRANSITIONS,
    IllegalJobTransition,
    JobEvent,
    JobState,
    next_state,
)
from causeway_server.router.jobs.webhooks import (
    RETRY_DELAYS_S,
    WebhookRefused,
    allowed_networks,
    check_webhook_url,
    forbidden_reason,
    webhook_retry_delay_s,
)

CHANCE = st.floats(0.0, 1.0, exclude_max=True)


def test_every_state_has_a_row() -> None:
    assert set(TRANSITIONS) == set(JobState)
    for state in FINAL_STATES:
        assert set(TRANSITIONS[state]) <= {JobEvent.REVIVE}


@given(st.lists(st.sampled_from(JobEvent), max_size=30))
def test_only_retry_leaves_a_final_state(events: list[JobEvent]) -> None:
    state = JobState.QUEUED
    for event in events:
        was = state
        try:
            state = next_state(state, event)
        except IllegalJobTransition:
            continue
        assert was not in FINAL_STATES or state is was or (was, event) == (JobState.DEAD, JobEvent.REVIVE)


@given(st.integers(1, 10_000), CHANCE)
def test_a_retry_delay_is_positive_and_bounded(tried: int, draw: float) -> None:
    assert 0.0 < job_retry_delay_s(tried, draw, base_s=1.0, max_s=60.0) <= 60.0


@pytest.mark.parametrize(("tried", "ceiling"), [(1, 1.0), (2, 2.0), (4, 8.0), (7, 60.0)])
def test_retry_delays_double_up_to_the_maximum(tried: int, ceiling: float) -> None:
    assert job_retry_delay_s(tried, 0.0, base_s=1.0, max_s=60.0) == ceiling


@given(st.integers(1, 50), CHANCE)
def test_webhook_delays_follow_their_table_and_then_end(tried: int, draw: float) -> None:
    pause = webhook_retry_delay_s(tried, draw)
    if tried > len(RETRY_DELAYS_S):
        assert pause is None
    else:
        assert pause is not None
        assert abs(pause / RETRY_DELAYS_S[tried - 1] - 1.0) <= 0.2001


def test_priorities_follow_their_weights() -> None:
    slots = WorkerSlots("large", 1)
    for _ in range(3):
        assert Counter(slots.preferred(len(TURNS))) == {"interactive": 8, "standard": 3, "bulk": 1}


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "169.254.169.254",
        ),
        *("192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.255.255.255"),
        *("240.0.0.1", "255.255.255.255", "192.88.99.1", "168.63.129.16"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "2001:db8::1"),
        *(
            "::ffff:127.0.0.1",
            "::ffff:8.8.8.8",
            "::ffff:0:8.8.8.8",
            "::127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b::808:808",
        ),
        *(
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001:0:4136:e378::",
            "100::1",
            "not an address",
            "",
            "0x7f.1",
            "2130706433",
        ),
    ],
)
def test_private_and_embedding_addresses_are_forbidden(address: str) -> None:
    assert forbidden_reason(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "93.184.215.14", "2606:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert forbidden_reason(address) == ""


@given(st.integers(0, 2**32 - 1))
def test_no_address_outside_the_global_ranges_is_allowed(number: int) -> None:
    """Neither as IPv4 nor embedded in IPv6."""
    address = ipaddress.IPv4Address(number)
    if not address.is_global:
        assert forbidden_reason(str(address))
    for embedded in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}"):
        assert forbidden_reason(embedded)


def test_allowed_networks_permit_private_addresses() -> None:
    allowed = allowed_networks(("10.1.0.0/16",))
    assert forbidden_reason("10.1.2.3", allowed) == ""
    assert forbidden_reason("10.2.0.1", allowed)
    with pytest.raises(ConfigError, match="allowed_networks"):
        allowed_networks(("10.1.0.1/16",))


@pytest.mark.parametrize(
    "url",
    [
        *("http://example.com/", "ftp://example.com", "https://", "example.com", "https://user:pw@example.com/"),
        *(
            "https://127.0.0.1/",
            "https://[::1]/",
            "https://[::ffff:10.0.0.1]/",
            "https://example.com:0/",
            "https://a/ b",
        ),
        *("https://example.com/#x", "https://[fe80::1%25eth0]/", "https://exämple.com/", "https://a:99999/"),
        "https://example.com/" + "x" * 2048,
    ],
)
def test_invalid_webhook_urls_are_refused_at_submission(url: str) -> None:
    with pytest.raises(WebhookRefused):
        check_webhook_url(url, allow_http=False, allowed=())


def test_a_refused_webhook_says_what_would_be_accepted() -> None:
    with pytest.raises(WebhookRefused, match=r"must begin with https://\.$"):
        check_webhook_url("ftp://example.com", allow_http=False, allowed=())
    with pytest.raises(WebhookRefused, match=r"must begin with http:// or https://\.$"):
        check_webhook_url("ftp://example.com", allow_http=True, allowed=())
    with pytest.raises(WebhookRefused, match=r"it is private or reserved\. Name a public host, .*allowed_networks"):
        check_webhook_url("https://10.0.0.1/", allow_http=False, allowed=())


def test_a_public_https_url_is_accepted() -> None:
    url = "https://hooks.example.com:8443/a/b?c=d"
    assert check_webhook_url(url, allow_http=False, allowed=()) == url


@pytest.mark.parametrize(
    ("error", "late", "expected"),
    [
        (CloudFailed("x"), True, "expired"),
        (ContextLengthExceeded("x"), False, "failed"),
        (QueueFull("x"), False, "postponed"),
        (EngineUnavailable("x"), False, "postponed"),
        (CloudUnreachable("x", phase="connect"), False, "postponed"),
        (CloudUnreachable("x", phase="first_token"), False, "retried"),
        (StubProcessDied("x", phase="first_token"), False, "retried"),
        (StreamBroken("x", phase="stream"), False, "retried"),
        (DeadlineExceeded("x"), False, "retried"),
        (CausewayError("x"), False, "retried"),
    ],
)
def test_failures_are_classified(error: CausewayError, late: bool, expected: str) -> None:
    assert classify_failure(error, late=late) == expected


@pytest.mark.parametrize(
    ("error", "away"),
    [(CloudUnreachable("x"), True), (StubProcessDied("x"), True), (CloudFailed("x"), False), (QueueFull("x"), False)],
)
def test_which_errors_mark_a_tier_unavailable(error: CausewayError, away: bool) -> None:
    """A full tier is available; one that cannot be reached or lost its model is not."""
    assert is_tier_unavailable(error) is away


DURABLE = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "maxmemory": "1"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ()),
        ({"appendonly": "no"}, ("appendonly",)),
        ({"appendfsync": "everysec"}, ("appendfsync",)),
        ({"maxmemory-policy": "allkeys-lru"}, ("maxmemory-policy",)),
        ({"maxmemory-policy": "allkeys-lru", "maxmemory": "0"}, ()),
    ],
)
def test_unsafe_redis_settings_are_named(changes: dict[str, str], named: tuple[str, ...]) -> None:
    assert tuple(fault.partition(" ")[0] for fault in durability_problems(DURABLE | changes)) == named
