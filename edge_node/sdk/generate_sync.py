"""`python edge_node/sdk/generate_sync.py`: write the sync client anew from the async client."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

PACKAGE = Path(__file__).resolve().parent / "src" / "causeway"
RENAMED = {
    "AsyncCauseway": "Causeway",
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


def generated() -> str:
    """The sync client's source."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "_async", Path(folder) / "_sync"
        source.mkdir()
        shutil.copy(PACKAGE / "_async" / "client.py", source / "client.py")
        rule = unasync.Rule(fromdir=f"{source}/", todir=f"{target}/", additional_replacements=RENAMED)
        unasync.unasync_files([str(source / "client.py")], [rule])
        text = (target / "client.py").read_text(encoding="utf-8")
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format", "--quiet"]):
        name = str(PACKAGE / "_sync" / "client.py")
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", name, "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    (PACKAGE / "_sync" / "client.py").write_text(generated(), encoding="utf-8")
