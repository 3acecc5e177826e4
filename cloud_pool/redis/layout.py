"""Version of the keys and records in Redis, which old and new processes share during a rolling upgrade.

A key beside the others holds the number. A process writes its own number into a Redis that has none, and works with no
other number: reading or maintaining what another layout means would lose work silently.

Raise a number when a process of the version before would misread, or fail to maintain, what the new one writes. Adding
a field that old versions ignore, or a key that only new ones need, is no new layout.
"""

from __future__ import annotations

from typing import Final

import redis.asyncio

from router.errors import ConfigError

JOBS_LAYOUT: Final = 3
"""Jobs, batches, files and webhooks: `<jobs.key_prefix>:layout`. All scripts of jobs check it too."""
ACCOUNTS_LAYOUT: Final = 1
"""Revocations, usage, rates and the gateways' shared limits: `causeway:layout`."""
ACCOUNTS_LAYOUT_KEY: Final = "causeway:layout"


def layout_fault(found: str, layout: int, what: str) -> str:
    """Return why a process with `layout` refuses keys with the layout `found`, and what to do; "" if it does not."""
    if found in ("", str(layout)):
        return ""
    fault = f"{what} in this Redis have layout {found}, and this version of Causeway works with layout {layout}"
    if found.isdigit() and int(found) > layout:
        return f"{fault}: a newer version wrote them. Upgrade this process."
    return f"{fault}: an older version wrote them. Let that version finish its work, then give this one an empty Redis."


async def ensure_accounts_layout(client: redis.asyncio.Redis) -> None:
    """Mark a Redis without accounts with this version's layout.

    Raises:
        ConfigError: another layout
        RedisError: Redis does not answer
    """
    found = await client.get(ACCOUNTS_LAYOUT_KEY)
    if found is None:  # only then a write, which a full Redis refuses
        await client.set(ACCOUNTS_LAYOUT_KEY, ACCOUNTS_LAYOUT, nx=True)
        found = await client.get(ACCOUNTS_LAYOUT_KEY)
    text = found.decode() if isinstance(found, bytes) else str(found or "")
    if fault := layout_fault(text[:16], ACCOUNTS_LAYOUT, "the accounts"):
        raise ConfigError(fault, where="redis")
