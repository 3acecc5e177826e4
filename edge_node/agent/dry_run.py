"""What a box can know of a bundle before it runs it: its cases on this box, its models' memory, and what it changes.

All of it is pure but for the files that are read, and runs in a thread, away from requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from models.catalog.artifact import ArtifactError, Manifest
from models.catalog.fit import Device, largest_batch
from models.catalog.gguf import read_gguf
from router.bundle.manifest import BundleModel
from router.bundle.refusals import CasesFailed, ModelTooLarge, ModelUnusable, PolicyUnusable
from router.checks.cases import read_cases, run_cases
from router.checks.replay.replay import replay
from router.checks.replay.report import ReplayReport
from router.errors import PolicyError
from router.policy.compiled import ModelTemperature, Policy, parse_policy
from router.types import DecisionRecord

log = logging.getLogger(__name__)

_CONTEXT_TOKENS = 1024  # a model that cannot take one request of so many tokens does not fit
_USABLE_SHARE = 0.9  # of all memory: what is used now may be the model that is replaced


def check_policy(path: Path, model_temperature: ModelTemperature) -> Policy:
    """Raises PolicyUnusable."""
    try:
        return parse_policy(path.read_text(encoding="utf-8"), "policy of the bundle", model_temperature)
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


def compare(records: Sequence[DecisionRecord], new: Policy, old: Policy) -> ReplayReport:
    """Replay this box's own last decisions, and log what would have been different."""
    report = replay(records, new, old)
    unknown = sum(row.requests for row in report.unknown)
    log.info(
        "dry run of policy %s over the last %d decisions: %d unchanged, %d unknown, %d would leave the device",
        report.policy,
        report.requests,
        report.unchanged,
        unknown,
        len(report.leaving),
    )
    return report


def check_fit(model: BundleModel, weights: Path, total_bytes: int) -> None:
    """Check whether a model can ever run in this box's memory.

    Raises:
        ModelTooLarge: Not even one short request fits.
        ModelUnusable: The file is no model.
    """
    device = Device("this-box", total_bytes, _USABLE_SHARE)
    if model.blob.size_bytes > device.usable_bytes:
        raise ModelTooLarge(f"{model.name}: {model.blob.size_bytes} bytes, this box has {total_bytes} bytes of memory")
    try:
        found = read_gguf(weights)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    context = min(_CONTEXT_TOKENS, found.context_length or _CONTEXT_TOKENS)
    if largest_batch(found, device, context, limit=1) == 0:
        raise ModelTooLarge(f"{model.name}: does not fit into {device.usable_bytes} of {total_bytes} bytes of memory")


def describe(
    model: BundleModel,
    weights: Path,
    known: Callable[[str], Manifest | None],
) -> Manifest:
    """Describe a model for the engine.

    A model that this box knows by its name keeps how it is used (how it refuses, its temperature, what it answers):
    another version of the weights changes only those.

    Raises:
        ModelUnusable: The file is no model.
    """
    try:
        found = read_gguf(weights)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    fresh = Manifest(
        name=model.name,
        file="model.gguf",
        sha256=model.blob.sha256,
        size_bytes=model.blob.size_bytes,
        format="gguf",
        architecture=found.architecture,
        quantisation=found.quantisation,
        context_length=found.context_length,
        licence=found.licence or "",
        parameters=found.parameters,
        refuse_token=found.refuse_token,
        tokenizer_sha256=found.tokenizer_sha256,
    )
    old = known(model.name)
    if old is None:
        return fresh
    return msgspec.structs.replace(
        fresh,
        refuse_token=old.refuse_token,
        temperature=old.temperature,
        answer_tokens=old.answer_tokens,
        answers=old.answers,
    )
