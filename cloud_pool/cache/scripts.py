"""All scripts of the shared cache, by name. Arguments and replies are in each file."""

from __future__ import annotations

from typing import Final

from ..redis.scripts import load_script

_LUA: Final = f"{__package__}.lua"
_COMMON: Final = load_script(_LUA, "common")
_NAMES: Final = ("enter", "renew", "publish", "keep", "close", "leave", "watch", "stale", "drop")

SCRIPTS: Final = {name: load_script(_LUA, name, _COMMON) for name in _NAMES}
