"""The interfaces of the agent to its daemon and its fleet, and its settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from causeway_server.router.bundle.manifest import BundleModel

from ..observability.metrics import DeviceCondition
from .source import DownloadBounds, Source
from .store import InstalledBundle
from .trial import TrialSettings

if TYPE_CHECKING:
    from .link.identity import Identity


class Host(Protocol):
    """The daemon that runs the bundles."""

    @property
    def daemon_version(self) -> str: ...

    @property
    def policy_file(self) -> Path:
        """The file of the active policy."""
        ...

    @property
    def model_dirs(self) -> Sequence[Path]: ...

    @property
    def memory_bytes(self) -> int:
        """All memory of this device that models can take."""
        ...

    def condition(self) -> DeviceCondition:
        """Return the device's condition now, with the sums of its requests since the daemon started."""
        ...

    def needs_restart(self, bundle: InstalledBundle | None) -> bool:
        """Whether the daemon must start anew to run this bundle; None: the factory's files."""
        ...

    async def use(self, bundle: InstalledBundle | None, *, must: bool = False) -> None:
        """Serve requests under this bundle from now on; no answer in progress is cut.

        Args:
            bundle: None: the factory's files.
            must: Use it even if one of its models cannot be loaded, because the device returns to it.

        Raises:
            UpdateRefused: It cannot be used; what was used before still is.
        """
        ...

    async def check_model(self, model: BundleModel) -> None:
        """Ask a model on this device and its adapters their golden prompts at temperature 0.

        Raises:
            UpdateRefused: One of them does not answer, or answers something else.
        """
        ...

    def restart(self) -> None:
        """Let the daemon drain and start anew."""
        ...


class AgentSettings(msgspec.Struct, frozen=True):
    """`check_interval_s`: between two looks, if nothing wakes the agent. `retry_s`: after a refusal, doubled up to
    `check_interval_s`."""

    check_interval_s: float = 900.0
    retry_s: float = 30.0
    trial: TrialSettings = TrialSettings()
    download: DownloadBounds = DownloadBounds()
    signed_step_s: float = 90 * 86400.0  # most that one signed time can move the floor of this device's clock


async def at_once(_: str) -> float:
    """Permit a change at once."""
    return 0.0


class FleetLink(msgspec.Struct, frozen=True):
    """The parts that join a daemon to its fleet.

    Attributes:
        member: Returns the device's identity; read at each look.
        source: The source of updates.
        may_change: Asked before a bundle is activated. Returns 0.0: now; otherwise when to ask again, in seconds.
        on_change: Called after each change of the agent's `state` or of its `row`.
    """

    member: Callable[[], Identity]
    source: Source
    settings: AgentSettings = AgentSettings()
    may_change: Callable[[str], Awaitable[float]] = at_once
    on_change: Callable[[], None] = lambda: None
