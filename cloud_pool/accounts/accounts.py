"""Identity, tenants, ledger and audit log of one process."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec
import redis.asyncio
from anyio import to_thread
from anyio.abc import TaskGroup
from redis.exceptions import RedisError

from ..redis.eviction import EvictionCheck
from ..redis.layout import ensure_accounts_layout
from .audit import AuditLog
from .identity.authenticator import Authenticator
from .identity.fleet import FleetTrust
from .identity.revocation import RevocationList
from .ledger import Ledger, TenantAccounting

_PREPARE_S = 3.0
_FLUSH_S = 3.0


class Accounts(msgspec.Struct, frozen=True):
    """Call `prepare`, `start` and `close` in this order."""

    authenticator: Authenticator
    operators: Authenticator  # of the operators' address
    ledger: Ledger
    accounting: TenantAccounting
    audit: AuditLog
    revocations: RevocationList
    redis: redis.asyncio.Redis | None
    eviction: EvictionCheck
    signed: bool  # whether signed tokens are accepted
    fleet: FleetTrust | None = None

    @property
    def not_ready(self) -> str:
        """Why callers cannot be judged, so that this process is not ready; "" if they can."""
        if self.signed and not self.revocations.has_copy:
            return "The list of revoked tokens has never been read, so signed tokens are refused."
        return ""

    @property
    def problems(self) -> tuple[str, ...]:
        """What an operator has to mend."""
        return tuple(problem for problem in (self.not_ready, self.eviction.fault) if problem)

    async def prepare(self) -> None:
        """Read keys and revocations before the first request. An unavailable source delays this by at most 3 s.

        Raises:
            ConfigError: the keys in Redis have the layout of another version
        """
        if self.fleet is not None:
            with anyio.move_on_after(_PREPARE_S):
                await self.fleet.refresh()
        with anyio.move_on_after(_PREPARE_S):
            if self.redis is not None:
                with suppress(RedisError, OSError):
                    await ensure_accounts_layout(self.redis)
            await self.revocations.refresh()
            await self.eviction.check()

    def start(self, tasks: TaskGroup) -> None:
        """Start the audit thread, and the background tasks in `tasks`."""
        self.audit.start()
        tasks.start_soon(self.revocations.watch)
        tasks.start_soon(self.accounting.watch)
        tasks.start_soon(self.eviction.watch)
        if self.fleet is not None:
            tasks.start_soon(self.fleet.watch)

    async def close(self) -> None:
        """Write pending usage and audit records, each for at most a few seconds, and close the Redis connections."""
        with anyio.move_on_after(_FLUSH_S):
            await self.accounting.flush()
        await to_thread.run_sync(self.audit.close)
        if self.fleet is not None:
            await self.fleet.close()
        if self.redis is not None:
            await self.redis.aclose()
