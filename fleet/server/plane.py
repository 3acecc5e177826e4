"""The parts that the routes of the control plane share, and the tasks that belong to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from sqlalchemy.ext.asyncio import AsyncConnection

from router.errors import CausewayError

from ..repository.fleet_file import FleetDoc
from ..store.database import Store, StoreUnavailable
from ..store.devices import Device, forget_old_events, read_devices
from ..store.grouped import Grouped
from ..store.telemetry import forget_old_counters
from .boxes.messages import Answer, Messages, SignedMessage
from .boxes.refusals import DeviceUnknown
from .boxes.tokens import TokenKey
from .wakes import Wakes

_TIDY_S = 3600.0
_log = logging.getLogger("causeway.fleet.server")


class ControlPlane:
    """One process of the control plane.

    Attributes:
        folder: The fleet's folder, with `fleet.yaml`, `trust.yaml` and `published`.
        fleet: `fleet.yaml` as it was read.
        key: The key that signs the boxes' tokens.
        wakes: Parked polls, and each cohort's pace.
        messages: Boxes' signed messages.
        lookups: Reads devices by id, many in one transaction.
        clock: Unix time, s.
    """

    def __init__(
        self, folder: Path, fleet: FleetDoc, store: Store, key: TokenKey, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self.fleet = fleet
        self.store = store
        self.key = key
        self.clock = clock
        self.wakes = Wakes(store, clock)
        messages = Messages(self.wakes.pace, clock, key.report_keys)
        self.messages: Grouped[SignedMessage, Answer] = Grouped(store.write, messages.handle)
        self.lookups: Grouped[str, Device] = Grouped(store.read, _find)

    async def run(self) -> None:
        """Handle messages, watch the generations, and tidy up, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.messages.run)
            tasks.start_soon(self.lookups.run)
            tasks.start_soon(self.wakes.watch)
            tasks.start_soon(self._tidy)

    async def _tidy(self) -> None:
        while True:
            await anyio.sleep(_TIDY_S)
            try:
                async with self.store.write() as connection:
                    await forget_old_events(connection, self.clock())
                    await forget_old_counters(connection, self.clock())
            except StoreUnavailable as error:
                _log.warning("old rows stay for another hour: %s", error.message)


async def _find(connection: AsyncConnection, names: Sequence[str]) -> list[Device | CausewayError]:
    found = await read_devices(connection, set(names))
    return [found.get(name) or DeviceUnknown(f"the device {name!r} is not enrolled here") for name in names]
