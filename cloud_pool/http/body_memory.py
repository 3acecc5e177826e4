"""Bound of the request bodies, and of the sounds of live sessions, that are in memory at once.

A body counts until its request ends, since the parsed request holds most of it. Bodies of up to FREE_BYTES do not
count: the number of connections bounds these, and a flood of large bodies does not keep small requests out. A chunked
body, whose size is unknown, counts as FREE_BYTES at least.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from router.errors import ConfigError, RateLimited, Shed

FREE_BYTES = 64 * 1024
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
_RETRY_AFTER_S = 1.0


class BodyMemory:
    """Counts bodies. One tenant's have half of the memory at most."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, registry: CollectorRegistry | None = None) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._by_tenant: dict[str, int] = {}
        self._by_request: dict[int, tuple[str, int]] = {}
        if registry is not None:
            gauge = Gauge(
                "causeway_cloud_body_bytes",
                "Request bodies above 64 KiB, and sounds of sessions, in memory.",
                registry=registry,
            )
            gauge.set_function(lambda: self.held_bytes)

    def check_largest(self, largest: int) -> None:
        """Raises ConfigError if a tenant's share could never hold a body of `largest` bytes."""
        if largest > self.max_bytes // 2:
            raise ConfigError(
                f"must be twice server.max_body_bytes, {2 * largest}, or more: one tenant may have half of it",
                where="server.max_body_memory_bytes",
            )

    def hold(self, request: object, tenant: str, size: int) -> None:
        """Count `size` bytes for a request, in place of what it had; `release` ends that.

        Raises:
            RateLimited: its tenant's bodies would have more than half of the memory.
            Shed: all bodies would have more than the memory.
        """
        before = self._by_request.get(id(request), ("", 0))[1]
        mine = self._by_tenant.get(tenant, 0) + size - before
        if mine > self.max_bytes // 2:
            raise RateLimited(
                f"Your tenant's request bodies and sounds would have {mine} bytes at once, and may have "
                f"{self.max_bytes // 2} (half of server.max_body_memory_bytes). Send fewer large requests at a time.",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.held_bytes + size - before > self.max_bytes:
            raise Shed(
                f"The request bodies in progress have {self.held_bytes} of {self.max_bytes} bytes "
                "(server.max_body_memory_bytes): this one has no room now.",
                retry_after_s=_RETRY_AFTER_S,
            )
        self.held_bytes += size - before
        self._by_tenant[tenant] = mine
        self._by_request[id(request)] = tenant, size

    def release(self, request: object) -> None:
        """Stop to count a request that has ended, if it was counted."""
        if not self._by_request:
            return
        tenant, size = self._by_request.pop(id(request), ("", 0))
        if size:
            self.held_bytes -= size
            self._by_tenant[tenant] -= size
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
