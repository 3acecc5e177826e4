"""Policy, models, state folder, memory, cores and sensors: what the daemon finds on this box."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from models.catalog.artifact import Artifact, ArtifactError, find_artifact, verify_artifact
from models.catalog.fit import estimate_memory
from models.catalog.gguf import read_gguf
from models.llama_cpp.native.threads import allowed_cores
from router.errors import PolicyError
from router.policy.compiled import Policy, parse_policy
from router.types import DeviceSignals

from ...config.schema import CacheConfig, EngineConfig
from .finding import Finding, fail, ok, warn

_MIB = 2**20
_LEAST_DISK_BYTES = 50 * _MIB
_SHORTEST_CONTEXT = 256  # tokens: with less the engine does not start


def read_policy(path: Path) -> tuple[Policy | None, Finding]:
    try:
        text = path.read_text(encoding="utf-8")
        policy = parse_policy(text, str(path))
    except (OSError, UnicodeDecodeError) as error:
        return None, fail("policy", f"{path}: {error}", "name a readable policy with `policy:` or --policy")
    except PolicyError as error:
        return None, fail("policy", str(error), f"mend the file; `causeway-fleet lint {path}` lists everything")
    places = ", ".join(f"{target.name} ({target.at}: {target.model})" for target in policy.targets)
    return policy, ok("policy", f"{policy.name}@{policy.revision} from {path}: {places}")


def check_targets(policy: Policy, engine: EngineConfig, cloud_url: str) -> Iterator[Finding]:
    """A target that this box can never reach."""
    for target in policy.targets:
        if target.at == "cloud" and not cloud_url:
            advice = "set cloud.url, or remove the target from the policy"
            yield warn("cloud", f"the policy's target {target.name} is in the cloud, and there is none", advice)
        if target.at == "edge" and not engine.enabled:
            advice = "set engine.enabled: true, or remove the target from the policy"
            yield warn("engine", f"the policy's target {target.name} is on the device, and the engine is off", advice)


def check_models(policy: Policy, engine: EngineConfig) -> tuple[list[Artifact], list[Finding]]:
    """The models of the policy's device targets: there, and the bytes that their manifest says."""
    artifacts: list[Artifact] = []
    findings: list[Finding] = []
    names = dict.fromkeys(target.model for target in policy.targets if target.at == "edge")
    for name in names if engine.enabled else ():
        try:
            artifact = find_artifact(name, [Path(folder) for folder in engine.model_dirs])
            verify_artifact(artifact)
        except ArtifactError as error:
            advice = "`causeway-models list` shows what there is; engine.model_dirs says where to look"
            findings.append(fail("model", str(error), advice))
            continue
        artifacts.append(artifact)
        size = f"{artifact.manifest.size_bytes / _MIB:.1f} MiB {artifact.manifest.quantisation}"
        findings.append(ok("model", f"{name}: {size}, its hash is right ({artifact.path})"))
    return artifacts, findings


def check_memory(artifacts: list[Artifact], engine: EngineConfig, device: DeviceSignals) -> Iterator[Finding]:
    """Whether the smallest useful engine fits into what is free."""
    if device.memory_free_mb is None:
        yield warn("memory", "cannot be read", "rules on device.memory_free_mb will not hold on this box")
        return
    for artifact in artifacts:
        context = min(engine.context_tokens or _SHORTEST_CONTEXT, artifact.manifest.context_length)
        try:
            need_mb = estimate_memory(read_gguf(artifact.path), context=context, batch=1).total_bytes / _MIB
        except ArtifactError as error:
            yield fail("model", str(error), "get the model again")
            continue
        told = f"{artifact.name} needs {need_mb:.0f} MiB, {device.memory_free_mb:.0f} MiB are free"
        if need_mb > device.memory_free_mb:
            yield fail("memory", told, "free some memory, or use a smaller model or engine.context_tokens")
        elif need_mb > 0.8 * device.memory_free_mb:
            yield warn("memory", told, "there is little room for a cache and for other programs")
        else:
            yield ok("memory", told)


def check_state_dir(path: Path, cache: CacheConfig, usage: Callable[[Path], int] | None = None) -> Iterator[Finding]:
    """Writable, and with room for the cache. `usage`: free bytes of the disk that holds a folder."""
    folder = _existing(path)  # the daemon makes what is missing; here nothing is made
    free_bytes = (usage or _free_bytes)(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"causeway")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        advice = f"give the daemon's account a folder it may write (state_dir, now {path}); without it nothing is kept"
        yield fail("state folder", f"{folder}: {error.strerror}", advice)
        return
    told = f"{path} {'is' if folder == path else 'can be made and is'} writable, {free_bytes / _MIB:.0f} MiB free"
    if free_bytes < _LEAST_DISK_BYTES:
        yield fail("state folder", told, "free some space: the cache and the records are on this disk")
    elif free_bytes < cache.disk_bytes + _LEAST_DISK_BYTES:
        advice = f"free some space, or set cache.disk_bytes lower (now {cache.disk_bytes // _MIB} MiB)"
        yield warn("state folder", told, advice)
    else:
        yield ok("state folder", told)


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def check_threads(engine: EngineConfig, cores: float | None = None) -> Finding:
    usable = allowed_cores() if cores is None else cores
    if engine.threads > usable:
        told = f"engine.threads is {engine.threads}, and this process may use {usable:g} cores"
        return warn("threads", told, "threads that wait for a core slow all others down: set engine.threads to 0")
    return ok("threads", f"{usable:g} cores, {engine.threads or 'the free ones'} for the engine")


def check_sensors(policy: Policy | None, device: DeviceSignals) -> Iterator[Finding]:
    """Signals that the policy names and this box cannot read: rules that need them never hold."""
    needed = policy.needs if policy else frozenset()
    known = msgspec.to_builtins(device)
    read = [f"{name} {_short(value)}" for name, value in known.items() if value is not None]
    # The share of the processor needs two readings.
    absent = [name for name, value in known.items() if value is None and name != "cpu" and f"device.{name}" in needed]
    for name in absent:
        told = f"device.{name} cannot be read, and the policy names it"
        yield warn("sensors", told, "rules that need it do not hold on this box; `causeway-edge route` shows which")
    if not absent:
        yield ok("sensors", ", ".join(read) or "none can be read, and the policy names none")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
