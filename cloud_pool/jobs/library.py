"""All scripts, by name."""

from __future__ import annotations

from typing import Final

from .batch_scripts import BATCHES
from .care_scripts import CARE
from .hook_scripts import HOOKS
from .scripts import MOVES

SCRIPTS: Final = {**MOVES, **CARE, **HOOKS, **BATCHES}
