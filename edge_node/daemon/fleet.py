"""A daemon in a fleet: its connection to the control plane, wired to its agent.

Imported only by a daemon that joined one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from router.errors import ConfigError

from ..agent.agent import Agent
from ..agent.host import AgentSettings, FleetLink
from ..agent.link.connection import FleetConnection, open_link
from ..agent.link.control_plane import carries_secrets
from ..agent.link.record import AgentReport
from ..agent.link.telemetry import TrafficSums
from ..agent.link.tokens import TokenKeeper
from ..agent.trial import TrialSettings
from ..clock import Clock
from ..config.schema import CloudConfig, FleetConfig

log = logging.getLogger(__name__)


def connect(
    folder: Path, config: FleetConfig, clock: Clock, read_traffic: Callable[[], TrafficSums]
) -> tuple[FleetConnection | None, str]:
    """Return the connection of a box that joined a fleet, or None and what is wrong, "" if nothing is.

    A damaged identity does not keep the daemon from starting: it goes on with what it last ran.

    Args:
        folder: STATE_DIR/fleet.
    """
    try:
        return open_link(folder, clock=clock, read_traffic=read_traffic, telemetry_s=config.telemetry_s), ""
    except (ConfigError, FileNotFoundError) as error:
        problem = f"this box cannot speak to its fleet: {error}"
        log.error(problem)
        return None, problem


def link_of(connection: FleetConnection, config: FleetConfig) -> FleetLink:
    """Return the parts of the connection that the agent uses."""
    trial = TrialSettings(
        least_s=config.trial_s, least_requests=config.trial_requests, longest_s=max(config.trial_s, config.trial_max_s)
    )
    return FleetLink(
        member=lambda: connection.identity,
        source=connection.source,
        settings=AgentSettings(check_s=config.check_s, trial=trial),
        may_change=connection.may_change,
        on_change=connection.changed,
    )


def follow(connection: FleetConnection, agent: Agent) -> None:
    """Let the connection report the agent's state and wake it."""
    connection.follow(lambda: agent_report(agent), agent.wake)


def agent_report(agent: Agent) -> AgentReport:
    row = agent.row
    return AgentReport(
        state=agent.state,
        running=agent.running,
        wanted=agent.wanted,
        rollout=row.rollout,
        code=row.code,
        reason=row.reason[:1000],
        quarantined=tuple(row.quarantined)[-64:],
        unproven=row.unproven,
        since=row.at,
    )


def credentials(connection: FleetConnection | None, cloud: CloudConfig) -> TokenKeeper | None:
    """Return the fleet's token for the cloud, unless a key is configured or others could read it on the way."""
    if connection is None or cloud.api_key or not cloud.url:
        return None
    if not carries_secrets(cloud.url):
        log.warning("cloud.url is plain HTTP: the fleet's token is not sent there; use https://, or set cloud.api_key")
        return None
    return connection.tokens
