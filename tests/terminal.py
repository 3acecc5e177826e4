"""A program at a terminal, for what it asks there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence


def at_terminal(command: Sequence[str], keys: str, env: Mapping[str, str]) -> tuple[int, str]:
    """Run `command` at a terminal of its own, on which `keys` were typed already; return exit code and output.

    A "\\x04" in `keys` is Ctrl-D.
    """
    keyboard, terminal = os.openpty()
    os.write(keyboard, keys.encode())
    process = subprocess.Popen(command, env=dict(env), stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    output = b""
    with os.fdopen(keyboard, "rb", buffering=0) as screen:
        while True:
            try:
                chunk = screen.read(4096)
            except OSError:  # EIO: the program has closed the terminal
                break
            if not chunk:
                break
            output += chunk
    return process.wait(60), output.decode(errors="replace").replace("\r\n", "\n")
