"""The agent's interfaces to its daemon and its fleet, and its settings."""

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
    def policy_file(self) -> Path: ...

    @property
    def model_dirs(self) -> Sequence[Path]: ...

    @property
    def memory_bytes(self) -> int:
        """Memory of this device that models can use, in bytes."""
        ...

    def condition(self) -> DeviceCondition:
        """Return the device's condition now, with the sums of its requests since the daemon started."""
        ...

    def needs_restart(self, bundle: InstalledBundle | None) -> bool:
        """Return whether the daemon must restart to run this bundle; None stands for the factory files."""
        ...

    async def use(self, bundle: InstalledBundle | None, *, must: bool = False) -> None:
        """Serve requests under this bundle from now on (None: the factory files); answers in progress are completed.
        `must`: even if a model cannot be loaded, as the device returns to it. After UpdateRefused the previous bundle
        stays in use.
        """
        ...

    async def check_model(self, model: BundleModel) -> None:
        """Send a model and its adapters their golden prompts, at temperature 0. Raises UpdateRefused."""
        ...

    def restart(self) -> None:
        """Make the daemon drain and restart."""
        ...


class AgentSettings(msgspec.Struct, frozen=True):
    """Settings of the agent. After a refusal it waits for `retry_s`, doubled each time up to `check_interval_s`."""

    check_interval_s: float = 900.0
    retry_s: float = 30.0
    trial: TrialSettings = TrialSettings()
    download: DownloadBounds = DownloadBounds()
    # largest step by which one signed time can advance the earliest time that this device accepts
    signed_step_s: float = 90 * 86400.0


async def at_once(_: str) -> float:
    """Allow a change at once."""
    return 0.0


class FleetLink(msgspec.Struct, frozen=True):
    """The parts that join a daemon to its fleet. `may_change` is called before a bundle is activated: 0.0 allows the
    change now, else call it again in so many seconds. `on_change` follows each change of the agent's `state` or `row`.
    """

    member: Callable[[], Identity]  # function that returns the device's identity; called at each check
    source: Source
    settings: AgentSettings = AgentSettings()
    may_change: Callable[[str], Awaitable[float]] = at_once
    on_change: Callable[[], None] = lambda: None
