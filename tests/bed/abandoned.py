"""Requests that are left at random moments, whole and streamed, with one and with two choices, against a real gateway
before our engine in a real Triton: the tokens in the audit log are those that the engine has generated.

    python -m tests.bench abandoned                  1,000 requests
    python -m tests.bench abandoned --requests 100 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from tests.bench.rows import Row, checks
from tests.cloud_pool.conftest import Command, Pool
from tests.waiting import until

CONFIG = """
server: {port: 0, default_deadline_s: 300}
audit_file: audit.jsonl
load_balancing: {silent_before_probe_s: 100000}  # a probe generates a token that no client pays,
degradation: {warm_up_after_idle_s: 0}  # and so does a warm-up
tiers: [{name: large, model: assistant-large, artifact: assistant-large, concurrency: 4, max_queued: 64}]
"""
_ROOT = Path(__file__).parents[2]
_PROMPT = "wake me up at seven " * 8
_AT_ONCE = 8  # twice the permits: some requests leave in the queue
_LONGEST_S = 0.6


class Figures(msgspec.Struct, frozen=True):
    """`unseen`: left before the gateway had read them. `exact`, `estimated`: prompts. `unsent`: left before Triton had
    them; they cost nothing.
    """

    requests: int
    unseen: int
    generated: int
    charged: int
    exact: int
    estimated: int
    unsent: int
    wrong_prompts: int


class Gateway:
    """The command that operators start, before a running Triton."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._audit = folder / "audit.jsonl"
        (folder / "gateway.yaml").write_text(CONFIG.replace("audit.jsonl", str(self._audit)))
        self._command = Command("serve", "--config", str(folder / "gateway.yaml"), "--triton", pool.grpc)
        self._url = self._command.ready()["url"]

    def close(self) -> None:
        self._command.stop()

    @property
    def records(self) -> list[dict[str, object]]:
        """The audit records so far."""
        written = self._audit.read_bytes() if self._audit.exists() else b""  # the first one makes the file
        return [msgspec.json.decode(line) for line in written.splitlines()]

    async def leave(self, requests: int, seed: int) -> Figures:
        """Send requests and leave each at a random moment; return what they cost and what was generated."""
        await until(self._pool.is_idle)
        chance = random.Random(seed)
        before = self._pool.gauge("generated") + 1
        async with aiohttp.ClientSession(self._url + "/") as session:
            prompt_tokens = await self._prompt_tokens(session)
            await until(lambda: self._pool.gauge("generated") == before and bool(self.records))
            first = len(self.records)
            moments = [(chance.random() * _LONGEST_S, index) for index in range(requests)]
            at_once = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._leave(session, at_once, *moment) for moment in moments))
        with contextlib.suppress(AssertionError):  # The figures say so.
            await until(lambda: self._pool.is_idle() and self._charged(first) == self._generated(before))
        records = self.records[first:]
        asked = [record for record in records if record["prompt_tokens"]]
        exact = [record for record in asked if not record["estimated"]]
        return Figures(
            requests=requests,
            unseen=requests - len(records),
            generated=self._generated(before),
            charged=self._charged(first),
            exact=len(exact),
            estimated=len(asked) - len(exact),
            unsent=len(records) - len(asked),
            wrong_prompts=sum(record["prompt_tokens"] != prompt_tokens for record in exact),
        )

    def _charged(self, first: int) -> int:
        return sum(int(str(record["completion_tokens"])) for record in self.records[first:])

    def _generated(self, before: float) -> int:
        return int(self._pool.gauge("generated") - before)

    async def _prompt_tokens(self, session: aiohttp.ClientSession) -> int:
        async with session.post("chat/completions", json=_body(max_tokens=1)) as response:
            return int((await response.json())["usage"]["prompt_tokens"])

    async def _leave(
        self, session: aiohttp.ClientSession, at_once: asyncio.Semaphore, seconds: float, index: int
    ) -> None:
        body = _body(max_tokens=1900, stream=index % 2 == 1, n=1 + index % 4 // 3)
        async with at_once:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds), session.post("chat/completions", json=body) as response:
                    await response.read()


def _body(**more: object) -> dict[str, object]:
    return {"model": "large", "messages": [{"role": "user", "content": _PROMPT}], "ignore_eos": True, **more}


async def run(requests: int, seed: int) -> Figures:
    """Start a Triton and a gateway, and leave so many requests."""
    environment = os.environ.get("CAUSEWAY_TRITON_ENV", str(_ROOT / ".venv-triton"))
    ports = ("--grpc-port", "0", "--metrics-port", "0", "--threads", "1", "--drain-s", "1")
    triton = Command("triton", *ports, CAUSEWAY_TRITON_ENV=environment)
    try:
        with tempfile.TemporaryDirectory() as folder:
            gateway = Gateway(Pool(triton), Path(folder))
            try:
                return await gateway.leave(requests, seed)
            finally:
                gateway.close()
    finally:
        triton.stop()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)


def main(arguments: argparse.Namespace) -> list[Row]:
    figures = asyncio.run(run(arguments.requests, arguments.seed))
    for name, value in msgspec.structs.asdict(figures).items():
        print(f"{name}: {value}")
    wrong = {
        f"{figures.charged} tokens charged, {figures.generated} generated": figures.charged != figures.generated,
        f"{figures.wrong_prompts} wrong prompts": figures.wrong_prompts > 0,
    }
    return checks([text for text, found in wrong.items() if found])
