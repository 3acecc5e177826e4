"""One tier's endpoints, and the leases on them. Owner of the tier's PoolState: all else here is pure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

import msgspec
from typing_extensions import Self

from router.errors import CausewayError, CloudUnreachable

from ..triton import Triton
from .choice import choose
from .place import Place
from .state import Endpoint, Phase, PoolState

RETRY_S = 1.0


class EndpointView(msgspec.Struct, frozen=True):
    """What others may know of an endpoint."""

    address: str
    zone: str
    phase: Phase
    outstanding: int
    ttft_s: float  # 0: not measured


class Lease:
    """One call's place on one endpoint, held while it is open. Say at most one of `succeeded` and `failed`; a caller
    who leaves says neither."""

    def __init__(self, pool: Pool, endpoint: str, triton: Triton, now: float) -> None:
        self.endpoint = endpoint
        self.triton = triton
        self.began_at = now
        self._pool = pool
        self._closed = False

    def first_token(self, seconds: float) -> None:
        """`seconds` from the start of the call on this endpoint."""

    def succeeded(self) -> None:
        """The whole answer came."""

    def failed(self, error: CausewayError) -> None:
        """Any error of the call; which of them are the endpoint's fault is for the pool to say."""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pool:
    """`client` gives the Triton of an address; `chance` draws from [0, 1)."""

    def __init__(
        self,
        tier: str,
        model: str,
        places: Sequence[Place],
        client: Callable[[str], Triton],
        *,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.tier = tier
        self.model = model
        self._client = client
        self._clock = clock
        self._chance = chance
        self._state = PoolState(tuple(Endpoint(address=one.address, zone=one.zone) for one in places))

    @property
    def healthy(self) -> int:
        """How many endpoints take requests."""
        return sum(one.phase == "in" for one in self._state.endpoints)

    @property
    def endpoints(self) -> Sequence[EndpointView]:
        return tuple(
            EndpointView(one.address, one.zone, one.phase, one.outstanding, one.ttft_s) for one in self._state.endpoints
        )

    def lease(self, *, key: bytes = b"", excluding: Collection[str] = ()) -> Lease:
        """The endpoint for the next call, counted as outstanding from now on: use it as a context manager.

        `key` says which prefix it has (`prefix.key_of`); addresses in `excluding` are not given. Raises
        CloudUnreachable or EngineUnavailable, with the time after which to ask again.
        """
        chosen = choose(self._state, self._chance(), excluding)
        if chosen is None:
            raise CloudUnreachable(
                f"no endpoint of {self.tier} can take the request", phase="connect", retry_after_s=RETRY_S
            )
        self._state = self._state.put(msgspec.structs.replace(chosen, outstanding=chosen.outstanding + 1))
        return Lease(self, chosen.address, self._client(chosen.address), self._clock())

    def release(self, lease: Lease) -> None:
        """Called by the lease, once."""
        found = self._state.get(lease.endpoint)
        if found is not None:
            self._state = self._state.put(msgspec.structs.replace(found, outstanding=found.outstanding - 1))
