"""Try the models of a bundle: their memory, their adapters and projectors; describe them for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from models.catalog.artifact import (
    ENCODER_FILE,
    MMPROJ_FILE,
    PROJECTOR_FILE,
    AdapterEntry,
    Artifact,
    ArtifactError,
    Manifest,
    ProjectorEntry,
    adapter_file,
    find_artifact,
)
from models.catalog.fit import Device, largest_batch
from models.catalog.gguf import adapted_architecture, read_gguf
from models.catalog.mmproj import read_mmproj
from models.catalog.projector import missing_packages
from models.publish.check import check_mmproj, try_projector
from models.signals.calibration import ConfidenceCalibrator
from router.bundle.manifest import BundleModel, BundleProjector
from router.bundle.refusals import ModelTooLarge, ModelUnusable
from router.policy.compiled import Policy

from ..inspection import ModelFile
from ..store import signal_manifest

_CONTEXT_TOKENS = 1024  # a model that cannot take one request of so many tokens does not fit
_PROJECTOR_PROCESS_BYTES = 256 * 2**20  # of onnxruntime, the interpreter, a picture's pixels
_USABLE_SHARE = 0.9  # of all memory: what is used now may be the model that is replaced


def check_fit(file: ModelFile, total_bytes: int) -> None:
    """Check whether a model, its adapters and the process of its projector can ever run in this box's memory.

    Raises:
        ModelTooLarge: Not even one short request fits.
        ModelUnusable: The file is no model, or its projector is none.
    """
    model = file.model
    size_bytes = sum(blob.size_bytes for blob in model.loaded)
    if size_bytes > Device("this-box", total_bytes, _USABLE_SHARE).usable_bytes:
        raise ModelTooLarge(f"{model.name}: {size_bytes} bytes, this box has {total_bytes} bytes of memory")
    adapters_bytes = sum(adapter.blob.size_bytes for adapter in model.adapters)
    device = Device("this-box", total_bytes - adapters_bytes, _USABLE_SHARE)
    try:
        found = read_gguf(Path(file.path))
        pictures_bytes = _pictures_bytes(file)
    except ArtifactError as error:
        raise ModelUnusable(f"{model.name}: {error}") from error
    context = min(_CONTEXT_TOKENS, found.context_length or _CONTEXT_TOKENS)
    if largest_batch(found, device, context, limit=1, vision_bytes=pictures_bytes) == 0:
        beside = f" with {pictures_bytes} bytes for its projector" if pictures_bytes else ""
        raise ModelTooLarge(
            f"{model.name}{beside}: does not fit into {device.usable_bytes} of {total_bytes} bytes of memory"
        )


def _pictures_bytes(file: ModelFile) -> int:
    """The memory of the process that turns pictures into soft tokens. Raises ArtifactError."""
    projector = file.model.projector
    if projector is None:
        return 0
    if projector.encoder is None:
        return read_mmproj(Path(file.projector[0])).memory_bytes
    return sum(blob.size_bytes for blob in projector.blobs) + _PROJECTOR_PROCESS_BYTES


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


def check_projector(file: ModelFile) -> None:
    """Turn a black picture into soft tokens, as the model's projector will do it: nothing else loads it before the
    first picture of a client.

    Raises:
        ModelUnusable: The packages for it are missing here, or it is no projector of this model.
    """
    projector = file.model.projector
    if projector is None:
        return
    name = f"the projector of {file.model.name}"
    if missing := missing_packages(has_encoder=projector.encoder is not None):
        raise ModelUnusable(f"{name}: {', '.join(missing)} is not installed here: pip install 'causeway[pictures]'")
    path, model = Path(file.projector[0]), Path(file.path)
    try:
        if projector.encoder is None:
            check_mmproj(path, model)
        else:
            try_projector(path, Path(file.projector[1]), read_gguf(model).width, projector.tokens)
    except ArtifactError as error:
        raise ModelUnusable(f"{name}: {error}") from error


def check_signals(file: ModelFile, described: Manifest, policy: Policy, model_dirs: Sequence[Path]) -> None:
    """Load the signals about a model's answers, as the daemon will: without them a policy's conditions do not hold.

    Raises:
        ModelUnusable: A file is no such signal, or was fitted on other weights or beside another model.
    """
    model = Artifact(Path(file.path), described)
    others = [target.model for target in policy.targets if target.model != model.name]
    for signal, path in zip(file.model.signals, file.signals, strict=True):
        artifact = Artifact(Path(path), signal_manifest(file.model, signal))
        try:
            if signal.kind == "confidence":
                ConfidenceCalibrator.for_model(artifact, model)
            elif signal.kind == "edge.quality":
                _try_quality(artifact, model)
            else:
                _try_pair(artifact, model, others, model_dirs)
        except (ArtifactError, ImportError) as error:
            raise ModelUnusable(f"the signal {signal.kind} of {model.name}: {error}") from error


def _try_quality(artifact: Artifact, model: Artifact) -> None:
    from models.signals.quality import QualityEstimator  # brings ONNX Runtime

    estimator = QualityEstimator.for_model(artifact, model)
    try:
        estimator("hello")
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        raise ArtifactError(f"{artifact.path}: computes no quality of a prompt ({error})") from error


def _try_pair(artifact: Artifact, model: Artifact, others: Sequence[str], model_dirs: Sequence[Path]) -> None:
    from models.signals.pair import load_pair_file  # brings ONNX Runtime

    load_pair_file(artifact, model, others, model_dirs)


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
        projector=None if model.projector is None else _projector_entry(model.projector),
    )
    old = known_model(model.name, model_dirs)
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


def _projector_entry(projector: BundleProjector) -> ProjectorEntry:
    entry = ProjectorEntry(
        MMPROJ_FILE, projector.blob.sha256, projector.blob.size_bytes, projector.model_sha256, tokens=projector.tokens
    )
    if projector.encoder is None:
        return entry
    return msgspec.structs.replace(
        entry, file=PROJECTOR_FILE, encoder_file=ENCODER_FILE, encoder_sha256=projector.encoder.sha256
    )


def known_model(name: str, model_dirs: Sequence[Path]) -> Manifest | None:
    try:
        return find_artifact(name, model_dirs).manifest
    except ArtifactError:
        return None
