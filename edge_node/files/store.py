"""The uploaded files of a device: their owners, limits and expiry.

To a client, a file of another owner does not exist. Files expire by the device's own time (`DeviceTime`), so that a
jump of the wall clock neither deletes nor keeps any. One thread does all disk operations, so that a file is never read
while it is being erased.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from causeway_server.router.api.operations import FileView
from causeway_server.router.errors import (
    BodyTooLarge,
    CausewayError,
    InvalidRequest,
    NotFound,
    QueueFull,
    UnsupportedFeature,
)
from causeway_server.router.parts.uploads import PREFIX, Upload, UploadTerms, largest_file, named_files
from causeway_server.router.serving.at_rest.state_keys import StateKeys
from causeway_server.router.trackers import FairShare, network_of, stored_share
from causeway_server.router.types import RoutingHints

from ..clock import Clock, DeviceTime
from ..config.schema import DeviceFilesConfig
from ..http.api import Room
from ..observability.logs import Fault
from .folder import DeviceFile, Draft, FileFolder

log = logging.getLogger(__name__)
T = TypeVar("T")

FOLDER = "files"  # folder in the state folder
_MAX_UPLOADS = 32  # maximum concurrent uploads; each has about 2 MiB in memory
_WRITE_BYTES = 1024 * 1024
_MARK_S = 600.0  # interval of recording the time, while there are files
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class StorageFull(CausewayError, status=507, code="storage_full"):
    """The disk is full, or the files of this device have reached their limit."""


class FileFolderUnavailable(CausewayError, status=503, code="file_store_unavailable"):
    """The folder of files cannot be read or written, or a file in it is damaged."""


class FileStats(msgspec.Struct, frozen=True):
    files: int
    bytes: int
    expired: int  # number of files that have expired so far


class DeviceFileStore:
    """The files of all clients, in a folder of `state_dir`; None: this device keeps none. `max_body_bytes`: maximum
    size of a request with its files in base64, which also limits a file; `keys`: None: by the key beside the folder.
    """

    def __init__(
        self,
        state_dir: Path | None,
        config: DeviceFilesConfig,
        max_body_bytes: int,
        clock: Clock,
        keys: StateKeys | None = None,
    ) -> None:
        self._has_folder = state_dir is not None
        folder = state_dir or Path()
        self._folder = FileFolder(folder / FOLDER, keys or StateKeys(folder))
        self._config = config
        self._clock = clock
        self._time = DeviceTime(clock)
        self._files: dict[str, DeviceFile] = {}
        self._writing: set[DeviceFileWriter] = set()
        self._uploads = FairShare(_MAX_UPLOADS)
        self._expired = 0
        self._aside = 0  # number of files that cannot be read
        self._marked_at = 0.0
        self._opened = False
        self._lock = asyncio.Lock()  # guards `_open`
        self._thread = ThreadPoolExecutor(1, "files")  # started by its first work
        self._fault = Fault(log, logging.WARNING, clock.monotonic)
        self._max_body_bytes = max_body_bytes
        self.max_file_bytes = largest_file(max_body_bytes)
        self.max_ttl_s = config.ttl_s  # maximum lifetime of a file, s

    @property
    def in_use(self) -> bool:
        """Return whether file ids can be valid on this device."""
        return self._config.accept or bool(self._files)

    @property
    def stats(self) -> FileStats:
        return FileStats(len(self._files), sum(file.bytes for file in self._files.values()), self._expired)

    @property
    def problems(self) -> tuple[str, ...]:
        problems = [self._fault.problem] if self._fault.problem else []
        if self._aside:
            problems.append(
                f"{self._aside} uploaded files cannot be read: they are damaged, or a newer version of "
                "the daemon wrote them, which can read them again after an upgrade; they are kept until "
                "they expire (files.ttl_s)"
            )
        return tuple(problems)

    async def start(self) -> None:
        """Read the files of an earlier run."""
        if self._has_folder and self._folder.path.is_dir():
            try:
                await self._open()
            except FileFolderUnavailable as error:
                self._fault.begin(f"The uploaded files are not available: {error.message}")

    def close(self) -> None:
        """Record the time. Blocking."""
        if self._opened and self._files:
            try:
                self._folder.write_mark(self._time.mark())
            except OSError as error:
                log.warning("The elapsed time of the uploaded files could not be stored: %s", error.strerror)
        self._thread.shutdown()

    # --- files of clients --------------------------------------------------------------------------------------------

    def get(self, name: str, owner: str) -> DeviceFile:
        """Return a file of `owner`. Raises NotFound, also for a file of another owner."""
        file = self._files.get(name)
        if file is None or file.owner != owner or file.expires <= self._time.now():
            raise NotFound(f"File {name[:80]!r} not found: it expired, was deleted, or never existed.")
        return file

    def list_owned(self, owner: str) -> list[DeviceFile]:
        """Return all files of `owner`, newest first."""
        now = self._time.now()
        files = [file for file in self._files.values() if file.owner == owner and file.expires > now]
        return sorted(files, key=lambda file: (file.created_unix, file.id), reverse=True)

    def view(self, file: DeviceFile) -> FileView:
        """Return the API's view of a file."""
        expires = int(self._clock.unix() + file.expires - self._time.now())
        return FileView(file.id, file.bytes, int(file.created_unix), expires, file.filename, file.purpose)

    async def read(self, file: DeviceFile) -> bytes:
        """Return the bytes of a file. Raises FileFolderUnavailable, or NotFound if it was deleted in the meantime."""
        data = await self.on_disk(self._folder.read, file)
        if data is not None:
            return data
        if file.id not in self._files:
            raise NotFound(f"The file {file.id} was deleted in the meantime.")
        self._fault.begin(f"The uploaded file {file.id} is damaged on the disk.")
        raise FileFolderUnavailable(
            f"The file {file.id} is damaged on this device's disk. Delete it and upload it again."
        )

    async def inline(self, body: bytes, owner: str, room: Room) -> bytes:
        """Return a body with its files inlined, or unchanged if it names none; afterwards the files may be deleted. A
        device without files passes ids on to the target, which may know them. NotFound names the part; BodyTooLarge,
        QueueFull: of all files together; InvalidRequest: the body is malformed, a file is not an image, or the
        preference contradicts that of a file; FileFolderUnavailable: a file cannot be read.
        """
        named = named_files(body) if self.in_use else None
        if named is None:
            return body
        files: dict[str, DeviceFile] = {}
        for name, reference in named.first.items():
            try:
                files[name] = self.get(name, owner)
            except NotFound as error:
                raise NotFound(f"`{reference.path}`: {error.message}", param=reference.path) from None
        uploads = {name: Upload(name, file.filename, file.bytes) for name, file in files.items()}
        size = named.check_size(uploads, len(body), self._max_body_bytes)
        with room() as take:
            take(size)
            contents: dict[str, bytes] = {}
            for name, file in files.items():
                try:
                    contents[name] = await self.read(file)
                except NotFound as error:
                    path = named.first[name].path
                    raise NotFound(f"`{path}`: {error.message}", param=path) from None
            for file in files.values():
                named.restrict(RoutingHints(prefer=file.prefer, tags=file.tags))
            return named.inline(uploads, contents)

    async def delete(self, name: str, owner: str) -> None:
        """Erase a file of `owner`. Raises NotFound or FileFolderUnavailable."""
        self.get(name, owner)
        await self._delete(name)

    @asynccontextmanager
    async def write(self, owner: str, expected_bytes: int) -> AsyncIterator[DeviceFileWriter]:
        """Open a writer for a new file of `owner`, which is deleted unless the writer finishes it.

        Args:
            expected_bytes: The size if known, else 0: a file that does not fit is refused before it is read.
        Raises:
            UnsupportedFeature: This device keeps no files.
            BodyTooLarge, StorageFull: The file exceeds the maximum size, or there is no room for it.
            QueueFull: Too many files arrive at the same time.
            FileFolderUnavailable: The disk fails.
        """
        self._check_accepts()
        await self._open()
        name = f"{PREFIX}{secrets.token_hex(12)}"
        writer = DeviceFileWriter(self, name, owner, self._folder.begin(name))
        if not self._uploads.hold(writer, network_of(owner)):
            raise QueueFull(
                (
                    f"You are uploading {self._uploads.held_by(network_of(owner))} files at the same time, "
                    f"which is your share of {_MAX_UPLOADS}. Wait until one has finished."
                ),
                retry_after_s=1.0,
            )
        try:
            await self.reserve(writer, expected_bytes)
            self._writing.add(writer)
            yield writer
        finally:
            self._uploads.release(writer)
            if writer in self._writing:
                self._writing.discard(writer)
                if not writer.finished:
                    await asyncio.shield(asyncio.ensure_future(self._discard(writer)))

    async def sweep(self) -> None:
        """Erase expired files, and record the time."""
        if not self._opened:
            return
        now = self._time.now()
        for file in [file for file in self._files.values() if file.expires <= now]:
            try:
                await self._delete(file.id)
            except FileFolderUnavailable as error:
                self._fault.begin(f"An uploaded file that expired cannot be deleted: {error.message}")
                return
            self._expired += 1
        if self._aside:
            self._aside = await self.on_disk(self._folder.sweep_aside, now)
        if self._files and now >= self._marked_at + _MARK_S:
            self._marked_at = now
            await self.on_disk(self._folder.write_mark, self._time.mark())

    async def reseal(self) -> int:
        """Encrypt files of an old key again; return their number, and unfinished ones. Raises FileFolderUnavailable."""
        if not (self._has_folder and self._folder.path.is_dir()):
            return 0
        await self._open()  # it may have failed at the start
        return await self.on_disk(self._folder.reseal)

    async def erase(self, owner: str) -> int:
        """Erase all files of a client ("": of all); return their number. Raises FileFolderUnavailable."""
        if not (self._has_folder and self._folder.path.is_dir()):
            return 0
        await self._open()
        names = [file.id for file in self._files.values() if owner in ("", file.owner)]
        for name in names:
            await self._delete(name)
        return len(names)

    # --- for the writer ----------------------------------------------------------------------------------------------

    async def reserve(self, writer: DeviceFileWriter, size: int) -> None:
        """Reserve room for `size` bytes of a file. Raises BodyTooLarge or StorageFull."""
        if size > self.max_file_bytes:
            raise BodyTooLarge(
                f"The file has more than {self.max_file_bytes} bytes, the maximum that a request can "
                "carry in base64 (`server.max_body_bytes`)."
            )
        if not self._has_room(writer, size):
            await self.sweep()
            if not self._has_room(writer, size):
                stats = self.stats
                if self._fits(writer, size):
                    raise StorageFull(
                        f"Your files would exceed your share of this device's {self._config.max_files} "
                        f"files and {self._config.max_bytes} bytes (files.max_files, files.max_bytes), "
                        "which is half if other clients have files, else seven eighths. Delete files, or "
                        "wait until they expire."
                    )
                raise StorageFull(
                    f"This device has {stats.files} uploaded files with {stats.bytes} bytes, and may have "
                    f"{self._config.max_files} files with {self._config.max_bytes} bytes, including those "
                    "that are being uploaded (files.max_files, files.max_bytes). Delete files, or wait "
                    "until they expire."
                )
        writer.reserved = size

    def _has_room(self, writer: DeviceFileWriter, size: int) -> bool:
        """Return whether a file fits into the folder, and into its owner's share of it."""
        owner = network_of(writer.owner)
        sizes = [file.bytes for file in self._files.values() if network_of(file.owner) == owner]
        sizes += [one.reserved for one in self._writing if one is not writer and network_of(one.owner) == owner]
        has_others = len(sizes) < len(self._files) + sum(one is not writer for one in self._writing)
        return (
            self._fits(writer, size)
            and len(sizes) < stored_share(self._config.max_files, has_others)
            and sum(sizes) + size <= stored_share(self._config.max_bytes, has_others)
        )

    def _fits(self, writer: DeviceFileWriter, size: int) -> bool:
        """Return whether a file fits beside the stored files and those that are being written."""
        stats, others = self.stats, [one.reserved for one in self._writing if one is not writer]
        taken = stats.bytes + sum(others) + size
        return stats.files + len(others) < self._config.max_files and taken <= self._config.max_bytes

    async def publish(
        self, writer: DeviceFileWriter, filename: str, terms: UploadTerms, hints: RoutingHints
    ) -> DeviceFile:
        """Make a written file visible to its owner. `hints`: the hints of the upload."""
        ttl_s = self.max_ttl_s if terms.ttl_s is None else float(terms.ttl_s)
        file = DeviceFile(
            id=writer.id,
            owner=writer.owner,
            filename=filename,
            purpose=terms.purpose,
            bytes=writer.written,
            sha256=writer.draft.sha256,
            created_unix=self._clock.unix(),
            expires=self._time.now() + ttl_s,
            tags=hints.tags,
            prefer=hints.restriction,
        )
        await self.on_disk(self._folder.publish, writer.draft, file, self._time.mark())
        self._files[file.id] = file
        return file

    # --- the disk ----------------------------------------------------------------------------------------------------

    def _check_accepts(self) -> None:
        if not self._config.accept:
            raise UnsupportedFeature(
                "This device does not keep uploaded files on its disk (`files.accept`). Send the bytes "
                "in the request, as a data: URL in base64."
            )
        if not self._has_folder:
            raise FileFolderUnavailable("Uploaded files require a state folder. Set state_dir.")

    async def _open(self) -> None:
        async with self._lock:
            if self._opened:
                return
            files, unreadable, mark = await self.on_disk(self._folder.open)
            self._time.restore(mark)
            for name in unreadable:
                await self.on_disk(self._folder.set_aside, name, self._time.now() + self.max_ttl_s)
            latest = self._time.now() + self.max_ttl_s  # also if the recorded time was lost
            kept = [msgspec.structs.replace(file, expires=min(file.expires, latest)) for file in files]
            self._files = {file.id: file for file in kept}
            self._aside = await self.on_disk(self._folder.sweep_aside, self._time.now())
            self._opened = True
            self._fault.end("The uploaded files are available")
        await self.sweep()

    async def _delete(self, name: str) -> None:
        await self.on_disk(self._folder.delete, name)
        self._files.pop(name, None)

    async def _discard(self, writer: DeviceFileWriter) -> None:
        try:
            await self.on_disk(self._folder.discard, writer.draft)
        except FileFolderUnavailable as error:  # the next start erases it
            log.warning("A partly written file remains until the next start: %s", error.message)

    async def on_disk(self, work: Callable[..., T], *args: object) -> T:
        """Run `work` in the thread for the disk. Raises StorageFull or FileFolderUnavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        except OSError as error:
            if error.errno in _FULL:
                raise StorageFull("The disk of this device is full, and the file was not stored.") from error
            log.warning("The folder of uploaded files has failed: %s", error.strerror)
            raise FileFolderUnavailable(
                f"The folder of uploaded files has failed ({error.strerror}). Try again later."
            ) from error


class DeviceFileWriter:
    """Writes one file. Holds up to 1 MiB of it in memory."""

    def __init__(self, store: DeviceFileStore, name: str, owner: str, draft: Draft) -> None:
        self.id = name
        self.owner = owner
        self.reserved = 0
        self.written = 0
        self.finished = False
        self.draft = draft
        self._store = store
        self._buffer = bytearray()

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises as `DeviceFileStore.write` does."""
        self._buffer += data
        size = self.written + len(self._buffer)
        if size > self.reserved:
            await self._store.reserve(self, size)
        if len(self._buffer) >= _WRITE_BYTES:
            await self._flush()

    async def finish(self, filename: str, terms: UploadTerms, hints: RoutingHints) -> DeviceFile:
        """Publish the file and return it. Raises InvalidRequest if it is empty, else as `DeviceFileStore.write`."""
        await self._flush()
        if not self.written:
            raise InvalidRequest("`file` is empty. Send its bytes.", param="file")
        file = await self._store.publish(self, filename, terms, hints)
        self.finished = True
        return file

    async def _flush(self) -> None:
        if not self._buffer:
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        self.written += len(data)
        await self._store.on_disk(self.draft.write, data)
