"""Try-out of a bundle before the device runs it: its cases, models' memory, and a replay of the device's decisions.

The dry run only reads files. Models are described for the engine, with their adapters, projectors and signals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import (
    MMPROJ_FILE,
    AdapterEntry,
    Artifact,
    ArtifactError,
    Manifest,
    ProjectorEntry,
    adapter_file,
    find_artifact,
)
from causeway_server.models.catalog.fit import Device, largest_batch
from causeway_server.models.catalog.gguf import adapted_architecture, read_gguf
from causeway_server.models.catalog.projector import has_pillow, read_mmproj
from causeway_server.models.publish.check import check_beside
from causeway_server.models.signals.calibration import ConfidenceCalibrator
from causeway_server.router.bundle.manifest import BundleModel, BundleProjector
from causeway_server.router.bundle.refusals import CasesFailed, ModelTooLarge, ModelUnusable, PolicyUnusable
from causeway_server.router.checks.cases import read_cases, run_cases
from causeway_server.router.checks.replay import replay
from causeway_server.router.errors import ConfigError, PolicyError
from causeway_server.router.policy.compiled import Policy, parse_policy, with_adapters
from causeway_server.router.policy.signals import OPENAI_TEMPERATURE
from causeway_server.router.types import DecisionRecord

from ..storage.decisions import read_stored
from .inspection import BundleReport, BundleRequest, ModelFile
from .store import signal_manifest

_REPLAYED_RECORDS = 500
_CONTEXT_TOKENS = 1024  # a model that cannot hold one request of this many tokens does not fit
_USABLE_SHARE = 0.9  # share of total memory: the memory in use now may belong to the model that is replaced


def examine(request: BundleRequest) -> BundleReport:
    """Try a bundle without running it. Raises UpdateRefused; the subclass names why it does not pass on this device."""
    dirs = [Path(folder) for folder in request.model_dirs]
    models = []
    for file in request.models:
        check_fit(file, request.memory_bytes)
        models.append(describe(file.model, Path(file.path), dirs))
        check_adapters(file, models[-1].architecture)
        check_projector(file)
    described = {model.name: model for model in models}

    policy = check_policy(Path(request.policy), lambda name: described.get(name) or known_model(name, dirs))
    for file in request.models:
        check_signals(file, described[file.model.name], policy, dirs)
    cases = check_cases(policy, [Path(case) for case in request.cases])
    report = BundleReport(tuple(models), cases)
    records = last_records(Path(request.state_dir), request.since)
    if not records:
        return report
    running: Policy | None
    try:
        running = check_policy(Path(request.running_policy), lambda name: known_model(name, dirs))
    except PolicyUnusable:
        running = None  # compare with the recorded decisions
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


def check_policy(path: Path, find: Callable[[str], Manifest | None]) -> Policy:
    """Return the policy in a file, compiled for the models that `find` returns by name. Raises PolicyUnusable."""

    def temperature(model: str) -> float | None:
        if (manifest := find(model)) is None:
            return None
        return OPENAI_TEMPERATURE if manifest.temperature is None else manifest.temperature

    def adapters(model: str) -> tuple[str, ...] | None:
        return None if (manifest := find(model)) is None else tuple(manifest.adapters)

    try:
        policy = parse_policy(path.read_text(encoding="utf-8"), "policy of the bundle", temperature)
        return with_adapters(policy, adapters)
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyUnusable(f"The policy cannot be read: {error}") from error
    except PolicyError as error:
        raise PolicyUnusable(error.message) from error


def check_cases(policy: Policy, cases: Sequence[Path]) -> int:
    """Run every case file; return the number of cases. CasesFailed names the first that differs, and the count."""
    count, failed = 0, []
    for path in cases:
        cases_found, locations, problems = read_cases(path.read_text(encoding="utf-8", errors="replace"), "cases")
        if cases_found is None or problems:
            raise CasesFailed(f"A case file is unreadable: {problems[0].message if problems else 'empty'}")
        count += len(cases_found.cases)
        failed += [result for result in run_cases(cases_found, locations, policy) if result.differences]
    if failed:
        first = failed[0].differences[0]
        others = f", and {len(failed) - 1} other cases" if len(failed) > 1 else ""
        raise CasesFailed(
            f"In the case {failed[0].name}, {first.key} is {first.found}, but {first.expected} is expected{others}"
        )
    return count


def last_records(state_dir: Path, since: float) -> list[DecisionRecord]:
    """Return the device's newest decisions on disk; none if they cannot be read."""
    try:
        return list(deque(read_stored(state_dir, since=since).records, maxlen=_REPLAYED_RECORDS))
    except (ConfigError, OSError):
        return []


def check_fit(file: ModelFile, total_bytes: int) -> None:
    """Raise ModelTooLarge if not even a short request fits into this device's memory with the model, its adapters and
    its projector's process; ModelUnusable if a file is invalid.
    """
    model = file.model
    size_bytes = sum(blob.size_bytes for blob in model.loaded)
    if size_bytes > Device("this-device", total_bytes, _USABLE_SHARE).usable_bytes:
        raise ModelTooLarge(
            f"{model.name} has {size_bytes} bytes, but this device has only {total_bytes} bytes of memory."
        )
    adapters_bytes = sum(adapter.blob.size_bytes for adapter in model.adapters)
    device = Device("this-device", total_bytes - adapters_bytes, _USABLE_SHARE)
    try:
        header = read_gguf(Path(file.path))
        images_bytes = _images_bytes(file)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    context = min(_CONTEXT_TOKENS, header.context_length or _CONTEXT_TOKENS)
    if largest_batch(header, device, context, limit=1, vision_bytes=images_bytes) == 0:
        beside = f" with {images_bytes} bytes for its projector" if images_bytes else ""
        raise ModelTooLarge(
            f"{model.name}{beside} does not fit into the {device.usable_bytes} usable bytes of {total_bytes} bytes of "
            "memory."
        )


def _images_bytes(file: ModelFile) -> int:
    """Return the memory of the process that turns images into soft tokens, in bytes. Raises ArtifactError."""
    return 0 if file.projector is None else read_mmproj(Path(file.projector)).memory_bytes


def check_adapters(file: ModelFile, architecture: str) -> None:
    """Check the headers of a model's adapters; the engine finds other faults. Raises ModelUnusable."""
    for adapter, path in zip(file.model.adapters, file.adapters, strict=True):
        name = f"{file.model.name}+{adapter.name}"
        try:
            adapted = adapted_architecture(Path(path))
        except ArtifactError as error:
            raise ModelUnusable(f"{name}: {error}") from error
        if adapted != architecture:
            raise ModelUnusable(f"{name} is an adapter for {adapted} models, but {file.model.name} is {architecture}.")


def check_projector(file: ModelFile) -> None:
    """Turn a black image into soft tokens, lest a client's image be the first. Raises ModelUnusable."""
    if file.projector is None:
        return
    name = f"The projector of {file.model.name}"
    if not has_pillow():
        raise ModelUnusable(
            f"{name}: Pillow is not installed on this device. Run `pip install 'causeway-router[images]'`."
        )
    try:
        check_beside("mmproj", Path(file.projector), Path(file.path))
    except ArtifactError as error:
        raise ModelUnusable(f"{name}: {error}") from error


def check_signals(file: ModelFile, described: Manifest, policy: Policy, model_dirs: Sequence[Path]) -> None:
    """Load the signals about a model's answers as the daemon does; without them a policy's conditions on them never
    hold. Raises ModelUnusable if a file is not such a signal, or was fitted on other weights or beside another model.
    """
    model = Artifact(Path(file.path), described)
    others = [target.model for target in policy.targets if target.model != model.name]
    for signal, path in zip(file.model.signals, file.signals, strict=True):
        artifact = Artifact(Path(path), signal_manifest(file.model, signal))
        try:
            if signal.kind == "confidence":
                ConfidenceCalibrator.load(artifact.path_for(model))
            elif signal.kind == "edge.quality":
                _try_quality(artifact, model)
            else:
                from causeway_server.models.signals.pair import load_pair_file  # imports ONNX Runtime

                load_pair_file(artifact, model, others, model_dirs)
        except (ArtifactError, ImportError) as error:
            raise ModelUnusable(f"The signal {signal.kind} of {model.name} cannot be used: {error}") from error


def _try_quality(artifact: Artifact, model: Artifact) -> None:
    from causeway_server.models.signals.quality import QualityEstimator  # imports ONNX Runtime

    estimator = QualityEstimator(artifact.path_for(model))
    try:
        estimator("hello")
    except Exception as error:  # onnxruntime's own exception classes have no common base
        raise ArtifactError(f"{artifact.path}: cannot estimate the quality of a prompt ({error}).") from error


def describe(model: BundleModel, weights: Path, model_dirs: Sequence[Path]) -> Manifest:
    """Describe a model for the engine, with the usage settings of this device's model of its name (refusal,
    temperature, form of answers), as a bundle replaces only its weights. Raises ModelUnusable.
    """
    try:
        header = read_gguf(weights)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    fresh = Manifest(
        name=model.name,
        file="model.gguf",
        sha256=model.blob.sha256,
        size_bytes=model.blob.size_bytes,
        format="gguf",
        architecture=header.architecture,
        quantisation=header.quantisation,
        context_length=header.context_length,
        licence=header.licence or "",
        parameters=header.parameters,
        refuse_token=header.refuse_token,
        tokenizer_sha256=header.tokenizer_sha256,
        adapters={
            adapter.name: AdapterEntry(
                adapter_file(adapter.name), adapter.blob.sha256, adapter.blob.size_bytes, adapter.scale
            )
            for adapter in model.adapters
        },
        projector=None if model.projector is None else _projector_entry(model.projector),
    )
    old = known_model(model.name, model_dirs)
    if old is None:
        return fresh
    known = {name: one.answers for name, one in old.adapters.items()}
    adapters = {name: msgspec.structs.replace(one, answers=known.get(name)) for name, one in fresh.adapters.items()}
    return msgspec.structs.replace(
        fresh,
        adapters=adapters,
        refuse_token=old.refuse_token,
        temperature=old.temperature,
        answer_tokens=old.answer_tokens,
        answers=old.answers,
        transcripts=old.transcripts,
    )


def _projector_entry(projector: BundleProjector) -> ProjectorEntry:
    return ProjectorEntry(MMPROJ_FILE, projector.blob.sha256, projector.blob.size_bytes, projector.model_sha256)


def known_model(name: str, model_dirs: Sequence[Path]) -> Manifest | None:
    try:
        return find_artifact(name, model_dirs).manifest
    except ArtifactError:
        return None
