"""Check a batch's input file whole, before any of its lines runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
import msgspec

from ..core.principal import Grants
from ..jobs.submission import SubmissionParser
from ..storage.batches.batch_store import Batch
from ..storage.config import BatchConfig
from ..storage.files.file_store import StoredFile
from .input_file import CheckBody, InputCheck, InputReader


def body_check(parser: SubmissionParser, batch: Batch) -> CheckBody:
    """Return the check of a line's body, within what the token that created the batch was granted."""
    grants = msgspec.json.decode(batch.grants, type=Grants)
    allowed = None if grants.models is None else frozenset(grants.models)

    def check_body(body: bytes) -> tuple[str, float]:
        request = parser.validate(batch.endpoint, body, batch.owner, allowed=allowed)
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

    Args:
        renew_lease: called before each part, which takes a second at most
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
