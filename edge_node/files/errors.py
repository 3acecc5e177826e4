"""Errors that only uploaded files have: leaves of the tree in router.errors."""

from __future__ import annotations

from router.errors import CausewayError


class StorageFull(CausewayError):
    """The disk is full, or the files of this box have as much room as they may."""

    status = 507
    code = "storage_full"


class FileStoreUnavailable(CausewayError):
    """The folder of files cannot be read or written, or a file in it is damaged."""

    status = 503
    code = "file_store_unavailable"
