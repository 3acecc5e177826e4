"""The port of content stores."""

from __future__ import annotations

from typing import Literal, Protocol

StoreName = Literal["redis", "path", "s3"]


class ContentStore(Protocol):
    """Stores parts of files. Names of files and parts consist of letters, digits, `.`, `_` and `-`.

    Every method can be repeated. While the store does not answer or cannot write it raises JobStoreUnavailable, which
    outside Redis is a FileStoreUnavailable.
    """

    @property
    def name(self) -> StoreName:
        """What the records of files call this store."""

    async def put(self, file: str, part: str, data: bytes) -> None:
        """Write a part. It is there whole and durably when this returns; if this raises, it is there whole or not."""

    async def get(self, file: str, part: str) -> bytes:
        """Return a part. Raises FileContentLost if it does not exist."""

    async def delete(self, file: str) -> None:
        """Delete all parts of a file, also those of writers that died. Deleting nothing succeeds."""

    async def close(self) -> None:
        """Close the connections."""
