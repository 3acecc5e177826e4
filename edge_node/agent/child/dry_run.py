"""Try a bundle before the box runs it: its cases, its models' memory, and a replay of the box's own decisions.

It reads files and changes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from models.catalog.artifact import AdapterEntry, ArtifactError, Manifest, adapter_file, find_artifact
from models.catalog.fit import Device, largest_batch
from models.catalog.gguf import adapted_architecture, read_gguf
from router.bundle.manifest import BundleModel
from router.bundle.refusals import CasesFailed, ModelTooLarge, ModelUnusable, PolicyUnusable
from router.checks.cases import read_cases, run_cases
from router.checks.replay.replay import replay
from router.errors import PolicyError
from router.policy.adapters import ModelAdapters, with_adapters
from router.policy.compiled import ModelTemperature, Policy, parse_policy
from router.policy.signals import OPENAI_TEMPERATURE
from router.types import DecisionRecord

from ...storage.decisions import read_stored
from ..inspection import BundleReport, BundleRequest, ModelFile

_CONTEXT_TOKENS = 1024  # a model that cannot take one request of so many tokens does not fit
_REPLAYED_RECORDS = 500
_USABLE_SHARE = 0.9  # of all memory: what is used now may be the model that is replaced


def examine(request: BundleRequest) -> BundleReport:
    """Try a bundle without running it.

    Raises:
        UpdateRefused: It does not pass on this box; the class says why.
    """
    dirs = [Path(folder) for folder in request.model_dirs]
    models = []
    for file in request.models:
        check_fit(file.model, Path(file.path), request.memory_bytes)
        models.append(describe(file.model, Path(file.path), dirs))
        check_adapters(file, models[-1].architecture)
    described = {model.name: model for model in models}

    def temperature(name: str) -> float | None:
        manifest = described.get(name) or _known(name, dirs)
        if manifest is None:
            return None
        return OPENAI_TEMPERATURE if manifest.temperature is None else manifest.temperature

    policy = check_policy(
        Path(request.policy), temperature, lambda name: _adapters(described.get(name) or _known(name, dirs))
    )
    cases = check_cases(policy, [Path(case) for case in request.cases])
    report = BundleReport(tuple(models), cases)
    records = last_records(Path(request.state_dir), request.since)
    if not records:
        return report
    try:
        running = check_policy(Path(request.running_policy), temperature, lambda name: _adapters(_known(name, dirs)))
    except PolicyUnusable:
        return report
    replayed = replay(records, policy, running)
    return msgspec.structs.replace(
        report,
        replayed=replayed.requests,
        unchanged=replayed.unchanged,
        unknown=sum(row.requests for row in replayed.unknown),
        leaving=len(replayed.leaving),
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


def check_fit(model: BundleModel, weights: Path, total_bytes: int) -> None:
    """Check whether a model and its adapters can ever run in this box's memory.

    Raises:
        ModelTooLarge: Not even one short request fits.
        ModelUnusable: The file is no model.
    """
    size_bytes = sum(blob.size_bytes for blob in model.blobs)
    if size_bytes > Device("this-box", total_bytes, _USABLE_SHARE).usable_bytes:
        raise ModelTooLarge(f"{model.name}: {size_bytes} bytes, this box has {total_bytes} bytes of memory")
    device = Device("this-box", total_bytes - (size_bytes - model.blob.size_bytes), _USABLE_SHARE)
    try:
        found = read_gguf(weights)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    context = min(_CONTEXT_TOKENS, found.context_length or _CONTEXT_TOKENS)
    if largest_batch(found, device, context, limit=1) == 0:
        raise ModelTooLarge(f"{model.name}: does not fit into {device.usable_bytes} of {total_bytes} bytes of memory")


def check_adapters(file: ModelFile, architecture: str) -> None:
    """Check what the headers of a model's adapters say; the engine finds the rest when it loads them.

    Raises:
        ModelUnusable: A file is no LoRA adapter, or is one of other models.
    """
    for adapter, path in zip(file.model.adapters, file.adapters, strict=True):
        name = f"{file.model.name}+{adapter.name}"
        try:
            adapted = adapted_architecture(Path(path))
        except ArtifactError as error:
            raise ModelUnusable(f"{name}: {error}") from error
        if adapted != architecture:
            raise ModelUnusable(f"{name}: an adapter for {adapted} models, and {file.model.name} is {architecture}")


def describe(model: BundleModel, weights: Path, model_dirs: Sequence[Path]) -> Manifest:
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
        adapters={
            one.name: AdapterEntry(adapter_file(one.name), one.blob.sha256, one.blob.size_bytes, one.scale)
            for one in model.adapters
        },
    )
    old = _known(model.name, model_dirs)
    if old is None:
        return fresh
    return msgspec.structs.replace(
        fresh,
        refuse_token=old.refuse_token,
        temperature=old.temperature,
        answer_tokens=old.answer_tokens,
        answers=old.answers,
        transcripts=old.transcripts,
    )


def _known(name: str, model_dirs: Sequence[Path]) -> Manifest | None:
    try:
        return find_artifact(name, model_dirs).manifest
    except ArtifactError:
        return None


def _adapters(manifest: Manifest | None) -> tuple[str, ...] | None:
    return None if manifest is None else tuple(manifest.adapters)
