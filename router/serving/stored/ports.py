"""The interfaces of the parts that differ between a device and a gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ...jobs.job import JobState
from ...openai.responses.state import StoredTurn


class StateStore(Protocol):
    """Turns and conversations of clients, by id. A conversation's turns expire and are deleted with it."""

    async def put(
        self, owner: str, name: str, data: bytes, *, private: bool, user: str, only_known: bool = False
    ) -> None:
        """Store an object, which survives a crash from then on; `private`: it is never written to a disk; `user`: the
        end user, "" for none; `only_known`: nothing is stored if it was deleted.
        """
        ...

    async def read(self, owner: str, names: Sequence[str]) -> list[bytes]:
        """Return the objects in this order, b"" for each that is not there."""
        ...

    async def read_group(self, owner: str, group: str) -> list[bytes]:
        """Return a conversation and its turns, in the order in which they were first stored."""
        ...

    async def delete(self, owner: str, name: str) -> bool:
        """Delete an object, a conversation with its turns. Return whether it was there."""
        ...


class ReadHistory(Protocol):
    """Reads a response that another server stores."""

    async def __call__(self, name: str, /) -> StoredTurn | None:
        """Return the response with all items before it as its input; None if it is not there. Raises CausewayError."""
        ...


class BindItems(Protocol):
    """Binds the items that a request adds to a conversation, as a request for a response with them is bound."""

    async def __call__(self, items: StoredTurn, /) -> StoredTurn:
        """Return the items with what binds them: to the device, and to regions. Raises CausewayError."""
        ...


class BackgroundRun(msgspec.Struct, frozen=True):
    """The job of a response. `result`, `error`: JSON, empty before its end."""

    state: JobState
    result: bytes = b""
    error: bytes = b""


class RunText(msgspec.Struct, frozen=True):
    """The text of a job's last run so far. `run`, `last`: number of the run, and the last part of it that was read."""

    text: str = ""
    run: int = 0
    last: str = ""


class BackgroundJobs(Protocol):
    """The jobs of responses, by the response's id."""

    async def look(self, owner: str, name: str) -> BackgroundRun | None:
        """Return the job as it is now; None if there is none."""
        ...

    async def cancel(self, owner: str, name: str) -> None:
        """Cancel the job. Raises JobAlreadyEnded."""
        ...

    async def text(self, owner: str, name: str, known: RunText) -> RunText:
        """Return the text of the answer so far, as `FirstText` shows it. `known`: what this returned before."""
        ...

    async def change(self, owner: str, name: str) -> None:
        """Wait about a second, less if the job may have ended, or its text grown."""
        ...


class SettleResponse(Protocol):
    """Stores the end of the job of a response."""

    async def __call__(self, owner: str, body: bytes, /) -> None:
        """Store it, if the job with this body is a response's. An error is logged: the next reader does it."""
        ...


class StartJob(Protocol):
    """Accepts the job of a response in the background."""

    async def __call__(self, name: str, body: bytes, /) -> None:
        """Accept the job with this request, under the Idempotency-Key `name`. Raises CausewayError."""
        ...
