"""A batch's input file: JSONL -> lines, or what is wrong with each. Pure; the check of a body is an argument.

Source of format and codes: https://platform.openai.com/docs/guides/batch
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from router.errors import InvalidRequest, PermissionDenied

from ..record import Endpoint

MAX_ERRORS = 100  # reported of one file
_MAX_CUSTOM_ID = 512


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch. `tier` is what its model stands for."""

    number: int  # from 1
    custom_id: str
    tier: str
    body: bytes


class BatchLineError(msgspec.Struct, frozen=True):
    """An entry of `errors.data` in OpenAI's batch object."""

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
"""Check a body and return its tier. Raises InvalidRequest or PermissionDenied."""


def read_lines(
    content: bytes, endpoint: Endpoint, resolve_tier: ResolveTier, *, max_lines: int, max_line_bytes: int
) -> tuple[list[BatchLine], list[BatchLineError]]:
    """Return the lines of a file, or the errors: a file with an error in any line has no lines."""
    lines: list[BatchLine] = []
    errors: list[BatchLineError] = []
    custom_ids: set[str] = set()
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        if len(lines) >= max_lines:
            errors.append(BatchLineError("too_many_lines", f"A batch has at most {max_lines} lines.", number))
            break
        try:
            lines.append(_line(number, raw, endpoint, resolve_tier, custom_ids, max_line_bytes))
        except _InvalidLine as error:
            errors.append(BatchLineError(error.code, error.message, number, error.param))
            if len(errors) >= MAX_ERRORS:
                break
    if not lines and not errors:
        errors.append(BatchLineError("empty_file", "The file holds no request."))
    return ([], errors) if errors else (lines, [])


def _line(
    number: int, raw: bytes, endpoint: Endpoint, resolve_tier: ResolveTier, custom_ids: set[str], max_bytes: int
) -> BatchLine:
    if len(raw) > max_bytes:
        raise _InvalidLine("line_too_long", f"A line has at most {max_bytes} bytes.")
    try:
        wire = msgspec.json.decode(raw, type=_InputLine)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        raise _InvalidLine("invalid_line", reason, path.rstrip("`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _InvalidLine("invalid_json_line", "This line is not a JSON object.") from None
    if not 1 <= len(wire.custom_id) <= _MAX_CUSTOM_ID:
        raise _InvalidLine("invalid_custom_id", f"`custom_id` has 1 to {_MAX_CUSTOM_ID} characters.", "custom_id")
    if wire.custom_id in custom_ids:
        raise _InvalidLine("duplicate_custom_id", "An earlier line has the same `custom_id`.", "custom_id")
    custom_ids.add(wire.custom_id)
    if wire.method != "POST":
        raise _InvalidLine("invalid_method", "`method` must be POST.", "method")
    if wire.url != endpoint:
        raise _InvalidLine("mismatched_endpoint", f"`url` must be the batch's endpoint, {endpoint}.", "url")
    body = bytes(wire.body)
    try:
        return BatchLine(number, wire.custom_id, resolve_tier(body), body)
    except (InvalidRequest, PermissionDenied) as error:
        raise _InvalidLine(error.code, error.message, "body" + (f".{error.param}" if error.param else "")) from None
