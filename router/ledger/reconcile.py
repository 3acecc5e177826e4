"""The comparison of devices' logs with gateways' logs: what became of each request that left a device.

1. matched: a gateway received the bytes that the device sent
2. unconfirmed: sent, and no log here says that it arrived: the server keeps none, or the bytes never arrived
3. undecided: only one side has it, and the other's log ends there without a clean end: a crash, within what its daemon
   had said was not on disk yet; or the log says that numbers were lost, or were deleted for space
4. tampered: a log was changed, or the two contradict each other
5. unlogged: a device's request arrived without its log knowing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from .log import Item, Log, Position, read_position
from .tree import Tree

_AGED_S = 60.0  # difference of two clocks, for what was deleted for space


class NotedHead(msgspec.Struct, frozen=True):
    """The tree of a log at an earlier audit. `root`: hex."""

    size: int
    root: str


class Gap(msgspec.Struct):
    """Requests that a crash left undecided in an epoch; `since`, `until`: Unix seconds of the other side's clock."""

    log: str
    epoch: str
    commit_s: float
    count: int = 0
    since: float = 0.0
    until: float = 0.0

    @property
    def is_long(self) -> bool:
        """Whether it is longer than the interval of commits."""
        return self.until - self.since > self.commit_s

    def add(self, time: float) -> None:
        self.since = min(time, self.since) if self.count else time
        self.until, self.count = max(time, self.until), self.count + 1


class Report(msgspec.Struct):
    """The result. `found`: what was tampered with, private or not logged, each with its place."""

    counts: Counter[str] = msgspec.field(default_factory=Counter)
    found: list[str] = []
    gaps: dict[tuple[str, str], Gap] = {}

    def find(self, verdict: str, message: str) -> None:
        self.counts[verdict] += 1
        self.found.append(f"{verdict}: {message}")


def reconcile(logs: Sequence[Log], noted: Mapping[str, NotedHead] = {}) -> Report:
    """Compare logs. `noted`: the heads of the audit before, by the log's id."""
    report = Report()
    for log in logs:
        for fault in log.faults:
            report.find("tampered", fault)
        if (head := noted.get(log.id)) is not None:
            _check_noted(report, log, head)
        for (epoch, seq), item in log.items.items():
            if item.private:
                report.find("private", f"{log.id}-{epoch}-{seq} ({item.id}) has the tag `private`")
    missing = noted.keys() - {log.id for log in logs}
    report.found += [f"note: the log {name} of an earlier audit was not given" for name in sorted(missing)]
    devices = {log.id: log for log in logs if log.role == "device"}
    gateways = {log.id: log for log in logs if log.role == "gateway"}
    _check_durable(report, logs)
    matched = _match_claims(report, devices, gateways)
    undecided = _match_receipts(report, devices, gateways, matched)
    report.counts["matched"] += len(matched)
    report.counts["unconfirmed"] += sum(len(log.items) for log in devices.values()) - len(matched) - undecided
    _find_unlogged(report, devices.values(), gateways.values())
    return report


_Place = tuple[str, str, int]


def _match_claims(report: Report, devices: Mapping[str, Log], gateways: Mapping[str, Log]) -> set[_Place]:
    """Compare what arrived with what devices sent; return what both have."""
    matched: set[_Place] = set()
    for log in gateways.values():
        for item in log.items.values():
            if (claim := read_position(item.claim)) is None:
                continue
            if (device := devices.get(claim.log)) is None:
                report.counts["from devices whose log was not given"] += 1
                continue
            sent = _find(report, device, claim, item.time)
            if isinstance(sent, Item) and sent.commitment == item.commitment:
                matched.add((claim.log, claim.epoch, claim.seq))
            elif sent is not None:
                what = sent if isinstance(sent, str) else "the two have different bytes"
                place = f"{claim.log}-{claim.epoch}-{claim.seq} arrived at {log.id} from {item.peer} ({item.id})"
                report.find("tampered", f"{place}: {what}")
    return matched


def _match_receipts(
    report: Report, devices: Mapping[str, Log], gateways: Mapping[str, Log], matched: set[_Place]
) -> int:
    """Compare gateways' receipts with their logs; return how many are undecided."""
    undecided = 0
    for device in devices.values():
        for epoch, seq, place in device.receipts:
            if place.log not in gateways:
                continue
            there = gateways[place.log].items.get((place.epoch, place.seq))
            is_there = there is None or there.claim.startswith(f"{device.id}-{epoch}-{seq}-")
            if is_there and (device.id, epoch, seq) in matched:
                continue
            sent = device.items.get((epoch, seq))
            arrived = _find(report, gateways[place.log], place, 0.0 if sent is None else sent.time)
            if arrived is None:
                undecided += 1
            else:
                what = arrived if isinstance(arrived, str) else "this is another request"
                report.find("tampered", f"{device.id}-{epoch}-{seq} was confirmed as {place.epoch}-{place.seq}: {what}")
    return undecided


def _find(report: Report, log: Log, place: Position, time: float) -> Item | str | None:
    """Return what a log has where the other side says at `time`; None if that is undecided, else the fault."""
    if (item := log.items.get((place.epoch, place.seq))) is not None:
        return item
    epoch = log.epochs.get(place.epoch)
    if log.start.size and (time < log.since + _AGED_S if epoch is None else place.seq < epoch.first):
        report.counts["deleted for space"] += 1
        return None
    if epoch is None:
        return f"{log.id} does not have this epoch"
    is_lost = any(place.seq in numbers for numbers in epoch.lost)
    if not is_lost and (place.seq < epoch.next or epoch.is_closed):
        return f"{log.id} does not have this number"
    report.counts["undecided"] += 1
    if not is_lost:
        report.gaps.setdefault((log.id, place.epoch), Gap(log.id, place.epoch, epoch.commit_s)).add(time)
    return None


def _check_durable(report: Report, logs: Sequence[Log]) -> None:
    """Find logs that end before what their own daemons said was on disk."""
    durable: Counter[tuple[str, str]] = Counter()
    for log in logs:
        claims = [read_position(item.claim) for item in log.items.values() if item.claim]
        for place in (*claims, *(place for *_, place in log.receipts)):
            if place is not None:
                durable[place.log, place.epoch] = max(durable[place.log, place.epoch], place.durable)
    for log in logs:
        for name, epoch in log.epochs.items():
            if (least := durable[log.id, name]) > epoch.next:
                what = f"{log.id}-{name} ends before {epoch.next}, and had all below {least} on disk"
                report.find("tampered", f"{what}: its end was cut off")


def _check_noted(report: Report, log: Log, noted: NotedHead) -> None:
    """Check that a log continues the one of the audit before."""
    if noted.size < log.start.size:
        report.found.append(f"note: {log.id} deleted records for space that were not audited ({noted.size} on)")
    elif noted.size > log.frontier.size:
        what = f"{log.id} has {log.frontier.size} records, and had {noted.size} at the audit before"
        report.find("tampered", f"{what}: it was rolled back")
    elif Tree(log.start, log.leaves).root(noted.size).hex() != noted.root:
        report.find("tampered", f"{log.id}: its first {noted.size} records are not those of the audit before")


def _find_unlogged(report: Report, devices: Iterable[Log], gateways: Iterable[Log]) -> None:
    """Find requests of a device that arrived without a claim, after one with a claim arrived at the same gateway."""
    names = {log.name: log.id for log in devices if log.name}
    for gateway in gateways:
        claiming: set[str] = set()
        for (epoch, seq), item in gateway.items.items():
            log = names.get(item.peer.rpartition("/")[2], "")
            if log and item.claim.startswith(log):
                claiming.add(log)
            elif log in claiming and not item.claim:
                report.find("unlogged", f"{gateway.id}-{epoch}-{seq} ({item.id}) arrived from {item.peer}")
