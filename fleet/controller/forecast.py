"""From stored records, counters and labels to the prediction of a rollout, and to what then happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import confidence_cell
from causeway_server.router.checks.possible import PolicyReplay
from causeway_server.router.checks.replay import effect
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.types import DecisionRecord

from ..rollout.prediction import Labels, Prediction, RecordedDevice, Replayed, effective, predict
from ..store.history import Happened
from ..store.records import LabelRow, StoredRecord, read_labels, read_records
from ..store.tables import COUNTERS
from ..store.telemetry import Counts, since_mark

_LEAST_LABELS = 20


class Evidence(msgspec.Struct, frozen=True):
    """The records, counters and labels of a cohort's devices."""

    records: Sequence[StoredRecord] = ()
    counts: Counts = {}
    labels: Sequence[LabelRow] = ()


async def read_evidence(connection: AsyncConnection, cohort: str, *, records: bool = True) -> Evidence:
    """Read what a cohort's devices have sent, with or without their records."""
    found = await read_records(connection, cohort) if records else ()
    return Evidence(found, await since_mark(connection, "", cohort), await read_labels(connection, cohort))


def forecast(policy: Policy, evidence: Evidence, bundle: str, *, same_models: bool) -> tuple[Prediction, ...]:
    """Predict the figures of devices that run `bundle` ("": the factory's files) under another policy.

    `same_models`: the labels are about answers of the same models; else quality is not predicted.
    """
    compiled, replayed = PolicyReplay(policy), defaultdict[str, list[Replayed]](list)
    for one in evidence.records:
        found = effect(one.record, compiled)
        if found is not None:
            cell = confidence_cell(_confidence(one.record))
            replayed[one.device].append(Replayed(one.weight, found.on_device, found.usd, cell))
    devices = []
    for name, found_records in replayed.items():
        counts = evidence.counts.get((name, bundle))
        requests, fixed = sum(one.weight for one in found_records), 0.0
        if counts is not None and (total := _counter(counts, "measured")):
            requests, fixed = float(total), (_counter(counts, "cached") + _counter(counts, "private")) / total
        devices.append(RecordedDevice(requests, min(fixed, 1.0), found_records))
    cells = defaultdict[str, dict[int, tuple[int, int]]](dict)
    for row in evidence.labels if same_models else ():
        if row.bundle == bundle:
            cells[row.device][row.cell] = (row.good, row.bad)
    return predict(devices, [Labels(one) for one in cells.values()])


def happened(
    predictions: Sequence[Prediction], evidence: Evidence, bundle: str, devices: Collection[str]
) -> tuple[Happened, ...]:
    """Return each prediction beside what these devices have shown under the new bundle."""
    rows = {name: counts for name in devices if (counts := evidence.counts.get((name, bundle))) is not None}
    sums = [sum(column) for column in zip(*rows.values(), strict=True)] or [0] * len(COUNTERS)
    requests, usd = _counter(sums, "measured"), _counter(sums, "micro_usd") / 1e6
    local, fixed = _counter(sums, "on_device"), _counter(sums, "cached") + _counter(sums, "private")
    own = [row for row in evidence.labels if row.bundle == bundle and row.device in rows]
    bad = sum(row.own_bad for row in own)
    labels = bad + sum(row.own_good for row in own)
    number = effective([_counter(counts, "measured") for counts in rows.values()])
    values: dict[str, float] = {}
    if requests:
        values = {"on_device": local / requests, "usd": 1000.0 * usd / requests}
    if requests > fixed and labels >= _LEAST_LABELS:
        values["quality"] = 1.0 - max(0, local - fixed) / (requests - fixed) * bad / labels
    found = []
    for one in predictions:
        seen = (number, labels if one.name == "quality" else requests) if one.name in values else ()
        found.append(Happened(one.name, *one.interval(*seen), values.get(one.name)))
    return tuple(found)


def _counter(counts: Sequence[int], name: str) -> int:
    return counts[COUNTERS.index(name)]


def _confidence(record: DecisionRecord) -> float | None:
    """Return the confidence of the device's first tokens, as its handoff compared it."""
    found = [one.confidence.score for one in record.outcome.attempts if one.at == "edge" and one.confidence is not None]
    return found[0] if found else None
