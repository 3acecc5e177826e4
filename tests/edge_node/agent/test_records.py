"""The records that a device sends to its fleet: which, how many, and what they leave out."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.agent.link.records import RecordSample
from causeway_server.edge_node.agent.link.telemetry import MAX_SAMPLES, TELEMETRY_FILE, TelemetryLog
from causeway_server.edge_node.clock import Clock
from causeway_server.edge_node.observability.metrics import Traffic
from causeway_server.router.bundle.protocol import MAX_MESSAGE_BYTES, MAX_RECORDS, UNMEASURED
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.types import DecisionRecord
from tests.fleet.cli.test_replay import OLD, records
from tests.router.checks.recorded import ask, record_of


class Hour:
    """A clock that the test sets, seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sample(hour: Hour, per_hour: float = 3600.0, most: float = 3600.0) -> RecordSample:
    made = RecordSample(most, hour, random.Random(7))
    made.per_hour = per_hour
    return made


def public(count: int, first: int = 0) -> list[DecisionRecord]:
    return records(count, private=0, first=first)


def test_private_requests_are_only_counted() -> None:
    """By a constraint and by the client's wish. What is bound to a region is not sent, and is no private one."""
    hour = Hour()
    drawn = sample(hour)
    regional = OLD.replace("keep: on_device", "keep: in_region, regions: [eu]")
    bound = [
        *records(3, private=3),
        record_of(parse_policy(OLD), ask(prefer="only_on_device")),
        record_of(parse_policy(regional), ask(tags=("private",))),
    ]
    for record in bound:
        drawn.add(record)
    hour.now = 3600.0
    assert (drawn.take(MAX_RECORDS), drawn.private) == ((), 4)


def test_a_record_is_sent_without_names() -> None:
    """The client, the session's tag and texts of errors stay on the device; a rule on the client is then unknown."""
    hour = Hour()
    drawn = sample(hour)
    quoting = OLD.replace("routes:", "routes:\n  - {name: odd, when: '{\"a\": true}[request.client]', use: [small]}", 1)
    tags = ("session:abc", "kitchen", "session:anna")
    drawn.add(record_of(parse_policy(quoting), ask(tags=tags), fails=("small",)))
    hour.now = 60.0
    (one,) = drawn.take(1)
    sent = msgspec.json.decode(one.record, type=DecisionRecord)
    assert (sent.request.client, sent.request.tags, sent.parts) == ("", ("kitchen",), ())
    assert not any(attempt.detail for attempt in sent.outcome.attempts)
    assert "request.client" in sent.unrecorded
    assert b"till" not in bytes(one.record)


def test_the_sample_is_uniform_and_its_weights_are_the_requests() -> None:
    """Also over a pause in which nothing could be sent: each of 1,000 requests is drawn as often as any other."""
    early = 0
    for seed in range(300):
        hour = Hour()
        drawn = RecordSample(3600.0, hour, random.Random(seed))
        drawn.per_hour = 3600.0
        found = public(1)[0]
        for number in range(1000):
            drawn.add(msgspec.structs.replace(found, id=str(number)))
        hour.now = 4.0
        taken = drawn.take(MAX_RECORDS)
        assert sum(one.weight for one in taken) == pytest.approx(1000.0)
        early += sum(int(msgspec.json.decode(one.record)["id"]) < 500 for one in taken)
    assert 520 < early < 680  # of 1,200; 17 is a standard deviation


@pytest.mark.parametrize(("fleet", "owner"), [(0.0, 60.0), (60.0, 0.0)])
def test_either_side_can_refuse(fleet: float, owner: float) -> None:
    hour = Hour()
    drawn = sample(hour, fleet, owner)
    for record in public(40):
        drawn.add(record)
    hour.now = 7200.0
    assert drawn.take(MAX_RECORDS) == ()


def test_what_was_held_before_a_refusal_stays() -> None:
    hour = Hour()
    drawn = sample(hour)
    for record in public(5):
        drawn.add(record)
    hour.now, drawn.per_hour = 3600.0, 0.0
    assert drawn.take(MAX_RECORDS) == ()
    hour.now, drawn.per_hour = 7200.0, 3600.0
    assert drawn.take(MAX_RECORDS) == ()


def test_no_more_than_the_rate_is_sent() -> None:
    hour = Hour()
    drawn = sample(hour, per_hour=6.0)
    sent = 0
    for minute in range(600):
        for record in public(3, first=3 * minute):
            drawn.add(record)
        hour.now += 60.0
        sent += len(drawn.take(MAX_RECORDS))
    assert sent in (59, 60)  # the allowance adds up in floats


def test_labels_are_counts_by_cell() -> None:
    drawn = sample(Hour())
    drawn.label(None, good=True, on_device=True)
    drawn.label(0.5, good=False, on_device=True)
    drawn.label(0.5, good=True, on_device=False)
    assert drawn.take_labels() == {UNMEASURED: (1, 0, 1, 0), 16: (1, 1, 0, 1)}
    assert drawn.take_labels() == {}


def test_an_erased_client_is_in_no_held_record() -> None:
    """The others' weights are still their requests."""
    hour = Hour()
    drawn = sample(hour)
    (found,) = public(1)
    for number in range(20):
        request = msgspec.structs.replace(found.request, client="kiosk" if number % 4 else "till")
        drawn.add(msgspec.structs.replace(found, id=str(number), request=request))
    assert (drawn.forget("kiosk"), drawn.forget("kiosk")) == (15, 0)
    hour.now = 3600.0
    taken = drawn.take(MAX_RECORDS)
    assert {msgspec.json.decode(one.record)["id"] for one in taken} == {"0", "4", "8", "12", "16"}
    assert {one.weight for one in taken} == {1.0}


@pytest.mark.parametrize("cells", [8, 16, 33])
def test_labels_make_no_message_too_large(tmp_path: Path, cells: int) -> None:
    """Each sum and each label is sent; records wait for a message with room."""
    hour, sums = Hour(), [Traffic()]
    drawn = sample(hour, 1e6, 1e6)
    log = TelemetryLog("kiosk-1", "boot", lambda: sums[0], Clock(hour, lambda: 1.7e9 + hour.now / 7), tmp_path, drawn)
    for minute in range(MAX_SAMPLES):
        for record in public(2, first=2 * minute):
            drawn.add(record)
        for cell in range(cells):
            confidence = None if cell == UNMEASURED else cell / UNMEASURED
            for _ in range(10):
                drawn.label(confidence, good=True, on_device=True)
        sums[0] = Traffic(requests=2 * (minute + 1))
        hour.now += 60.0
        log.cut("b" * 64)
    requests = labels = sent = 0
    while (message := log.next()) is not None:
        assert len(msgspec.json.encode(message)) < MAX_MESSAGE_BYTES
        requests += sum(one.requests for one in message.samples)
        labels += sum(counts[0] for one in message.samples for counts in one.labels.values())
        sent += len(message.records)
        log.accepted(message)
    assert (requests, labels) == (2 * MAX_SAMPLES, 10 * cells * MAX_SAMPLES)
    assert sent or drawn.take(MAX_RECORDS)


def test_a_minute_without_requests_loses_no_cost(tmp_path: Path) -> None:
    """A shadow's cost comes later than its request; a restart of an engine is no sample."""
    hour, sums = Hour(), [Traffic()]
    log = TelemetryLog("kiosk-1", "boot", lambda: sums[0], Clock(hour, hour), tmp_path, sample(hour))
    for sums[0] in (Traffic(requests=1), Traffic(requests=1, micro_usd=500), Traffic(1, restarts=2, micro_usd=500)):
        log.cut(None)
    message = log.next()
    assert message is not None
    assert [(one.requests, one.micro_usd) for one in message.samples] == [(1, 0), (0, 500)]


def test_unsent_records_wait_sealed_and_bounded(tmp_path: Path) -> None:
    """A message fits whatever waits; the next run of the daemon sends the same message; the file shows nothing."""
    hour, sums = Hour(), [Traffic()]
    clock = Clock(hour, hour)
    keys = StateKeys(tmp_path)
    drawn = sample(hour, 1e6, 1e6)
    log = TelemetryLog("kiosk-1", "boot", lambda: sums[0], clock, tmp_path, drawn, keys)
    for minute in range(MAX_SAMPLES + 50):
        for record in public(40, first=40 * minute):
            drawn.add(record)
        sums[0] = Traffic(requests=40 * (minute + 1))
        hour.now += 60.0
        log.cut("b" * 64)
    first = log.next()
    assert first is not None
    assert 0 < len(first.records) <= MAX_RECORDS
    assert len(msgspec.json.encode(first)) < MAX_MESSAGE_BYTES
    log.keep()
    content = (tmp_path / TELEMETRY_FILE).read_bytes()
    assert b"kiosk" not in content
    again = TelemetryLog("kiosk-1", "boot-2", Traffic, clock, tmp_path, sample(hour), keys).next()
    assert again == first
