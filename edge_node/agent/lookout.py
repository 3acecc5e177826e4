"""The agent's view of its fleet: the plan, the bundle that it assigns, and what is known of the bundles by their id."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

from router.bundle.manifest import BundleManifest
from router.bundle.rollout import RolloutPlan

from ..clock import Clock
from .host import FleetMember, Host
from .inspection import Inspector, LookRequest
from .source import Source
from .store import InstalledBundle


class Lookout:
    """Reads what the fleet publishes, through the inspector, which verifies it.

    Args:
        folder: STATE_DIR/fleet.
        member: Returns the box's membership; read at each look.
        source: The source of updates.
        host: The daemon, whose version decides which bundles it can read.
        inspector: Verifies what the fleet publishes.
        clock: Wall and monotonic time.
        check_s: Between two looks, if nothing wakes the agent.
        installed: The bundle that the daemon started with; None: the factory's files.

    Attributes:
        wanted: The bundle that the plan assigned at the last look.
        manifest: The manifest of `wanted`, if it is another bundle than the running one.
    """

    def __init__(
        self,
        *,
        folder: Path,
        member: Callable[[], FleetMember],
        source: Source,
        host: Host,
        inspector: Inspector,
        clock: Clock,
        check_s: float,
        installed: InstalledBundle | None,
    ) -> None:
        self._folder = folder
        self._member = member
        self._source = source
        self._host = host
        self._inspector = inspector
        self._clock = clock
        self._check_s = check_s
        self._looked_at = -math.inf
        self._serials: dict[str, int] = {}
        self.wanted: str | None = None
        self.manifest: BundleManifest | None = None
        self.note(installed)

    def is_due(self) -> bool:
        """Whether the last look was `check_s` ago, or something may be new."""
        return self._clock.monotonic() - self._looked_at >= self._check_s

    def make_due(self) -> None:
        """Something may be new."""
        self._looked_at = -math.inf

    def forget(self) -> None:
        """Drop the manifest: the update has ended."""
        self.manifest = None

    def serial(self, bundle: str | None) -> int | None:
        """Return the serial of a bundle, None for one whose manifest this daemon has not read."""
        return None if bundle is None else self._serials.get(bundle)

    def note(self, bundle: InstalledBundle | None) -> None:
        """Remember the serial of a bundle that was loaded."""
        if bundle is not None:
            self._serials[bundle.id] = bundle.manifest.serial

    async def look(self, running: str | None, known: Iterable[str], not_before: float) -> RolloutPlan | None:
        """Read the plan, and the manifest of the wanted bundle if it is another one.

        Args:
            running: The bundle that the box runs; None: the factory's files.
            known: Other bundles whose manifest is not needed.
            not_before: The least time that it can be, Unix seconds.

        Raises:
            UpdateRefused: What the fleet publishes cannot be used.
        """
        member = self._member()
        self._looked_at = self._clock.monotonic()
        looked = await self._inspector.look(
            LookRequest(
                folder=str(self._folder / "tuf"),
                root=member.root.encode(),
                device=member.device,
                cohort=member.cohort,
                running=running,
                known=(*known, *([running] if running else [])),
                daemon_version=self._host.daemon_version,
                not_before=not_before,
            ),
            self._source,
        )
        self.wanted = looked.wanted
        if looked.manifest is not None and looked.wanted is not None:
            self.manifest = looked.manifest
            self._serials[looked.wanted] = looked.manifest.serial
        return looked.plan
