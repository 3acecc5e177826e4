"""Redis scripts and keys of tenants. Each script runs atomically. Keys of one tenant share a hash slot."""

from __future__ import annotations

from typing import Final

from ...redis_scripts import load_script

_LUA: Final = f"{__package__}.lua"
_TOKEN_BUCKET: Final = load_script(_LUA, "token_bucket")

TAKE_SCRIPT: Final = load_script(_LUA, "take", _TOKEN_BUCKET)
SETTLE_SCRIPT: Final = load_script(_LUA, "settle", _TOKEN_BUCKET)
ADD_USAGE_SCRIPT: Final = load_script(_LUA, "add")


def requests_key(tenant: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:requests"


def tokens_key(tenant: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:tokens"


def usage_key(tenant: str, day: str) -> str:
    """`day` is UTC, 2026-11-21."""
    return f"causeway:tenant:{{{tenant}}}:usage:{day}"


def batch_key(tenant: str, batch: str) -> str:
    return f"causeway:tenant:{{{tenant}}}:batch:{batch}"
