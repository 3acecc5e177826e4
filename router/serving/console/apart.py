"""Work on a text of others, such as the conditions of a draft: in a process of its own, as it may take any time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

from ...errors import InvalidRequest

_T = TypeVar("_T")
_MEMORY: Final = 2 << 30  # address space, bytes: a solver's and its libraries' included
_NICE: Final = 10  # requests come first


def run_apart(seconds: float, work: Callable[..., _T], *arguments: object) -> _T:
    """Return `work(*arguments)`, a module's function, from a new process, which is killed after `seconds`. Blocks.

    CEL holds the interpreter's lock for the whole of an expression, so that a thread would stop every request.

    Raises:
        InvalidRequest: The work takes longer, or more than 2 GiB.
        OSError: No process can be started.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_work, args=(theirs, seconds, work, arguments), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            if not ours.poll(seconds):
                raise InvalidRequest(
                    f"The policy takes longer than {seconds:g} s to evaluate: simplify its conditions."
                )
            return ours.recv()  # type: ignore[no-any-return]
        except EOFError:
            message = "This takes more time or memory than a draft may: simplify its conditions."
            raise InvalidRequest(message) from None
        finally:
            process.kill()
            process.join()


def _work(out: Connection, seconds: float, work: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CPU, (round(seconds) + 1,) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(MemoryError):
        out.send(work(*arguments))
