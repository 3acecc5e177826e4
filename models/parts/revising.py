"""Revision of an answer as its late parts are read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Modality


async def revise_each(
    kinds: Iterable[Modality],
    read: Callable[[Modality], Awaitable[None]],
    revise: Callable[[Sequence[Modality]], Awaitable[bool]],
) -> CausewayError | None:
    """Read late parts, each kind in a task of its own, and revise the answer whenever some of them have been read.

    Args:
        read: Waits until the parts of one kind have been read. Raises CausewayError if they will not be.
        revise: Makes the answer again with the parts of these kinds; returns False if no further revision is wanted.
            Raises CausewayError.

    Returns:
        The error that ended the revisions; None if all were made, or no further one is wanted.
    """
    error: CausewayError | None = None
    async with asyncio.TaskGroup() as tasks:
        reading = {tasks.create_task(_failure_of(read(kind))): kind for kind in kinds}
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [(reading.pop(task), task.result()) for task in done]
            error = next((failure for _, failure in outcomes if failure is not None), error)
            if not (found := [kind for kind, failure in outcomes if failure is None]):
                continue
            try:
                if not await revise(found):
                    break
            except CausewayError as failure:
                error = failure
                break
        for task in reading:
            task.cancel()
    return error


async def _failure_of(reading: Awaitable[None]) -> CausewayError | None:
    try:
        await reading
    except CausewayError as error:
        return error
    return None
