"""Decision records for `replay`: JSON lines from files, folders and stdin, each record once."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from causeway_server.router.migrate.records import RecordBefore, with_new_names
from causeway_server.router.types import DecisionRecord

STDIN: Final = "-"
_SUFFIXES: Final = (".jsonl", ".ndjson")
_DECODER_BEFORE: Final = msgspec.json.Decoder(RecordBefore)
_MAX_BAD_LINES: Final = 100  # bad lines that are kept with their place; further ones are only counted


class BadLine(msgspec.Struct, frozen=True):
    file: str
    line: int
    message: str


def record_files(paths: Sequence[str]) -> list[str]:
    """Return the files among `paths`, and the ``.jsonl`` and ``.ndjson`` files of folders. Raises FileNotFoundError."""
    found: list[str] = []
    for path in paths:
        if path == STDIN or Path(path).is_file():
            found.append(path)
            continue
        if not Path(path).exists():
            raise FileNotFoundError(f"No such file or folder: {path}.")
        inside = sorted(str(file) for file in Path(path).iterdir() if file.suffix in _SUFFIXES)
        if not inside:
            raise FileNotFoundError(f"No records (*.jsonl) in {path}.")
        found += inside
    return list(dict.fromkeys(found))


class RecordReader:
    """Reads the records of files, one at a time. Unreadable lines are skipped and counted."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._starts: list[int] = []  # position of each file's first record
        self.bad_lines: list[BadLine] = []
        self.bad_count = 0
        self.repeated = 0  # records that were read before, as from overlapping exports

    def __iter__(self) -> Iterator[DecisionRecord]:
        decoder = msgspec.json.Decoder(DecisionRecord)
        seen: set[str] = set()
        for file in self._files:
            self._starts.append(len(seen))
            if file == STDIN:
                yield from self._read(sys.stdin.buffer, file, decoder, seen)
                continue
            try:
                with Path(file).open("rb") as lines:
                    yield from self._read(lines, file, decoder, seen)
            except OSError as error:
                self._add_bad(file, 0, error.strerror or str(error))

    def file_of(self, position: int) -> str:
        return self._files[bisect_right(self._starts, position) - 1]

    def _read(
        self, lines: BinaryIO, file: str, decoder: msgspec.json.Decoder[DecisionRecord], seen: set[str]
    ) -> Iterator[DecisionRecord]:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                record = with_new_names(decoder.decode(line), line, _DECODER_BEFORE)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._add_bad(file, number, f"not a decision record: {error}")
                continue
            if record.id in seen:
                self.repeated += 1
                continue
            seen.add(record.id)
            yield record

    def _add_bad(self, file: str, line: int, message: str) -> None:
        self.bad_count += 1
        if len(self.bad_lines) < _MAX_BAD_LINES:
            self.bad_lines.append(BadLine(file, line, message))
