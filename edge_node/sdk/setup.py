"""The build of the SDK: writes the sync client and outbox, `_sync`, from the async ones, then builds as declared.

A wheel, an sdist and an editable install (`make setup`) all run it, so that `_sync` is never committed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import unasync
from setuptools import setup

PACKAGE = Path(__file__).resolve().parent / "src" / "causeway_sdk"
RENAMED = {
    "AsyncCauseway": "Causeway",
    "AsyncOutbox": "Outbox",
    "AsyncStream": "Stream",
    "AsyncChunks": "Chunks",
    "AsyncSleep": "Sleep",
    "AsyncClient": "Client",
    "AsyncHTTPTransport": "HTTPTransport",
    "async_sleep": "sleep_for",
    "aclose": "close",
    "aiter_bytes": "iter_bytes",
    "aread": "read",
}

shutil.rmtree(PACKAGE / "_sync", ignore_errors=True)  # a renamed module leaves no old copy behind
rule = unasync.Rule(f"{PACKAGE}/_async/", f"{PACKAGE}/_sync/", additional_replacements=RENAMED)
unasync.unasync_files([str(path) for path in (PACKAGE / "_async").glob("*.py")], [rule])
setup()
