"""Inspection of signatures and bundles outside the daemon, in a child process that exits after its reply.

python-tuf and the policy tools take 30 MB, and reading a large model's header takes seconds of one core, which a daemon
that answers requests cannot spare. The child asks the daemon for files, because the daemon can reach the fleet; both
sides exchange frames of msgpack, each preceded by its length.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import msgspec

from causeway_server.models.catalog.artifact import Manifest
from causeway_server.models.child_process import child_command, child_environment
from causeway_server.router.bundle import refusals
from causeway_server.router.bundle.manifest import BundleManifest, BundleModel, RolloutPlan
from causeway_server.router.bundle.refusals import DownloadTooSlow, UpdateRefused

from .source import Source, generator

log = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
_LOOK_S = 180.0
_EXAMINE_S = 1800.0


class UpdateCheckRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to read the plan, and the manifest of the assigned bundle unless it is known."""

    folder: str  # the folder of the metadata that was verified before
    root: bytes  # the fleet's root metadata
    device: str
    cohort: str
    running: str | None  # the bundle that the device runs; None for the factory files
    known: tuple[str, ...]  # bundles whose manifest is not needed
    daemon_version: str
    not_before: float  # the earliest possible time, Unix seconds


class UpdateCheckResult(msgspec.Struct, frozen=True, tag=True):
    """The verified plan (None if there is none), the bundle that it assigns, and its manifest if unknown."""

    plan: RolloutPlan | None
    wanted: str | None
    manifest: BundleManifest | None


class ModelFile(msgspec.Struct, frozen=True):
    """A model of the bundle with its verified files here; `adapters` and `signals` in the order of the model's."""

    model: BundleModel
    path: str
    adapters: tuple[str, ...] = ()
    projector: str | None = None
    signals: tuple[str, ...] = ()


class BundleRequest(msgspec.Struct, frozen=True, tag=True):
    """Request to try a bundle without running it. `policy`, `cases`, `models`: its verified files."""

    policy: str
    cases: tuple[str, ...]
    models: tuple[ModelFile, ...]
    running_policy: str  # the policy that the device runs
    model_dirs: tuple[str, ...]  # the folders in which the device finds models now
    memory_bytes: int  # the memory of this device
    state_dir: str  # the state folder, with the records of past decisions
    since: float  # the time of the oldest record to replay, Unix seconds


class BundleReport(msgspec.Struct, frozen=True, tag=True):
    """Each model as the engine reads it, and the counts of a replay of the device's own decisions. `leaving`: requests
    that stayed on the device and would or may leave it; `example`: the first of them.
    """

    models: tuple[Manifest, ...]
    cases: int
    replayed: int = 0
    unchanged: int = 0
    unknown: int = 0
    leaving: int = 0
    example: str = ""


class FetchFile(msgspec.Struct, frozen=True, tag=True):
    """The child's request for a file. Frames of bytes follow, and an empty one at the end, or a `FetchFailed`."""

    path: str


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    not_there: bool
    message: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    code: str
    message: str


Request = UpdateCheckRequest | BundleRequest
Reply = FetchFile | UpdateCheckResult | BundleReport | Refusal
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_KINDS: dict[str, type[UpdateRefused]] = {
    kind.code: kind for kind in vars(refusals).values() if isinstance(kind, type) and issubclass(kind, UpdateRefused)
}


class Inspector(Protocol):
    """Verifies updates and tries bundles. Every method raises UpdateRefused for an update that must not be used."""

    async def check_updates(self, request: UpdateCheckRequest, source: Source) -> UpdateCheckResult: ...

    async def examine(self, request: BundleRequest) -> BundleReport: ...


class ChildInspector:
    """An `Inspector` that works in a child process."""

    async def check_updates(self, request: UpdateCheckRequest, source: Source) -> UpdateCheckResult:
        result = await _inspect(request, source, _LOOK_S)
        assert isinstance(result, UpdateCheckResult)
        return result

    async def examine(self, request: BundleRequest) -> BundleReport:
        result = await _inspect(request, None, _EXAMINE_S)
        assert isinstance(result, BundleReport)
        return result


async def _inspect(request: Request, source: Source | None, limit_s: float) -> UpdateCheckResult | BundleReport:
    try:
        async with asyncio.timeout(limit_s), _child() as process:
            return await _converse(process, request, source)
    except TimeoutError as error:
        raise DownloadTooSlow(f"The inspection was not complete after {limit_s:g} s.") from error
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise UpdateRefused("The inspection ended early. See the daemon's error output.") from error


async def _converse(
    process: asyncio.subprocess.Process, request: Request, source: Source | None
) -> UpdateCheckResult | BundleReport:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame(request))
    while True:
        (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        reply = _replies.decode(await process.stdout.readexactly(length))
        if isinstance(reply, FetchFile):
            assert source is not None
            await _send(source, reply.path, process.stdin)
        elif isinstance(reply, Refusal):
            raise _KINDS.get(reply.code, UpdateRefused)(reply.message)
        else:
            return reply


@asynccontextmanager
async def _child() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *child_command("causeway_server.edge_node.agent.child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())


async def _send(source: Source, path: str, out: asyncio.StreamWriter) -> None:
    try:
        async with aclosing(generator(source.fetch(path))) as chunks:
            async for chunk in chunks:
                out.write(frame(chunk))
                await out.drain()
        out.write(frame(b""))
    except OSError as error:
        if out.is_closing():
            raise
        out.write(frame(FetchFailed(isinstance(error, FileNotFoundError), str(error))))
    await out.drain()


def frame(message: Request | Reply | FetchFailed | bytes) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body
