"""The box in its fleet for the page: what its agent does now, how its trial goes, and what it did before."""

from __future__ import annotations

import msgspec

from router.bundle.protocol import BoxState

from ..agent.agent import Agent
from ..agent.journal import MEANING
from ..agent.link.connection import FleetConnection
from ..agent.trial import TrialProgress

_ROWS = 20  # of the journal: two updates


class BundleLabel(msgspec.Struct, frozen=True):
    """A bundle. `serial`: its number in its cohort; None: this daemon has not read its manifest."""

    id: str
    serial: int | None


class JournalEntry(msgspec.Struct, frozen=True):
    """A step of the agent. `code` and `reason`: of the refusal or the failed trial that led to it, "" for none."""

    at: float
    state: BoxState
    bundle: BundleLabel | None
    code: str
    reason: str


class RefusedBundle(msgspec.Struct, frozen=True):
    """A bundle in quarantine: this box does not try it again."""

    bundle: BundleLabel
    reason: str


class FleetState(msgspec.Struct, frozen=True):
    """The body's part `fleet` of `/console/state`. Times are Unix seconds.

    Attributes:
        fleet: The fleet's name; "" for a box without a control plane, as are `device` and `cohort`.
        reachable: Whether the control plane answered last; None: there is none.
        last_seen: When it answered last; 0.0: not since the daemon started.
        state: The agent's state, since `since`.
        doing: What the agent does in this state.
        running: The bundle that serves requests; None: the box's own files.
        wanted: The bundle that the plan assigns, if another one.
        unproven: `running` was committed without enough requests to prove it.
        code: Why the last update was refused or undone; "" if it was not. `reason`: the same for people.
        boots: Unexpected starts of the daemon during this trial.
        trial: How far the trial is; None: none is in progress.
        quarantined: The newest first.
        journal: The newest first.
    """

    fleet: str
    device: str
    cohort: str
    reachable: bool | None
    last_seen: float
    state: BoxState
    since: float
    doing: str
    running: BundleLabel | None
    wanted: BundleLabel | None
    rollout: str
    unproven: bool
    code: str
    reason: str
    boots: int
    trial: TrialProgress | None
    quarantined: tuple[RefusedBundle, ...]
    journal: tuple[JournalEntry, ...]


def read_fleet(agent: Agent, connection: FleetConnection | None) -> FleetState:
    """Return the state of a box that follows a fleet's plan."""

    def label(bundle: str | None) -> BundleLabel | None:
        return None if bundle is None else BundleLabel(bundle, agent.serial(bundle))

    row = agent.row
    identity = None if connection is None else connection.identity
    return FleetState(
        fleet="" if identity is None else identity.fleet,
        device="" if identity is None else identity.device,
        cohort="" if identity is None else identity.cohort,
        reachable=None if connection is None else connection.reachable,
        last_seen=0.0 if connection is None else connection.last_seen,
        state=agent.state,
        since=row.at,
        doing=MEANING[agent.state],
        running=label(agent.running),
        wanted=label(agent.wanted),
        rollout=row.rollout,
        unproven=row.unproven,
        code=row.code,
        reason=row.reason,
        boots=row.boots,
        trial=agent.trial,
        quarantined=tuple(
            RefusedBundle(BundleLabel(bundle, agent.serial(bundle)), reason)
            for bundle, reason in reversed(row.quarantined.items())
        ),
        journal=tuple(
            JournalEntry(one.at, one.state, label(one.bundle), one.code, one.reason)
            for one in reversed(agent.rows[-_ROWS:])
        ),
    )
