"""The operations of `/v1/files` and the bodies of their answers, of both daemons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct, field

from .. import errors
from .generation import BODY, Errors
from .operation import FORM, JSON, ApiResponse, Operation, Parameter


class FileView(Struct, frozen=True):
    """OpenAI's file object. Times are unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"


class FileList(Struct):
    """The body of `GET /v1/files`, the newest file first."""

    data: list[FileView]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class DeletedFile(Struct):
    id: str
    object: str = "file"
    deleted: bool = True


def list_page(files: list[FileView], limit: int, after: str = "", purpose: str = "") -> FileList:
    """Return a page of `files`, which come newest first. An unknown `after` begins at the newest."""
    found = [file for file in files if not purpose or file.purpose == purpose]
    ids = [file.id for file in found]
    rest = found[ids.index(after) + 1 if after in ids else 0 :]
    rows = rest[:limit]
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    return FileList(rows, len(rest) > limit, first, last)


def file_operations(
    caller: str,
    purposes: Any,
    page: tuple[Parameter, ...],
    common: Errors,
    upload_errors: Errors,
    content_errors: Errors,
    *,
    gives_content: bool,
) -> Iterator[Operation]:
    """Yield the operations.

    Args:
        caller: the client that may call them.
        purposes: a Literal of those that are taken.
        page: the parameters of the list.
        common: what each sends.
        upload_errors: what an upload sends beside these.
        content_errors: what asking for the bytes of a file does.
        gives_content: whether the bytes of some files are given back.
    """
    upload = defstruct(
        "FileUpload",
        [
            ("file", Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]),
            ("purpose", purposes),
            ("anchor", str, field(name="expires_after[anchor]", default="created_at")),
            ("seconds", Annotated[int, Meta(ge=1)], field(name="expires_after[seconds]", default=86_400)),
        ],
    )
    ok = ApiResponse(200, {JSON: FileView})
    one = (*common, errors.NotFound)
    yield Operation(
        method="POST",
        path="/v1/files",
        summary="Upload a file that requests name.",
        caller=caller,
        request={FORM: upload},
        responses=(ok,),
        errors=(*common, *BODY, *upload_errors),
    )
    yield Operation(
        method="GET",
        path="/v1/files",
        summary="The caller's files, newest first.",
        caller=caller,
        parameters=(*page, Parameter("purpose", "Only files of this purpose.")),
        responses=(ApiResponse(200, {JSON: FileList}),),
        errors=common,
    )
    yield Operation(
        method="GET", path="/v1/files/{id}", summary="One file.", caller=caller, responses=(ok,), errors=one
    )
    yield Operation(
        method="DELETE",
        path="/v1/files/{id}",
        summary="Delete a file.",
        caller=caller,
        responses=(ApiResponse(200, {JSON: DeletedFile}),),
        errors=one,
    )
    yield Operation(
        method="GET",
        path="/v1/files/{id}/content",
        summary="The bytes of a file of a batch. Those of files that requests name are not given back.",
        caller=caller,
        responses=(ApiResponse(200, {"application/octet-stream": None}),) if gives_content else (),
        errors=(*one, *content_errors),
    )
