"""A batch's input file: JSONL to lines, with the errors of each.

Source of format and codes: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field

import anyio
import msgspec

from causeway_server.router.described import described
from causeway_server.router.errors import InvalidRequest, PermissionDenied
from causeway_server.router.jobs.submission import Endpoint, parse_job_request
from causeway_server.router.openai.request_body import BOM
from causeway_server.router.types import RoutingHints

from ..core.principal import Grants
from ..jobs.submission import SubmissionParser
from ..storage.batch_store import Batch
from ..storage.config import BatchConfig
from ..storage.file_store import FilePart, FileStore, StoredFile
from ..tiers.tier import AllowedTiers

MAX_ERRORS = 100  # reported of one file
_MAX_CUSTOM_ID = 512
CheckBody = Callable[[bytes], tuple[str, float]]
"""Checks a body, and returns its tier and token estimate. Raises InvalidRequest or PermissionDenied."""
_KEPT_PARTS = 8


class RawLine(msgspec.Struct, frozen=True):
    """A line that is not blank."""

    number: int  # line number in the file, from 1; only valid if the LineSplitter began at the file's start
    data: bytes  # content; for a line that is too long, only enough to show that
    end: int  # offset of the next line in the file, bytes


@dataclass(eq=False, repr=False)
class LineSplitter:
    """Splits a file that arrives in pieces. Holds one line in memory."""

    offset: int  # offset in the file at which the next piece begins, bytes
    max_line_bytes: int  # limit of a line; one byte more is kept of a longer line
    _number: int = 0
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[RawLine]:
        """Return the lines that end in `data`."""
        lines = []
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._append(piece)
            self.offset += 1
            lines += self._end_line()
        self._append(rest)
        return lines

    def finish(self) -> list[RawLine]:
        """Return the last line, if it does not end in a newline."""
        return self._end_line()

    def _append(self, piece: bytes) -> None:
        self.offset += len(piece)
        self._rest += piece[: max(0, self.max_line_bytes + 1 - len(self._rest))]

    def _end_line(self) -> list[RawLine]:
        self._number += 1
        data = bytes(self._rest)
        self._rest.clear()
        blank = len(data) <= self.max_line_bytes and not data.strip()
        return [] if blank else [RawLine(self._number, data, self.offset)]


class BatchLine(msgspec.Struct, frozen=True):
    """A request of a batch. `tier`: the tier that its model name stands for."""

    custom_id: str
    tier: str
    tokens: float  # estimate of the tokens that it may use
    body: bytes


class BatchLineError(msgspec.Struct, frozen=True):
    """An entry of `errors.data` in OpenAI's batch object."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class InvalidLine(Exception):
    """A line of the input file is invalid; holds the error."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.message, self.param = code, message, param


@described
class _InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


@described
class _CustomId(msgspec.Struct, frozen=True):
    custom_id: str = ""


def parse_line(data: bytes, endpoint: Endpoint, check_body: CheckBody, max_line_bytes: int) -> BatchLine:
    """Check a line and return it. Raises InvalidLine."""
    if len(data) > max_line_bytes:
        raise InvalidLine(
            "line_too_long",
            f"A line of the input file may have at most {max_line_bytes} bytes (jobs.batches.max_line_bytes).",
        )
    try:
        wire = msgspec.json.decode(data.removeprefix(BOM), type=_InputLine)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise InvalidLine("invalid_line", reason, path.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidLine("invalid_json_line", "This line is not a JSON object.") from None
    if not 1 <= len(wire.custom_id) <= _MAX_CUSTOM_ID:
        raise InvalidLine("invalid_custom_id", f"`custom_id` must have 1 to {_MAX_CUSTOM_ID} characters.", "custom_id")
    if wire.method != "POST":
        raise InvalidLine("invalid_method", "`method` must be POST.", "method")
    if wire.url != endpoint:
        raise InvalidLine("mismatched_endpoint", f"`url` must be the batch's endpoint, {endpoint}.", "url")
    body = bytes(wire.body)
    try:
        tier, tokens = check_body(body)
        return BatchLine(wire.custom_id, tier, tokens, body)
    except (InvalidRequest, PermissionDenied) as error:
        raise InvalidLine(error.code, error.message, "body" + (f".{error.param}" if error.param else "")) from None


def read_custom_id(data: bytes) -> str:
    """Return the custom_id of a line; "" if it has none or is not JSON."""
    try:
        return msgspec.json.decode(data.removeprefix(BOM), type=_CustomId).custom_id[:_MAX_CUSTOM_ID]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


@dataclass(eq=False, repr=False)
class InputCheck:
    """A check of a file, line by line.

    A line with an error fails alone. The whole file is refused if it has too many lines, no request, no valid line, or
    two lines with the same `custom_id`, because their outcomes would be ambiguous.
    """

    endpoint: Endpoint
    check_body: CheckBody
    _: KW_ONLY
    max_lines: int
    max_line_bytes: int
    lines: int = 0  # number of lines that are not blank, valid or not
    # errors of lines, at most MAX_ERRORS; errors of the file if it is `refused`
    errors: list[BatchLineError] = field(default_factory=list)
    done: bool = False  # whether no further line needs to be read
    _valid: int = 0
    _refused: bool = False
    # digests of the ids, because ids may be long and lines are many
    _custom_ids: set[bytes] = field(default_factory=set)

    @property
    def refused(self) -> bool:
        """Whether the whole file is refused, so that none of its lines may run."""
        return self._refused or not self._valid

    def check(self, lines: Iterable[RawLine]) -> None:
        """Check the next lines."""
        for line in lines:
            if self.done:
                return
            self._check(line)

    def finish(self) -> None:
        """Finish the check at the end of the file."""
        if not self.lines and not self.errors:
            self.errors.append(BatchLineError("empty_file", "The file contains no request."))

    def _check(self, line: RawLine) -> None:
        if self.lines >= self.max_lines:
            message = f"A batch may have at most {self.max_lines} lines (jobs.batches.max_lines). Split the file."
            self.errors.append(BatchLineError("too_many_lines", message, line.number))
            self.done = self._refused = True
            return
        self.lines += 1
        try:
            parsed = parse_line(line.data, self.endpoint, self.check_body, self.max_line_bytes)
        except InvalidLine as error:
            self._add(error, line)
            return
        try:
            self._check_unique(parsed.custom_id)
            self._valid += 1
        except InvalidLine as error:
            self._refused = True
            self._add(error, line)

    def _add(self, error: InvalidLine, line: RawLine) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(BatchLineError(error.code, error.message, line.number, error.param))

    def _check_unique(self, custom_id: str) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._custom_ids:
            raise InvalidLine("duplicate_custom_id", "An earlier line has the same `custom_id`.", "custom_id")
        self._custom_ids.add(digest)


class InputReader:
    """Reads lines, and caches the last part of a few files, because the next lines are mostly in it."""

    def __init__(self, files: FileStore, max_line_bytes: int) -> None:
        self._files = files
        self._max_line_bytes = max_line_bytes
        self._last_parts: dict[str, tuple[str, bytes]] = {}  # by file

    async def pages(self, file: StoredFile, offset: int = 0) -> AsyncGenerator[list[RawLine], None]:
        """Yield the lines from `offset` on, part by part. Raises JobStoreUnavailable or FileContentLost."""
        splitter = LineSplitter(offset, self._max_line_bytes)
        begin = 0
        for part in await self._files.parts(file.id):
            if begin + part.bytes > offset:
                data = await self._read(file, part)
                yield splitter.feed(data[max(0, offset - begin) :])
            begin += part.bytes
        yield splitter.finish()

    async def lines(self, file: StoredFile, offset: int) -> AsyncGenerator[RawLine, None]:
        """Yield the lines from `offset` on. Raises JobStoreUnavailable or FileContentLost."""
        async with aclosing(self.pages(file, offset)) as pages:
            async for page in pages:
                for line in page:
                    yield line

    async def _read(self, file: StoredFile, part: FilePart) -> bytes:
        name, data = self._last_parts.pop(file.id, ("", b""))
        if name != part.name:
            data = await self._files.read_part(file, part)
        self._last_parts[file.id] = (part.name, data)
        while len(self._last_parts) > _KEPT_PARTS:
            del self._last_parts[next(iter(self._last_parts))]
        return data


def grants_of(batch: Batch) -> tuple[Grants, AllowedTiers]:
    """Return the grants of the token that created the batch, and the tiers that its lines may name."""
    grants = msgspec.json.decode(batch.grants, type=Grants)
    return grants, None if grants.models is None else frozenset(grants.models)


def body_check(parser: SubmissionParser, batch: Batch) -> CheckBody:
    """Return the check of a line's body, within the grants of the token that created the batch."""
    grants, allowed = grants_of(batch)

    def check_body(body: bytes) -> tuple[str, float]:
        request = parse_job_request(batch.endpoint, body, RoutingHints(client=batch.owner))
        parser.check(request, allowed)
        grants.require_modalities(request)
        parser.check_parts(request)
        return parser.tier_name(request), parser.tokens(request, body)

    return check_body


async def check_input(
    batch: Batch,
    file: StoredFile,
    reader: InputReader,
    parser: SubmissionParser,
    limits: BatchConfig,
    renew_lease: Callable[[], Awaitable[None]],
) -> InputCheck:
    """Return the finished check. Raises JobStoreUnavailable or FileContentLost.

    `renew_lease` is called before each part; reading a part takes at most a second.
    """
    check = InputCheck(
        batch.endpoint, body_check(parser, batch), max_lines=limits.max_lines, max_line_bytes=limits.max_line_bytes
    )
    async with aclosing(reader.pages(file)) as pages:
        async for lines in pages:
            await renew_lease()
            # On a thread: thousands of bodies take a while, and jobs run on this event loop.
            await anyio.to_thread.run_sync(check.check, lines)
            if check.done:
                break
    check.finish()
    return check
