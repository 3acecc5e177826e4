"""LINT and REPLAY: the checks of a signed bundle before any device sees it. They read files: call them in a thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.checks.replay import replay
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import Policy, check_policy, with_adapters
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import DecisionRecord

from ..prover.proof import is_refused, prove
from ..repository.records import RecordReader, record_files
from ..rollout.prediction import Prediction
from ..rollout.rollout import Rollout
from ..store.records import StoredRecord
from .forecast import Evidence, forecast
from .publisher import Publisher

_PROVED: Final = ("keep", "claim", "compare")  # a rule that is never reached does no harm
_ALL_S: Final = 60.0  # for all statements of a policy, in which other rollouts make no step
log = logging.getLogger(__name__)
RECORDS = "records"
"""The fleet's folder of decision records, records/COHORT/*.jsonl, from `causeway-edge decisions export`."""


class Check(msgspec.Struct, frozen=True):
    """A check's problems, which reject a bundle, or why it was not made; `notes` are for people."""

    problems: tuple[str, ...] = ()
    unproven: str = ""
    notes: tuple[str, ...] = ()
    predictions: tuple[Prediction, ...] = ()


def lint_bundle(publisher: Publisher, cohort: str, bundle: str) -> list[str]:
    """Return the problems of a bundle, for its author.

    1. It is signed, and for this cohort.
    2. All files are present, since devices fetch them from here or from a copy of this folder.
    3. The policy compiles, and every case holds.
    """
    manifest = publisher.manifest(bundle)
    if manifest is None:
        return [f"bundle {bundle} is not signed by the role artifacts"]  # (1)
    if manifest.cohort != cohort:
        return [f"bundle {bundle} is for the cohort {manifest.cohort}"]
    missing = [blob.sha256 for blob in manifest.blobs if not publisher.blob(blob.sha256).is_file()]
    if missing:
        return [f"the blob {sha256} is not in {publisher.blob(sha256).parent}: upload it" for sha256 in missing]  # (2)
    policy, problems = _policy(publisher.blob(manifest.policy.sha256), manifest.adapters)
    return problems or [
        problem
        for blob in manifest.cases
        for problem in ([] if policy is None else _cases(publisher.blob(blob.sha256), policy))
    ]  # (3)


def prove_bundle(publisher: Publisher, rollout: Rollout, *, may_leave: bool) -> Check:
    """Prove the promises of the new bundle's policy, and that no more may leave than under the policy it replaces.

    1. A refuted statement is a problem.
    2. While one is undecided the policy counts as not checked: an approver may accept it.

    `may_leave`: an approver accepts that more requests may leave the device. Raises OSError.
    """
    policy, old = _policy_of(publisher, rollout.to_bundle), _policy_of(publisher, rollout.from_bundle)
    if policy is None:
        return Check((f"the policy of bundle {rollout.to_bundle} cannot be read",))
    replaced = None if old is None or old.revision == policy.revision else old
    try:
        proofs = prove(policy, replaced, kinds=_PROVED, all_s=_ALL_S)
    except Exception as failure:  # of the solver, on which no other cohort's rollout may wait
        log.error("The policy of bundle %s could not be proved: %s", rollout.to_bundle, redacted(failure))
        return Check(unproven=f"the proof failed ({type(failure).__name__}). Accept the rollout, or change the policy")
    refused = [f"{one.name} is refuted: {one.text}" for one in proofs if is_refused(one, may_leave=may_leave)]
    if refused:
        return Check(tuple([f"{one}; `causeway-fleet prove` shows a request" for one in refused]))  # (1)
    undecided = [f"{one.name} ({one.why})" for one in proofs if one.status == "undecided"]
    if rollout.from_bundle is not None and old is None and not may_leave:
        undecided.append("that no more may leave than before (the policy that it replaces cannot be read)")
    unproven = f"not proved: {', '.join(undecided)}. Accept the rollout, or change the policy" if undecided else ""
    proved = sum(one.status == "proved" for one in proofs)
    notes = (f"{proved} of {len(proofs)} statements proved",) if proofs else ()
    return Check(unproven=unproven, notes=(*notes, *_promises(policy)))  # (2)


def _promises(policy: Policy) -> Iterator[str]:
    for route in policy.routes:
        if (promise := route.promise) is not None:
            yield f"route {route.name} promises {promise.keep:.1%} as good as {promise.of} (risk {promise.risk:g})"


def replay_bundle(publisher: Publisher, fleet: Path, rollout: Rollout, evidence: Evidence, least: int = 1) -> Check:
    """Replay the requests that devices have sent, and those of `records/COHORT`, under the new bundle's policy.

    1. A request that stayed on the device and would leave it, or may, is a problem.
    2. With fewer requests than `least` the policy counts as not checked, unless the devices already run it.

    `evidence`: records, counters and labels of the cohort's devices. Raises OSError.
    """
    manifest = publisher.manifest(rollout.to_bundle)
    if manifest is None:
        return Check((f"bundle {rollout.to_bundle} is not signed by the role artifacts",))
    policy, problems = _policy(publisher.blob(manifest.policy.sha256), manifest.adapters)
    if policy is None:
        return Check(tuple(problems))
    try:
        reader = RecordReader(record_files((str(fleet / RECORDS / rollout.cohort),)))
    except FileNotFoundError:
        reader = RecordReader(())
    span = _Span()
    sent = evidence.records
    report = replay(span.over(sent, reader), policy)
    found = f"{report.requests} recorded requests of {span}"
    before = None if rollout.from_bundle is None else publisher.manifest(rollout.from_bundle)
    is_known = before is not None and (before.policy, before.adapters) == (manifest.policy, manifest.adapters)
    check = Check()
    if report.requests >= least or is_known:
        same_models = before is not None and before.models == manifest.models
        predictions = forecast(policy, evidence, rollout.from_bundle or "", same_models=same_models)
        check = Check(notes=(f"replayed {found}",), predictions=predictions)
    if report.leaving:  # (1)
        first = report.leaving[0]
        by = f" of {sent[first.position].device}" if first.position < len(sent) else ""
        example = f"{first.id}{by} ({first.before} -> {first.after}, rule {first.rule or 'none'})"
        count = f"{len(report.leaving)} of {report.requests} recorded requests"
        problem = f"{count} stayed on the device and would or may leave it, such as {example}"
        return msgspec.structs.replace(check, problems=(problem,))
    if check.notes:
        return check
    unread = f" ({reader.bad_count} lines cannot be read)" if reader.bad_count else ""
    return Check(  # (2)
        unproven=f"{found} to replay{unread}, but the cohort {rollout.cohort} needs {least} (`replay.records`). Resume "
        "the rollout when the cohort's devices have sent more, or when the output of `causeway-edge decisions "
        f"export` is in {RECORDS}/{rollout.cohort}/*.jsonl, or accept the rollout without a replay"
    )


class _Span:
    """The devices and days of the records that were replayed. Exported files do not name their device."""

    def __init__(self) -> None:
        self._devices: set[str] = set()
        self._days: set[int] = set()
        self._files = 0

    def over(self, sent: Sequence[StoredRecord], reader: RecordReader) -> Iterator[DecisionRecord]:
        for one in sent:
            self._devices.add(one.device)
            self._days.add(int(one.record.created // 86400))
            yield one.record
        for record in reader:
            self._files += 1
            self._days.add(int(record.created // 86400))
            yield record

    def __str__(self) -> str:
        days = f"{len(self._days)} {'day' if len(self._days) == 1 else 'days'}"
        devices = f"{len(self._devices)} {'device' if len(self._devices) == 1 else 'devices'}"
        return f"{devices} over {days}" + (f" ({self._files} from files)" if self._files else "")


def _policy_of(publisher: Publisher, bundle: str | None) -> Policy | None:
    manifest = None if bundle is None else publisher.manifest(bundle)
    if manifest is None or not publisher.blob(manifest.policy.sha256).is_file():
        return None
    return _policy(publisher.blob(manifest.policy.sha256), manifest.adapters)[0]


def _policy(path: Path, adapters: Mapping[str, Sequence[str]]) -> tuple[Policy | None, list[str]]:
    policy, problems = check_policy(path.read_bytes().decode("utf-8", "replace"), "policy")
    if policy is None:
        return None, [f"policy: {problem.message}" for problem in problems if problem.severity == "error"]
    try:
        return with_adapters(policy, adapters.get), []
    except PolicyError as error:
        return None, [f"policy: {error.message}"]


def _cases(path: Path, policy: Policy) -> Iterator[str]:
    cases, locations, problems = read_cases(path.read_bytes().decode("utf-8", "replace"), "cases")
    if cases is None:
        yield from (f"cases: {problem.message}" for problem in problems)
        return
    for result in run_cases(cases, locations, policy):
        for difference in result.differences[:1]:
            yield f"case {result.name}: {difference.key} is {difference.found}, expected {difference.expected}"
