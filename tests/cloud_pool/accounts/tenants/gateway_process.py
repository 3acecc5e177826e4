"""A gateway as a process that can be killed.

`python -m tests.cloud_pool.accounts.tenants.gateway_process REDIS USD_PER_DAY` prints its URL,
and `reached` when a request has its first token, at which it is held.
"""

from __future__ import annotations

import asyncio
import sys

import anyio

from causeway_server.cloud_pool.accounts.tenants.config import TenantLimits, TenantsConfig, TierPrice
from causeway_server.cloud_pool.config import Config
from tests.cloud_pool.accounts.identity.gateway import ASK, running
from tests.cloud_pool.unreachable import unreachable_tier


def gateway_config(redis_url: str, usd_per_day: float) -> Config:
    tier = str(ASK["model"])
    return Config(
        redis=redis_url,
        tiers=(unreachable_tier(tier),),
        tenants=TenantsConfig(
            default=TenantLimits(usd_per_day=usd_per_day),
            prices=(TierPrice(tier=tier, output=100),),
            redis_timeout_s=20.0,
        ),
    )


async def main(redis_url: str, usd_per_day: str) -> None:
    async with running(gateway_config(redis_url, float(usd_per_day))) as gateway:
        gateway.service.held = anyio.Event()
        print(gateway.url, flush=True)
        await gateway.service.reached.wait()
        print("reached", flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
