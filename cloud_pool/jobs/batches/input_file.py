"""A batch's input file: JSONL → lines, or what is wrong with each. Pure; the check of a body is an argument.

Source of format and codes: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.errors import InvalidRequest

from ..record import Endpoint

MAX_FAULTS = 100  # said of one file
_MAX_CUSTOM_ID = 512


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch. `tier` is what its model resolves to."""

    number: int  # from 1
    custom_id: str
    tier: str
    body: bytes


class BatchLineError(msgspec.Struct, frozen=True):
    """As in `errors.data` of OpenAI's batch object."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _InvalidLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.message, self.param = code, message, param


ResolveTier = Callable[[bytes], str]
"""The tier for a body. Raises InvalidRequest."""


def read_lines(
    content: bytes, endpoint: Endpoint, check: ResolveTier, *, max_lines: int, max_line_bytes: int
) -> tuple[list[BatchLine], list[BatchLineError]]:
    """Faults empty the file: either every line is good, or none is run."""
    found: list[BatchLine] = []
    faults: list[BatchLineError] = []
    known: set[str] = set()
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        if len(found) >= max_lines:
            faults.append(BatchLineError("too_many_lines", f"A batch has at most {max_lines} lines.", number))
            break
        try:
            found.append(_line(number, raw, endpoint, check, known, max_line_bytes))
        except _InvalidLine as fault:
            faults.append(BatchLineError(fault.code, fault.message, number, fault.param))
            if len(faults) >= MAX_FAULTS:
                break
    if not found and not faults:
        faults.append(BatchLineError("empty_file", "The file holds no request."))
    return ([], faults) if faults else (found, [])


def _line(number: int, raw: bytes, endpoint: Endpoint, check: ResolveTier, known: set[str], most: int) -> BatchLine:
    if len(raw) > most:
        raise _InvalidLine("line_too_long", f"A line has at most {most} bytes.")
    try:
        wire = msgspec.json.decode(raw, type=_InputLine)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        raise _InvalidLine("invalid_line", reason, place.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _InvalidLine("invalid_json_line", "This line is not a JSON object.") from None
    if not 1 <= len(wire.custom_id) <= _MAX_CUSTOM_ID:
        raise _InvalidLine("invalid_custom_id", f"`custom_id` has 1 to {_MAX_CUSTOM_ID} characters.", "custom_id")
    if wire.custom_id in known:
        raise _InvalidLine("duplicate_custom_id", "An earlier line has the same `custom_id`.", "custom_id")
    known.add(wire.custom_id)
    if wire.method != "POST":
        raise _InvalidLine("invalid_method", "`method` must be POST.", "method")
    if wire.url != endpoint:
        raise _InvalidLine("mismatched_endpoint", f"`url` must be the batch's endpoint, {endpoint}.", "url")
    body = bytes(wire.body)
    try:
        return BatchLine(number, wire.custom_id, check(body), body)
    except InvalidRequest as error:
        raise _InvalidLine(error.code, error.message, "body" + (f".{error.param}" if error.param else "")) from None
