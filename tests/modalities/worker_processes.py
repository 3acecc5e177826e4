"""The decoders and encoders that this process has started, for tests that kill them."""

from __future__ import annotations

import psutil

from models.modalities.process import child


def worker_processes() -> list[psutil.Process]:
    """Other children of this process are servers that tests share: they are left alone."""
    living = [process for process in psutil.Process().children() if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if child.__name__ in process.cmdline()]
