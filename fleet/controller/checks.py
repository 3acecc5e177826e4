"""LINT and REPLAY: the checks of a signed bundle before any box sees it. They read files: call them in a thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from router.checks.cases import read_cases, run_cases
from router.checks.replay.replay import replay
from router.errors import PolicyError
from router.policy.adapters import with_adapters
from router.policy.compiled import Policy, check_policy

from ..repository.records import RecordReader, record_files
from .publisher import Publisher

RECORDS = "records"
"""Folder of the fleet: records/COHORT/*.jsonl, from `causeway-edge decisions export`."""


def lint_bundle(publisher: Publisher, cohort: str, bundle: str) -> list[str]:
    """Return the problems of a bundle, for its author.

    1. It is signed, and for this cohort.
    2. Every file is there: boxes fetch them from here, or from a copy of this folder.
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


def replay_bundle(publisher: Publisher, fleet: Path, cohort: str, bundle: str) -> list[str]:
    """Return the requests of `records/COHORT` that stayed on the device and would, or may, leave it. No records: none.

    Raises:
        OSError: A file cannot be read.
    """
    folder = fleet / RECORDS / cohort
    manifest = publisher.manifest(bundle)
    if manifest is None or not folder.is_dir() or not any(folder.iterdir()):
        return []
    policy, problems = _policy(publisher.blob(manifest.policy.sha256), manifest.adapters)
    if policy is None:
        return problems
    reader = RecordReader(record_files((str(folder),)))
    report = replay(reader, policy)
    if not report.leaving:
        return []
    first = report.leaving[0]
    example = f"{first.id} ({first.before} -> {first.after}, rule {first.rule or 'none'})"
    count = f"{len(report.leaving)} of {report.requests} recorded requests"
    return [f"{count} stayed on the device and would or may leave it, such as {example}"]


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
