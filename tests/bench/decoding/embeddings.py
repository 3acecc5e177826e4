"""What a long embedding costs short ones: 64 short texts alone, and beside one of 30,000 words.

`python -m tests.bench.decoding.embeddings` measures this row alone; `make bench-llm` has it in its table.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time

from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.router.types import Request
from tests.tool import run_tool

from ..rows import Row
from .constrained import MODEL, print_rows
from .servers import OurEngine, backend_request, our_engine

SHORT, WORDS, CONTEXT, ROUNDS = 64, 30_000, 32_768, 5
_BEGUN_S = 1.0  # the long one is read then


async def measure(ours: OurEngine, rounds: int = ROUNDS) -> Row:
    """Return the row; the engine's context is CONTEXT tokens. The long text is left once the short ones are done."""
    alone, beside = [], []
    for number in range(rounds + 1):
        alone.append(await _short(ours, 2 * number))
        long = asyncio.create_task(ours.backend.embed(backend_request(_request("lake " * WORDS))))
        await asyncio.sleep(_BEGUN_S)
        assert not long.done(), "the long text was read before the short ones came"
        beside.append(await _short(ours, 2 * number + 1))
        assert not long.done(), "the long text was read before the short ones were done"
        long.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await long
    ratio = statistics.median(with_it / without for with_it, without in zip(beside[1:], alone[1:], strict=True))
    note = f"{statistics.median(beside[1:]):.2f} s beside it, {statistics.median(alone[1:]):.2f} s alone"
    name = f"time of {SHORT} short embeddings: beside an embedding of {WORDS:,} words ÷ alone"
    return Row(name, ratio, "x", 3.0, "lower", note)


async def _short(ours: OurEngine, number: int) -> float:
    """Return the seconds that new short texts take."""
    texts = tuple([f"the {at}th boat of harbour {number} leaves at noon" for at in range(SHORT)])
    started = time.perf_counter()
    await ours.backend.embed(backend_request(_request(*texts)))
    return time.perf_counter() - started


def _request(*texts: str) -> Request:
    return Request(kind="embedding", model="small", prompts=texts)


async def _main() -> Row:
    async with our_engine(find_artifact(MODEL).path, EngineConfig(context_tokens=CONTEXT)) as ours:
        return await measure(ours)


def main() -> int:
    return print_rows([asyncio.run(_main())])


if __name__ == "__main__":
    sys.exit(run_tool(main))
