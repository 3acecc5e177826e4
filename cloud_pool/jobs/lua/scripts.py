"""All scripts, by name. Needs Redis 7.

A Redis that is full refuses what would make it fuller, before the script has written anything; it lets pass what ends
jobs and frees their places, or it would stay full.
"""

from __future__ import annotations

from typing import Final

from .admin import ADMIN_SCRIPTS
from .batches import BATCH_SCRIPTS
from .transitions import TRANSITION_SCRIPTS
from .webhooks import WEBHOOK_SCRIPTS

_DENY_OOM: Final = frozenset({"accept", "file_put", "batch_create", "batch_names"})


def _with_shebang(name: str, text: str) -> str:
    return ("#!lua\n" if name in _DENY_OOM else "#!lua flags=allow-oom\n") + text


SCRIPTS: Final = {
    name: _with_shebang(name, text)
    for name, text in {**TRANSITION_SCRIPTS, **ADMIN_SCRIPTS, **WEBHOOK_SCRIPTS, **BATCH_SCRIPTS}.items()
}
