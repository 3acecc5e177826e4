"""What the choice is made from: one tier's endpoints, frozen. Times are monotonic seconds."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["in", "ejected", "draining"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    zone: str = ""
    phase: Phase = "in"
    outstanding: int = 0  # leases that are open
    ttft_s: float = 0.0  # recent time to the first token; 0: not measured


class PoolState(msgspec.Struct, frozen=True):
    endpoints: tuple[Endpoint, ...] = ()

    def get(self, address: str) -> Endpoint | None:
        return next((one for one in self.endpoints if one.address == address), None)

    def put(self, changed: Endpoint) -> PoolState:
        """With `changed` in the place of the endpoint of its address."""
        return PoolState(tuple(changed if one.address == changed.address else one for one in self.endpoints))
