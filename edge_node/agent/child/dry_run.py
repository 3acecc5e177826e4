"""Try a bundle before the box runs it: its cases, its models' memory, and a replay of the box's own decisions.

It reads files and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from models.catalog.artifact import Manifest
from router.bundle.refusals import CasesFailed, PolicyUnusable
from router.checks.cases import read_cases, run_cases
from router.checks.replay.replay import replay
from router.errors import PolicyError
from router.policy.adapters import ModelAdapters, with_adapters
from router.policy.compiled import ModelTemperature, Policy, parse_policy
from router.policy.signals import OPENAI_TEMPERATURE
from router.types import DecisionRecord

from ...storage.decisions import read_stored
from ..inspection import BundleReport, BundleRequest
from .model_files import check_adapters, check_fit, check_projector, check_signals, describe, known_model

_REPLAYED_RECORDS = 500


def examine(request: BundleRequest) -> BundleReport:
    """Try a bundle without running it.

    Raises:
        UpdateRefused: It does not pass on this box; the class says why.
    """
    dirs = [Path(folder) for folder in request.model_dirs]
    models = []
    for file in request.models:
        check_fit(file, request.memory_bytes)
        models.append(describe(file.model, Path(file.path), dirs))
        check_adapters(file, models[-1].architecture)
        check_projector(file)
    described = {model.name: model for model in models}

    def temperature(name: str) -> float | None:
        manifest = described.get(name) or known_model(name, dirs)
        if manifest is None:
            return None
        return OPENAI_TEMPERATURE if manifest.temperature is None else manifest.temperature

    policy = check_policy(
        Path(request.policy), temperature, lambda name: _adapters(described.get(name) or known_model(name, dirs))
    )
    for file in request.models:
        check_signals(file, described[file.model.name], policy, dirs)
    cases = check_cases(policy, [Path(case) for case in request.cases])
    report = BundleReport(tuple(models), cases)
    records = last_records(Path(request.state_dir), request.since)
    if not records:
        return report
    running: Policy | None
    try:
        running = check_policy(
            Path(request.running_policy), temperature, lambda name: _adapters(known_model(name, dirs))
        )
    except PolicyUnusable:
        running = None  # compare with what was recorded
    replayed = replay(records, policy, running)
    first = next(iter(replayed.leaving), None)
    return msgspec.structs.replace(
        report,
        replayed=replayed.requests,
        unchanged=replayed.unchanged,
        unknown=sum(row.requests for row in replayed.unknown),
        leaving=len(replayed.leaving),
        example="" if first is None else f"{first.id} ({first.before} -> {first.after}, rule {first.rule or 'none'})",
    )


def check_policy(path: Path, model_temperature: ModelTemperature, model_adapters: ModelAdapters) -> Policy:
    """Raises PolicyUnusable."""
    try:
        policy = parse_policy(path.read_text(encoding="utf-8"), "policy of the bundle", model_temperature)
        return with_adapters(policy, model_adapters)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyUnusable(f"the policy cannot be read: {error}") from error
    except PolicyError as error:
        raise PolicyUnusable(error.message) from error


def check_cases(policy: Policy, cases: Sequence[Path]) -> int:
    """Run every case file; return the number of cases.

    Raises:
        CasesFailed: Names the first case that differs, and how many others do.
    """
    count, failed = 0, []
    for path in cases:
        found, locations, problems = read_cases(path.read_text(encoding="utf-8", errors="replace"), "cases")
        if found is None or problems:
            raise CasesFailed(f"a case file is unreadable: {problems[0].message if problems else 'empty'}")
        count += len(found.cases)
        failed += [result for result in run_cases(found, locations, policy) if result.differences]
    if failed:
        first = failed[0].differences[0]
        others = f", and {len(failed) - 1} other cases" if len(failed) > 1 else ""
        raise CasesFailed(f"{failed[0].name}: {first.key} is {first.found}, expected {first.expected}{others}")
    return count


def last_records(state_dir: Path, since: float) -> list[DecisionRecord]:
    """Return the box's newest decisions on disk; none if they cannot be read."""
    try:
        return list(deque(read_stored(state_dir, since=since).records, maxlen=_REPLAYED_RECORDS))
    except OSError:
        return []


def _adapters(manifest: Manifest | None) -> tuple[str, ...] | None:
    return None if manifest is None else tuple(manifest.adapters)
