"""The learned signals that the policy makes use of: are they there, whole, and for the very models that are used?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from models.catalog.artifact import ArtifactError, ArtifactNotFound, find_artifact, verify_artifact
from models.signals.lookup import find_signal
from router.policy.compiled import Policy

from ...config.schema import EngineConfig
from ...signals.estimators import QUALITY, load_calibrator, load_quality
from .finding import Finding, ok, warn


def check_signals(policy: Policy, engine: EngineConfig) -> Iterator[Finding]:
    """(1) `edge.quality` where a rule names it; (2) the calibrator where an answer may be handed off."""
    models = list(dict.fromkeys(target.model for target in policy.targets if target.at == "edge"))
    if not engine.enabled or not models:
        return
    if QUALITY in policy.needs:
        yield _check_quality(models[0], [Path(folder) for folder in engine.model_dirs])  # (1)
    if any(route.handoff is not None for route in policy.routes):
        for model in models:
            yield from _check_calibrator(model, [Path(folder) for folder in engine.model_dirs])  # (2)


def _check_quality(model: str, folders: list[Path]) -> Finding:
    advice = f"rules on {QUALITY} do not hold on this box; "
    try:
        verify_artifact(find_signal("edge.quality", find_artifact(model, folders), folders))
        load_quality(model, folders)("are you there")
    except ImportError as error:
        told = f"the policy names {QUALITY}, and ONNX Runtime is not there ({error})"
        return warn("signals", told, advice + "`pip install 'causeway[cpu]'` (or gpu)")
    except ArtifactError as error:
        told = f"the policy names {QUALITY}, and it cannot be told: {error}"
        return warn("signals", told, advice + "make the signal anew with `causeway-models quality`")
    return ok("signals", f"{QUALITY} belongs to the {model} that is here, its hash is right")


def _check_calibrator(model: str, folders: list[Path]) -> Iterator[Finding]:
    try:
        verify_artifact(find_signal("confidence", find_artifact(model, folders), folders))
        load_calibrator(model, folders)
    except ArtifactNotFound as error:
        yield ok("signals", f"a handoff from {model} compares the engine's own score ({error})")
    except ArtifactError as error:
        advice = "handoffs compare the engine's own score; make it anew with `causeway-models quality`"
        yield warn("signals", f"the confidence of {model} is not calibrated: {error}", advice)
    else:
        yield ok("signals", f"a handoff from {model} compares a probability")
