"""The run of all checks, those of the device itself among them, and the report, as text or JSON."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec

from causeway_server.models.llama_cpp.native.resources import allowed_cores, has_nvidia_gpu, probe_gpus
from causeway_server.router.bundle.settings import ResponseCacheConfig
from causeway_server.router.errors import ConfigError
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.at_rest.state_keys import CREDENTIAL, StateKeys
from causeway_server.router.types import DeviceSignals

from ...config.schema import Config, EngineConfig
from ...signals.device import DeviceProbes
from ...storage.policies import DEFAULT_POLICY
from . import Finding, Level, fail, network, ok, packages, policy_and_models, warn, worst

_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(config: Config, *, as_json: bool) -> int:
    """Run all checks and print the findings. Return the exit code: 1 if a check failed."""
    policy = Path(config.policy) if config.policy else DEFAULT_POLICY
    findings: list[Finding] = []
    for finding in examine(config, policy, DeviceProbes().read(time.monotonic())):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(msgspec.json.encode({"worst": worst(findings), "findings": findings}).decode())
    else:
        _print_summary(findings)
    return 1 if worst(findings) == "fail" else 0


def examine(config: Config, policy_path: Path, device: DeviceSignals) -> Iterator[Finding]:
    """Yield the findings of all checks: packages, policy and models, host, network."""
    installed = packages.read_installed()
    yield packages.check_python()
    yield from packages.check_requirements(installed, needs_engine=config.engine.enabled)
    yield from packages.check_owners(installed)
    if config.engine.enabled:
        yield packages.check_llama()
        yield packages.check_gpus(config.engine, probe_gpus(), has_nvidia_gpu())
        yield from packages.check_providers()
    policy, finding = policy_and_models.read_policy(policy_path)
    yield finding
    if policy is not None:
        yield from policy_and_models.check_targets(policy, config.engine, tuple(config.clouds))
        yield from policy_and_models.check_regions(policy, [cloud.region for cloud in config.cloud_configs])
        artifacts, findings = policy_and_models.check_models(policy, config.engine)
        yield from findings
        yield from policy_and_models.check_unloading(config.engine)
        yield from policy_and_models.check_memory(artifacts, config.engine, device)
        yield from policy_and_models.check_signals(policy, config.engine)
    yield from policy_and_models.check_encoders(config)
    yield from policy_and_models.check_refits(Path(config.state_dir), policy, config.engine)
    yield from check_state_dir(Path(config.state_dir), config.cache)
    yield check_encryption(StateKeys(Path(config.state_dir), config.encryption.key_file))
    yield check_threads(config.engine)
    yield from check_sensors(policy, device)
    yield network.check_port(config.server)
    yield from network.check_socket(config.server.socket)
    yield from network.check_exposure(config)
    yield from network.check_tls(config.server)
    yield from network.check_triton()
    yield from network.check_clouds(config.cloud_configs)
    yield from network.check_broker(config.mqtt)
    yield from network.check_tracing(config.tracing)


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level:4}", fg=_STYLES[finding.level], bold=finding.level == "fail")
    click.echo(f"{level}  {finding.check:13} {finding.found}")
    if finding.advice:
        click.echo(f"{'':21}{click.style('→', bold=True)} {finding.advice}")


def _print_summary(findings: list[Finding]) -> None:
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    summary = f"{failed} failed, {warned} warnings" if failed or warned else "all ok"
    click.echo(f"\n{len(findings)} checks: {summary}.")


_MIB = 2**20
_MIN_FREE_BYTES = 50 * _MIB


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def check_state_dir(
    path: Path, cache: ResponseCacheConfig, free_bytes_of: Callable[[Path], int] = _free_bytes
) -> Iterator[Finding]:
    """Check that the state folder is writable and has room for the cache; it need not exist yet."""
    folder = next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))
    free_bytes = free_bytes_of(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"causeway")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        advice = (
            f"Set state_dir (now {path}) to a folder that the daemon's account may write to. Otherwise "
            "the daemon stores no state."
        )
        yield fail("state folder", f"{folder}: {error.strerror}", advice)
        return
    text = f"{path} {'is' if folder == path else 'can be created and is'} writable, {free_bytes / _MIB:.0f} MiB free."
    if free_bytes < _MIN_FREE_BYTES:
        yield fail("state folder", text, "Free some space: the cache and the decision records are on this disk.")
    elif free_bytes < cache.disk_bytes + _MIN_FREE_BYTES:
        advice = f"Free some space, or lower cache.disk_bytes (now {cache.disk_bytes // _MIB} MiB)."
        yield warn("state folder", text, advice)
    else:
        yield ok("state folder", text)


def check_encryption(keys: StateKeys) -> Finding:
    """Check the key of the state folder, and say what it protects."""
    try:
        keys.check()
    except (ConfigError, OSError) as error:
        return fail("encryption", str(error), "Without the key, the daemon does not use the state folder.")
    if keys.source == CREDENTIAL:
        return ok("encryption", f"The state folder's key is the credential {CREDENTIAL}.")
    reach = "It protects copies of the folder, but not copies of the disk that holds this file."
    return ok(
        "encryption", f"The state folder's key is in {keys.source}{'' if keys.made else ', once needed'}. {reach}"
    )


def check_threads(engine: EngineConfig, cores: float | None = None) -> Finding:
    """Check that the engine has no more threads than cores. `cores` None: the number that this process may use."""
    usable = allowed_cores() if cores is None else cores
    if engine.threads > usable:
        text = f"engine.threads is {engine.threads}, but this process may use only {usable:g} cores."
        return warn("threads", text, "Threads that wait for a core slow down all others: set engine.threads to 0.")
    return ok("threads", f"{usable:g} cores, {engine.threads or 'the free ones'} for the engine.")


def check_sensors(policy: Policy | None, device: DeviceSignals) -> Iterator[Finding]:
    """Warn about device signals that the policy names but this device cannot read."""
    needed = policy.needs if policy else frozenset()
    signals = msgspec.to_builtins(device)
    readable = [f"{name} {_format(value)}" for name, value in signals.items() if value is not None]
    # CPU usage needs two readings.
    absent = [name for name, value in signals.items() if value is None and name != "cpu" and f"device.{name}" in needed]
    for name in absent:
        text = f"device.{name} cannot be read, but the policy names it."
        yield warn(
            "sensors",
            text,
            "Policy rules that need this signal do not hold on this device; `causeway-edge route` shows these rules.",
        )
    if not absent:
        yield ok("sensors", ", ".join(readable) or "no sensor can be read, and the policy names none")


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
