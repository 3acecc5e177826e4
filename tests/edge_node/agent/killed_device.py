"""Run devices that die: a program that reads a `Life` from each line of stdin and answers with a `Death`.

Each life is a forked process with a real agent on real files, which SIGKILLs itself before an operation of its disk.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from causeway_server.edge_node.agent.store import Disk
from causeway_server.router.bundle.protocol import DeviceState

from .disks import killing_disk
from .fleet import Publisher, TestDevice


class Life(msgspec.Struct, frozen=True):
    """`kill_at` None: it ends when the device is idle. `good`: requests succeed under the newest bundle."""

    state: str
    good: bool
    kill_at: int | None = None
    torn: bool = False


class Death(msgspec.Struct, frozen=True):
    """`booted`: the verified bundle that it started with, "" if it died before. The rest is known of one that lived."""

    died: bool
    booted: str = ""
    running: str = ""
    quarantined: tuple[str, ...] = ()
    code: str = ""


async def live(life: Life, publisher: Publisher, note: int) -> Death:
    disk = Disk() if life.kill_at is None else killing_disk(life.kill_at, torn=life.torn)
    device = TestDevice(Path(life.state), publisher, disk=disk)
    booted = "" if device.booted.bundle is None else device.booted.bundle.id
    if booted:
        device.booted.store.load(booted)  # it is whole
    os.write(note, booted.encode())
    for _ in range(60):
        await device.agent.advance()
        if device.agent.state is DeviceState.IDLE:
            break
        if device.agent.state is DeviceState.TRIAL:
            device.host.serve(100, errors=0 if life.good else 50)
            device.time.pass_s(300.0)
    else:
        raise AssertionError(f"stuck in {device.agent.row}")
    return Death(False, booted, device.agent.running or "", tuple(device.agent.row.quarantined), device.agent.row.code)


def fork(life: Life, publisher: Publisher) -> Death:
    """Live once, in a process of its own."""
    read, write = os.pipe()
    noted, note = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            death = asyncio.run(live(life, publisher, note))
            os.write(write, msgspec.json.encode(death))
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(3)
    os.close(write)
    os.close(note)
    _, status = os.waitpid(child, 0)
    booted, answer = os.read(noted, 1000).decode(), os.read(read, 65536)
    os.close(read)
    os.close(noted)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return Death(True, booted)
    if status:
        raise RuntimeError(f"the device ended with {os.waitstatus_to_exitcode(status)}")
    return msgspec.json.decode(answer, type=Death)


def main() -> None:
    publisher = Publisher(Path(sys.argv[1]), exists=True)
    for line in sys.stdin:
        death = fork(msgspec.json.decode(line, type=Life), publisher)
        sys.stdout.write(msgspec.json.encode(death).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
