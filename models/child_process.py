"""Start of child processes that run our own modules: each gets a socketpair and a minimal environment."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from causeway_server.router.child_environment import minimal_environment

_ROOMS = Path(__file__).resolve().parents[1]
_ROOT = _ROOMS.parent if _ROOMS.name == "causeway_server" else _ROOMS / ".venv" / "checkout"
"""The folder that contains `causeway_server`: site-packages for a wheel; for a checkout, the folder with the link that
`make setup` makes. Another Python needs it on its path to find our packages.
"""


def child_environment(**more: str) -> dict[str, str]:
    """Return a minimal environment, plus `more`, in which a child finds our packages."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**minimal_environment(os.environ), **more, "PYTHONPATH": os.pathsep.join(paths)}


def child_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return a child's command; `-P` keeps the working directory, with modules of the same name, out of its path."""
    return [python, "-P", "-m", module, *arguments]


def start_child(
    module: str, environ: Mapping[str, str], python: str = sys.executable
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start one of our modules as a child with FD, one end of a socketpair; return it and the non-blocking other end.

    Raises OSError.
    """
    ours, theirs = socket.socketpair()
    try:
        # Not asyncio's subprocess: this takes a millisecond, and a cancellation cannot leave it half done.
        process = subprocess.Popen(
            child_command(module, str(theirs.fileno()), python=python),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environ,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


def outlive_signals(oom_score: int) -> None:
    """Ignore SIGINT and SIGTERM in a child, which ends with its socket: the daemon drains before its children.

    `oom_score`: the kernel kills processes with a higher one first; the daemon has 0.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(oom_score))
