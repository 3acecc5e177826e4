"""A daemon with a scripted engine, as a process that can be killed.

`python -m tests.edge_node.responses.daemon_process FOLDER WORDS`: every answer stops for good after so many words; -1:
it ends. It prints its port.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from ..device import running
from ..jobs.support import PROMPT
from ..scripted import ScriptedEngine
from .support import SERVER


async def main(folder: Path, words: int) -> None:
    engine = ScriptedEngine()
    engine.pause_after = words if words >= 0 else None
    async with running(folder, server=SERVER, jobs=PROMPT, engine=engine) as device:
        print(device.app.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
