"""What an audit says of honest logs, of crashes, and of changed logs."""

from __future__ import annotations

import random

import msgspec
import pytest

from causeway_server.router.ledger.log import Closed, Confirmed, Item, Lost
from causeway_server.router.ledger.reconcile import NotedHead, Report, reconcile
from tests.bed.ledger import KINDS, Change, Written, another, changed, found_in

from .written import (
    DEVICE,
    DEVICE_KEY,
    EPOCH,
    GATEWAY,
    GATEWAY_EPOCH,
    GATEWAY_KEY,
    NUMBERS,
    Record,
    arrived,
    device,
    gateway,
    opened,
    pair,
    sent,
    written,
)


def audited(ours: list[Record] | None = None, theirs: list[Record] | None = None, **noted: NotedHead) -> Report:
    return reconcile([log.log() for log in pair(ours, theirs)], noted)


def test_honest_logs_match() -> None:
    report = audited()
    assert report.found == []
    assert {name: count for name, count in report.counts.items() if count} == {"matched": NUMBERS}


def test_what_no_gateway_has_is_unconfirmed() -> None:
    """Requests to a server that keeps no log, and one whose bytes never arrived."""
    report = audited(device(confirms=range(3)), gateway(3))
    assert report.found == []
    assert (report.counts["matched"], report.counts["unconfirmed"]) == (3, NUMBERS - 3)
    alone = reconcile([written("device", DEVICE_KEY, device()).log()])
    assert (alone.found, alone.counts["unconfirmed"]) == ([], NUMBERS)


@pytest.mark.parametrize("at", [2, 6, 11])
@pytest.mark.parametrize("name", ["device", "gateway"])
@pytest.mark.parametrize("with_key", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_found_and_located(kind: str, with_key: bool, name: str, at: int) -> None:
    """A record dropped, added, altered or moved, or the log rolled back to before the last audit."""
    logs = pair()
    log = next(one for one in logs if one.name == name)
    items = [line for line, text in enumerate(log.lines) if text.startswith(b'["item"')]
    heads = [line for line, text in enumerate(log.lines) if text.startswith(b'{"size"')]
    place = heads[at % (len(heads) - 1)] if kind == "roll back" else items[at]
    noted = {one.log().id: NotedHead(one.log().frontier.size, one.log().frontier.root().hex()) for one in logs}
    other = another(log, place, random.Random(at))
    change = Change(kind, log, place, with_key, "" if kind == "roll back" else f"{EPOCH}-{at}", other)
    for heads_noted in (noted, {} if kind != "roll back" else noted):
        report = found_in(change, logs, random.Random(at), heads_noted)
        assert report.counts["tampered"], change.words
        assert change.is_located(report.found), (change.words, report.found)


def test_a_crash_of_the_device_leaves_a_gap() -> None:
    """Its log ends without a clean end, and what arrived after that is undecided."""
    report = audited(device(9, closed=False), gateway(durable=8))
    assert report.found == []
    assert (report.counts["matched"], report.counts["undecided"], report.counts["unconfirmed"]) == (9, 3, 0)
    [gap] = report.gaps.values()
    assert (gap.log, gap.count, gap.until - gap.since, gap.is_long) == (DEVICE, 3, 2.0, True)


def test_a_log_that_was_cut_below_what_was_on_disk_is_found() -> None:
    report = audited(device(9, closed=False), gateway(durable=10))
    assert report.counts["tampered"] == 1
    assert "ends before 9, and had all below 10 on disk" in report.found[0]


def test_nothing_is_undecided_after_a_clean_end() -> None:
    report = audited(device(9))
    assert report.counts["tampered"] == 3
    assert f"{DEVICE}-{EPOCH}-9 arrived at {GATEWAY} from default/kiosk (r9)" in report.found[0]


def test_a_crash_of_the_gateway_leaves_a_gap() -> None:
    report = audited(None, gateway(9, closed=False))
    assert report.found == []
    assert (report.counts["matched"], report.counts["undecided"], report.counts["unconfirmed"]) == (9, 3, 0)
    assert [gap.log for gap in report.gaps.values()] == [GATEWAY]


def test_a_receipt_of_what_the_gateway_says_it_never_got_is_found() -> None:
    report = audited(None, gateway(9))
    assert report.counts["tampered"] == 3
    assert f"{DEVICE}-{EPOCH}-9 was confirmed as {GATEWAY_EPOCH}-9: {GATEWAY} does not have" in report.found[0]


def test_requests_that_change_places_between_epochs_are_found_by_their_receipts() -> None:
    """The gateway's owner exchanges the first ones of two starts, and signs all again."""
    other = "dddddddd"
    ours: list[Record] = [opened("device")]
    for seq, epoch in enumerate((GATEWAY_EPOCH, other)):
        ours += [sent(seq), Confirmed((f"{GATEWAY}-{epoch}-0-0-{seq}",))]
    ours.append(Closed(2000.0, EPOCH))
    for numbers, faults in (((0, 1), 0), ((1, 0), 2)):
        theirs: list[Record] = []
        for number, epoch in zip(numbers, (GATEWAY_EPOCH, other), strict=True):
            theirs += [opened("gateway", epoch), arrived(0, number=number), Closed(2000.0, epoch)]
        report = audited(ours, theirs)
        assert (report.counts["matched"], report.counts["tampered"]) == (2, faults)
    assert f"{DEVICE}-{EPOCH}-0 was confirmed as {GATEWAY_EPOCH}-0: this is another request" in report.found[0]


def test_an_epoch_that_the_log_does_not_know_is_found() -> None:
    other: list[Record] = [opened("device", "cccccccc"), Closed(2000.0, "cccccccc")]
    assert "does not have this epoch" in audited(other).found[0]


def test_a_private_request_on_either_side_is_a_fault() -> None:
    ours: list[Record] = [opened("device"), sent(0, private=True), Closed(2000.0, EPOCH)]
    report = audited(ours, gateway(0))
    assert report.counts["private"] == 1
    assert "(d0) has the tag `private`" in report.found[0]


def test_a_request_of_the_device_without_its_ledger_is_a_fault() -> None:
    """After it began to claim; before that it had none."""
    bare = Item(1000.0, 0, "", "r0", "default/kiosk", "eu", False, "")
    stranger = msgspec.structs.replace(bare, seq=3, peer="default/other")
    theirs: list[Record] = [
        opened("gateway"),
        bare,
        arrived(1, number=0),
        msgspec.structs.replace(bare, seq=2),
        stranger,
    ]
    report = audited(device(1, confirms=()), [*theirs, Closed(2000.0, GATEWAY_EPOCH)])
    assert report.counts["unlogged"] == 1
    assert f"{GATEWAY}-{GATEWAY_EPOCH}-2" in report.found[0]


def test_numbers_that_the_disk_did_not_take_are_undecided() -> None:
    ours: list[Record] = [opened("device"), sent(0), Lost(1001.0, 1, 10), sent(11), Closed(2000.0, EPOCH)]
    report = audited(ours)
    assert report.found == []
    assert (report.counts["matched"], report.counts["undecided"]) == (2, 10)


def test_a_request_that_was_sent_twice_matches_once() -> None:
    theirs: list[Record] = [opened("gateway"), arrived(0), arrived(1, number=0), Closed(2000.0, GATEWAY_EPOCH)]
    report = audited(device(1, confirms=()), theirs)
    assert (report.found, report.counts["matched"], report.counts["unconfirmed"]) == ([], 1, 0)


def test_a_log_that_was_written_again_is_found_by_the_audit_before() -> None:
    """All of it is signed, and the other side knows nothing of it."""
    log = written("device", DEVICE_KEY, device()).log()
    noted = {DEVICE: NotedHead(5, log.frontier.root().hex())}
    report = reconcile([log], noted)
    assert report.found == [f"tampered: {DEVICE}: its first 5 records are not those of the audit before"]


def test_a_log_of_the_audit_before_that_is_missing_is_noted() -> None:
    report = audited(None, None, fedcba=NotedHead(1, "00"))
    assert report.found == ["note: the log fedcba of an earlier audit was not given"]
    assert not report.counts["tampered"]


def test_a_device_that_was_not_given_is_counted() -> None:
    report = reconcile([written("gateway", GATEWAY_KEY, gateway()).log()])
    assert report.counts["from devices whose log was not given"] == NUMBERS


def test_what_follows_the_last_tree_head_is_not_there_yet() -> None:
    log = pair()[0]
    torn = Written(log.name, log.key, (*log.lines, b'["item",1,'), 0)
    assert torn.log().faults == []
    assert len(torn.log().items) == NUMBERS


@pytest.mark.parametrize("line", [b"", b"[]", b'["open"]', b'{"size":1}', b"\xff\xfe", b'["item",1e999]', b"null"])
def test_garbage_in_a_log_is_a_fault_at_its_line(line: bytes) -> None:
    log = pair()[0]
    garbage = log._replace(lines=(*log.lines[:4], line, *log.lines[4:]))
    assert any(fault.startswith(("device:5:", "device:2-5:")) for fault in garbage.log().faults)


def test_a_file_that_is_no_log_is_refused() -> None:
    with pytest.raises(ValueError, match="device is not an egress ledger"):
        Written("device", DEVICE_KEY, (b"hello", b"world"), 0).log()


def test_the_changes_of_this_test_are_changes() -> None:
    rng = random.Random(1)
    for kind in KINDS[:4]:
        log = pair()[0]
        assert changed(Change(kind, log, 3, False, "", another(log, 3, rng)), rng).lines != log.lines
