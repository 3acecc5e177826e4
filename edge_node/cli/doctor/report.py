"""Run all checks and report the findings, on a terminal as they come or as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from models.llama_cpp.native.gpu import has_nvidia_gpu, probe_gpus
from router.types import DeviceSignals

from ...config.schema import Config
from ...signals.device import DeviceProbes
from ...storage.policies import DEFAULT_POLICY
from . import Finding, Level, host, network, packages, policy_and_models, worst
from .encoders import check_encoders
from .network import check_broker, check_tracing

_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(config: Config, *, as_json: bool) -> int:
    """Run all checks and print the findings. Returns the exit code: 1 if a check failed."""
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
    """Yield the findings of all checks: packages, policy and models, host, network.

    Args:
        config: The daemon's configuration.
        policy_path: The policy file.
        device: The device signals, as read by the probes.
    """
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
        yield from policy_and_models.check_targets(policy, config.engine, config.cloud.url)
        artifacts, findings = policy_and_models.check_models(policy, config.engine)
        yield from findings
        yield from policy_and_models.check_unloading(config.engine)
        yield from policy_and_models.check_memory(artifacts, config.engine, device)
        yield from policy_and_models.check_signals(policy, config.engine)
    yield from check_encoders(config)
    yield from host.check_state_dir(Path(config.state_dir), config.cache)
    yield host.check_threads(config.engine)
    yield from host.check_sensors(policy, device)
    yield network.check_port(config.server)
    yield from network.check_socket(config.server.socket)
    yield from network.check_exposure(config.server)
    yield from network.check_triton()
    yield from network.check_cloud(config.cloud)
    yield from check_broker(config.mqtt)
    yield from check_tracing(config.tracing)


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
