"""The findings on a terminal, as they are made, or as JSON."""

from __future__ import annotations

import time
from pathlib import Path

import click
import msgspec

from ...config.schema import Config
from ...signals.probes import Probes
from ...storage.policies import DEFAULT_POLICY
from . import examine
from .finding import Finding, Level, worst

_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(config: Config, *, as_json: bool) -> int:
    """Returns the exit code: 1 when something must be done."""
    policy = Path(config.policy) if config.policy else DEFAULT_POLICY
    findings: list[Finding] = []
    for finding in examine(config, policy, Probes().read(time.monotonic())):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(msgspec.json.encode({"worst": worst(findings), "findings": findings}).decode())
    else:
        _print_sum(findings)
    return 1 if worst(findings) == "fail" else 0


def _print(finding: Finding) -> None:
    level = click.style(f"{finding.level:4}", fg=_STYLES[finding.level], bold=finding.level == "fail")
    click.echo(f"{level}  {finding.check:13} {finding.found}")
    if finding.advice:
        click.echo(f"{'':21}{click.style('→', bold=True)} {finding.advice}")


def _print_sum(findings: list[Finding]) -> None:
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    told = f"{failed} to mend, {warned} to know about" if failed or warned else "all well"
    click.echo(f"\n{len(findings)} things looked at: {told}.")
