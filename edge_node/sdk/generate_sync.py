"""`python edge_node/sdk/generate_sync.py`: write the sync client and outbox anew from the async ones."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

PACKAGE = Path(__file__).resolve().parent / "src" / "causeway"
MODULES = ("client.py", "outbox.py")
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


def generated(module: str) -> str:
    """The source of a sync module."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "_async", Path(folder) / "_sync"
        source.mkdir()
        shutil.copy(PACKAGE / "_async" / module, source / module)
        rule = unasync.Rule(fromdir=f"{source}/", todir=f"{target}/", additional_replacements=RENAMED)
        unasync.unasync_files([str(source / module)], [rule])
        text = (target / module).read_text(encoding="utf-8")
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format", "--quiet"]):
        name = str(PACKAGE / "_sync" / module)
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", name, "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    for each in MODULES:
        (PACKAGE / "_sync" / each).write_text(generated(each), encoding="utf-8")
