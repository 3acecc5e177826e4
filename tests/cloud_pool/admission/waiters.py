"""Requests of one sequence, as most are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from causeway_server.cloud_pool.admission import AdmissionController, Permit
from causeway_server.router.types import Priority


@asynccontextmanager
async def acquire(
    admission: AdmissionController, priority: Priority, left_s: float, tenant: str = "", *, preemptible: bool = False
) -> AsyncIterator[Permit]:
    """Wait for the permit of one sequence, and hold it."""
    async with admission.acquire(1, priority, left_s, tenant, preemptible=preemptible) as (permit,):
        await permit.granted()
        yield permit
