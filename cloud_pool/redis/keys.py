"""The version of the layout of the keys in Redis, and the loading of scripts. The README has a table of all keys.

Old and new processes share keys and records during a rolling upgrade. A key beside the others holds the layout's
number. A process writes its own number into a Redis that has none, and works with no other number: reading or
maintaining what another layout means would lose work silently. Raise a number when a process of the version before
would misread, or fail to maintain, what the new one writes. Adding a field that old versions ignore, or a key that only
new ones need, does not make a new layout.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

import redis.asyncio

from causeway_server.router.errors import ConfigError

JOBS_LAYOUT: Final = 3
"""Version of jobs, batches, files and webhooks: `<jobs.key_prefix>:layout`. All scripts of jobs check it too."""
ACCOUNTS_LAYOUT: Final = 1
"""Version of revocations, usage, rates and the gateways' shared limits: `causeway:layout`."""
ACCOUNTS_LAYOUT_KEY: Final = "causeway:layout"


def layout_fault(stored: str, layout: int, what: str) -> str:
    """Return why a process with `layout` refuses keys with the layout `stored`, and the fix; "" if it accepts them."""
    if stored in ("", str(layout)):
        return ""
    fault = f"{what} in this Redis have layout {stored}, but this version of Causeway works with layout {layout}"
    if stored.isdigit() and int(stored) > layout:
        return f"{fault}: a newer version wrote them. Upgrade this process."
    return (
        f"{fault}: an older version wrote them. Let that version finish its work, then give this "
        "version an empty Redis."
    )


async def ensure_accounts_layout(client: redis.asyncio.Redis) -> None:
    """Mark an empty Redis with this version's layout of accounts. Raises ConfigError for another layout, RedisError."""
    stored = await client.get(ACCOUNTS_LAYOUT_KEY)
    if stored is None:  # only then a write, which a full Redis refuses
        await client.set(ACCOUNTS_LAYOUT_KEY, ACCOUNTS_LAYOUT, nx=True)
        stored = await client.get(ACCOUNTS_LAYOUT_KEY)
    text = stored.decode() if isinstance(stored, bytes) else str(stored or "")
    if fault := layout_fault(text[:16], ACCOUNTS_LAYOUT, "The accounts"):
        raise ConfigError(fault, where="redis")


def load_script(package: str, name: str, *shared: str) -> str:
    """Return the text of `<name>.lua` in `package`, preceded by `shared`. A `#!lua` line stays the first line."""
    text = (files(package) / f"{name}.lua").read_text("utf-8")
    shebang, _, body = text.partition("\n") if text.startswith("#!") else ("", "", text)
    return "".join((f"{shebang}\n" if shebang else "", *shared, body))
