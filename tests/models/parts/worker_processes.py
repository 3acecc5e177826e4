"""The decoders and encoders that this process has started, for tests that kill them."""

from __future__ import annotations

import psutil

from causeway_server.models.parts.process import child


def worker_processes() -> list[psutil.Process]:
    """Other children of this process are servers that tests share: they are left alone."""
    return [process for process in psutil.Process().children() if _is_worker(process)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and child.__name__ in process.cmdline()
    except psutil.NoSuchProcess:  # it ends now
        return False
