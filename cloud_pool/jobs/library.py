"""All scripts, by name. Needs Redis 7.

A Redis that is full refuses what would make it fuller, before the script has written anything; it lets pass what ends
jobs and frees their places, or it would stay full.
"""

from __future__ import annotations

from typing import Final

from .batch_scripts import BATCHES
from .care_scripts import CARE
from .hook_scripts import HOOKS
from .scripts import MOVES

_FILLS: Final = frozenset({"accept", "file_put", "batch_create", "batch_names"})


def _headed(name: str, text: str) -> str:
    return ("#!lua\n" if name in _FILLS else "#!lua flags=allow-oom\n") + text


SCRIPTS: Final = {name: _headed(name, text) for name, text in {**MOVES, **CARE, **HOOKS, **BATCHES}.items()}
