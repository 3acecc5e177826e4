"""`causeway-edge doctor`: looks at everything that the daemon needs and says what to do about each thing that is wrong.

It changes nothing and may run beside a daemon. Every check is a function from what it looks at to Findings, so a test
hands it a broken one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from router.types import DeviceSignals

from ...config.schema import Config
from . import network, packages, parts, signals
from .finding import Finding, Level, worst

__all__ = ["Finding", "Level", "examine", "worst"]


def examine(config: Config, policy_path: Path, device: DeviceSignals) -> Iterator[Finding]:
    """All findings, as they are made: packages, then parts, then network. `device`: what the probes read."""
    installed = packages.read_installed()
    yield packages.check_python()
    yield from packages.check_requirements(installed, needs_engine=config.engine.enabled)
    yield from packages.check_owners(installed)
    if config.engine.enabled:
        yield packages.check_llama()
    policy, finding = parts.read_policy(policy_path)
    yield finding
    if policy is not None:
        yield from parts.check_targets(policy, config.engine, config.cloud.url)
        artifacts, findings = parts.check_models(policy, config.engine)
        yield from findings
        yield from parts.check_memory(artifacts, config.engine, device)
        yield from signals.check_signals(policy, config.engine)
    yield from parts.check_state_dir(Path(config.state_dir), config.cache)
    yield parts.check_threads(config.engine)
    yield from parts.check_sensors(policy, device)
    yield network.check_port(config.server)
    yield from network.check_socket(config.server.socket)
    yield from network.check_exposure(config.server)
    yield from network.check_cloud(config.cloud)
