"""Checks of the policy, the models of its device targets, the learned signals that it uses, and the encoders.

The encoders turn audio and images into text or soft tokens. A device without encoders is not a finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from causeway_server.models.catalog.artifact import (
    Artifact,
    ArtifactError,
    ArtifactNotFound,
    find_artifact,
    find_signal,
    list_artifacts,
    verify_artifact,
)
from causeway_server.models.catalog.fit import estimate_memory
from causeway_server.models.catalog.gguf import read_gguf
from causeway_server.models.catalog.projector import find_projector, vision_bytes
from causeway_server.models.parts.installed import (
    PROGRAM,
    SPEECH_MODEL,
    find_program,
    is_installed,
    is_onnxruntime_installed,
)
from causeway_server.models.parts.voices import list_voices, voice_of
from causeway_server.models.signals.calibration import read_refits
from causeway_server.router.errors import PolicyError
from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import DeviceSignals, Modality

from ...config.schema import Config, EngineConfig
from ...parts.speaker import SEPARATOR
from ...signals.estimators import QUALITY, judged_models, load_calibrator, load_pair, load_quality_estimator
from . import Finding, fail, ok, warn

_MIB = 2**20
_SHORT_IDLE_S = 30.0
_MIN_CONTEXT_TOKENS = 256  # minimum for a start of the engine
_INSTALL_VOICE = "`pip install 'causeway-router[voice]'`"


def read_policy(path: Path) -> tuple[Policy | None, Finding]:
    """Parse the policy file. Return None for the policy if it is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
        policy = parse_policy(text, str(path))
    except (OSError, UnicodeDecodeError) as error:
        return None, fail("policy", f"{path}: {error}", "Name a readable policy with `policy:` or --policy.")
    except PolicyError as error:
        return None, fail("policy", str(error), f"Fix the file; `causeway-fleet lint {path}` lists every problem.")
    targets = ", ".join(f"{target.name} ({target.at}: {target.served})" for target in policy.targets)
    return policy, ok("policy", f"{policy.name}@{policy.revision} from {path}: {targets}.")


def check_targets(policy: Policy, engine: EngineConfig, clouds: Sequence[str]) -> Iterator[Finding]:
    """Warn about targets that this configuration can never reach. `clouds`: the names of the configured clouds."""
    for target in policy.targets:
        if target.at == "cloud" and not clouds:
            advice = "Set clouds.NAME.url, or remove the target from the policy."
            yield warn(
                "cloud", f"Target {target.name} of the policy is in the cloud, but `clouds` names no cloud.", advice
            )
        missing = [one.cloud for one in target.in_each_cloud if one.cloud and clouds and one.cloud not in clouds]
        for cloud in missing:
            text = f"Target {target.name} of the policy is in the cloud {cloud}, which `clouds` does not list."
            yield warn("cloud", text, f"Set clouds.{cloud}.url, or remove the cloud from the policy.")
        if target.at == "edge" and not engine.enabled:
            advice = "Set engine.enabled: true, or remove the target from the policy."
            yield warn("engine", f"Target {target.name} of the policy is on the device, but the engine is off.", advice)


def check_regions(policy: Policy, regions: Collection[str]) -> Iterator[Finding]:
    """Warn about constraints that no configured cloud satisfies. `regions`: the regions of the configured clouds."""
    known = {region.casefold() for region in regions}
    for constraint in policy.region_constraints:
        if constraint.regions.isdisjoint(known):
            allowed = ", ".join(sorted(constraint.regions))
            advice = "Set clouds.NAME.region. Until then only the device answers the requests that it binds."
            yield warn("cloud", f"No cloud is in a region of the constraint {constraint.name}: {allowed}.", advice)


def check_models(policy: Policy, engine: EngineConfig) -> tuple[list[Artifact], list[Finding]]:
    """Find the models of the policy's device targets and verify their SHA-256."""
    artifacts: list[Artifact] = []
    findings: list[Finding] = []
    names = dict.fromkeys(target.model for target in policy.targets if target.at == "edge" and engine.enabled)
    for name in names:
        try:
            artifact = find_artifact(name, _model_dirs(engine))
            verify_artifact(artifact)
        except ArtifactError as error:
            advice = "`causeway-models list` shows the known models; engine.model_dirs sets where to search."
            findings.append(fail("model", str(error), advice))
            continue
        artifacts.append(artifact)
        for target in policy.targets:
            if target.at == "edge" and target.model == name and target.adapter not in ("", *artifact.manifest.adapters):
                known = ", ".join(artifact.manifest.adapters) or "none"
                text = f"Target {target.name}: {name} has no adapter `{target.adapter}`. Available: {known}."
                findings.append(fail("model", text, f"`causeway-models add-adapter {name} FILE` adds one."))
        size = f"{artifact.manifest.size_bytes / _MIB:.1f} MiB {artifact.manifest.quantisation}"
        findings.append(ok("model", f"{name}: {size}, SHA-256 matches ({artifact.path})."))
    return artifacts, findings


def check_unloading(engine: EngineConfig) -> Iterator[Finding]:
    """Report whether models are unloaded when idle, and warn if they would be reloaded too often."""
    if not engine.enabled or not engine.unload_after_s:
        return
    text = f"Models are unloaded after {engine.unload_after_s:g} s without requests; the next request loads them again."
    if engine.unload_after_s < _SHORT_IDLE_S:
        yield warn(
            "model",
            text,
            f"Many requests would wait for a model to load. Set engine.unload_after_s to {_SHORT_IDLE_S:g}s.",
        )
    else:
        yield ok("model", text)


def check_memory(artifacts: list[Artifact], engine: EngineConfig, device: DeviceSignals) -> Iterator[Finding]:
    """Check that each model with the smallest useful context fits into the free memory."""
    if device.memory_free_mb is None:
        yield warn(
            "memory",
            "Free memory cannot be read.",
            "Policy rules on device.memory_free_mb will never hold on this device.",
        )
        return
    for artifact in artifacts:
        context = min(engine.context_tokens or _MIN_CONTEXT_TOKENS, artifact.manifest.context_length)
        try:
            need = estimate_memory(read_gguf(artifact.path), context=context, batch=1).total_bytes
            need_mb = (need + vision_bytes(artifact)) / _MIB
        except ArtifactError as error:
            yield fail("model", str(error), "Download or copy the model again.")
            continue
        text = f"{artifact.name} needs {need_mb:.0f} MiB, and {device.memory_free_mb:.0f} MiB are free."
        if need_mb > device.memory_free_mb:
            yield fail("memory", text, "Free some memory, or use a smaller model or engine.context_tokens.")
        elif need_mb > 0.8 * device.memory_free_mb:
            yield warn("memory", text, "Little memory remains for the response cache and other programs.")
        else:
            yield ok("memory", text)


def check_signals(policy: Policy, engine: EngineConfig) -> Iterator[Finding]:
    """Check the learned signals of the device's models: those of a calibrated pair, which replace the others;
    `edge.quality` if a rule names it; the calibrators if a route hands off.
    """
    first = next((target for target in policy.targets if target.at == "edge"), None)
    if not engine.enabled or first is None:
        return
    models = judged_models(policy)
    named, hands_off = QUALITY in policy.needs, any(route.handoff is not None for route in policy.routes)
    if named and first.adapter:
        text = (
            f"The policy names {QUALITY}, but no signal computes it for {first.served}, because that "
            "is a model with an adapter."
        )
        yield warn(
            "signals",
            text,
            f"Policy rules on {QUALITY} do not hold. Make a model without an adapter the first edge target.",
        )
        named = False
    pairs = set()
    for model in models if hands_off else models[:named]:
        finding = _check_pair(model, policy, _model_dirs(engine))  # (1)
        if finding is not None:
            yield finding
            pairs |= {model} if finding.level == "ok" else set()
    if named and models[0] not in pairs:
        yield _check_quality(models[0], _model_dirs(engine))  # (2)
    for model in models if hands_off else []:
        if model not in pairs:
            yield from _check_calibrator(model, _model_dirs(engine))  # (3)


def _check_pair(model: str, policy: Policy, folders: list[Path]) -> Finding | None:
    """Return a finding about the calibrated pair of this model; None if no pair is calibrated."""
    try:
        large = load_pair(model, policy, folders).parameters.large.name
    except ArtifactNotFound:
        return None
    except (ArtifactError, ImportError) as error:
        return warn(
            "signals", f"The calibration of {model} is not used: {error}", "Run `causeway-models calibrate` again."
        )
    return ok("signals", f"{QUALITY} and handoffs of {model} are calibrated beside {large}.")


def check_refits(state_dir: Path, policy: Policy | None, engine: EngineConfig) -> Iterator[Finding]:
    """Report the device's refits of calibrated signals, if there are any, and whether the policy uses them."""
    try:
        refits = read_refits(state_dir)
    except (OSError, ValueError) as error:
        yield warn(
            "refit", f"The refits in {state_dir} cannot be read: {error}.", "Run the same command with --drop-refits."
        )
        return
    in_use = set()
    if refits and policy is not None and policy.shadow is not None and policy.shadow.refit:
        for model in judged_models(policy):
            with suppress(ArtifactError, ImportError):
                in_use.add(load_pair(model, policy, _model_dirs(engine)).sha256)
    for refit in refits:
        used = "are corrected" if refit.signals_sha256 in in_use else "have a refit that the policy does not use"
        yield ok("refit", f"The signals {refit.signals_sha256[:12]} {used}: {refit.sentence}.")


def _check_quality(model: str, folders: list[Path]) -> Finding:
    advice = f"Rules on {QUALITY} do not hold on this device; "
    try:
        verify_artifact(find_signal("edge.quality", find_artifact(model, folders), folders))
        load_quality_estimator(model, folders)("are you there")
    except ImportError as error:
        text = f"The policy names {QUALITY}, but ONNX Runtime is not installed ({error})."
        return warn("signals", text, advice + "run `pip install 'causeway-router[cpu]'` (or `[gpu]`).")
    except ArtifactError as error:
        text = f"The policy names {QUALITY}, but its estimator cannot be used: {error}"
        return warn("signals", text, advice + "train the estimator again with `causeway-train train-quality`.")
    return ok("signals", f"{QUALITY} was trained for the installed version of {model}, SHA-256 matches.")


def _check_calibrator(model: str, folders: list[Path]) -> Iterator[Finding]:
    try:
        verify_artifact(find_signal("confidence", find_artifact(model, folders), folders))
        load_calibrator(model, folders)
    except ArtifactNotFound as error:
        yield ok("signals", f"A handoff from {model} compares the engine's raw score ({error}).")
    except ArtifactError as error:
        advice = "Handoffs compare the raw score; train the calibrator again with `causeway-train train-quality`."
        yield warn("signals", f"The confidence of {model} is not calibrated: {error}", advice)
    else:
        yield ok("signals", f"A handoff from {model} compares a calibrated probability.")


def _model_dirs(engine: EngineConfig) -> list[Path]:
    return [Path(folder) for folder in engine.model_dirs]


def check_encoders(
    config: Config,
    installed: Callable[[Modality], bool] = is_installed,
    environ: Mapping[str, str] = os.environ,
    has_onnxruntime: Callable[[], bool] = is_onnxruntime_installed,
) -> Iterator[Finding]:
    """Check the model of each installed package, and the voices. `installed`: whether the packages for a kind of part
    are; `has_onnxruntime`: whether the one that runs voices is. `PATH` of `environ` is searched for espeak-ng.
    """
    if not config.parts.enabled:
        return
    folders = _model_dirs(config.engine)
    if installed("audio"):
        absent = "The extra `voice` is installed, but its model is not, so audio is refused."
        yield _check_encoder("speech", SPEECH_MODEL, folders, absent)
    yield from _check_projectors(folders)
    yield from _check_voices(folders, environ, has_onnxruntime)


def _check_encoder(check: str, model: str, folders: list[Path], absent: str) -> Finding:
    """Check one model. `absent`: the consequence of its absence."""
    pull = f"`causeway-models pull {model}`"
    try:
        artifact = find_artifact(model, folders)
        verify_artifact(artifact)
    except ArtifactNotFound:
        return warn(check, absent, f"Run {pull}.")
    except ArtifactError as error:
        return fail(check, str(error), f"Delete the folder, then {pull}.")
    return ok(check, f"{artifact.manifest.note}, SHA-256 matches ({artifact.path}).")


def _check_projectors(folders: list[Path]) -> Iterator[Finding]:
    for artifact in list_artifacts(folders):
        if artifact.manifest.projector is None:
            continue
        try:
            projector = find_projector(artifact.name, folders)
        except ArtifactError as error:
            yield fail(
                "projector",
                str(error),
                "Until the projector is repaired, the model does not accept images under `fusion: early`.",
            )
        else:
            assert projector is not None
            yield ok("projector", f"{artifact.name} reads images by its mmproj file ({projector.path}).")


def _check_voices(
    folders: list[Path], environ: Mapping[str, str], has_onnxruntime: Callable[[], bool]
) -> Iterator[Finding]:
    voices = list_voices(folders)
    if voices and find_program(environ) is None:
        missing = f"voices were added, but {PROGRAM}, which turns text into their phonemes, is not installed"
        yield warn("voice", missing, f"Run `apt install {PROGRAM}`.")
    if voices and not has_onnxruntime():
        yield warn("voice", "Voices were added, but onnxruntime, which runs them, is not installed.", _INSTALL_VOICE)
    for artifact in voices:
        again = f"delete {artifact.folder}, then `causeway-models add-voice`"
        try:
            verify_artifact(artifact)
            speakers = list(voice_of(artifact).settings.speakers)
        except ArtifactError as error:
            yield fail("voice", str(error), again)
        else:
            several = f", {len(speakers)} speakers such as {artifact.name}{SEPARATOR}{speakers[0]}" if speakers else ""
            yield ok("voice", f"{artifact.name}{several}, SHA-256 matches ({artifact.path}).")
