"""Live sessions on a real daemon: memory of idle ones, interruption to silence, and cuts in mid-answer.

The daemon is the command that operators start, in a process of its own for the memory; the answers come from a real
engine child with a small model of random weights, or from `--model FILE.gguf`.

    python -m tests.bench sessions                 all three
    python -m tests.bench sessions --idle 2000     memory alone
    python -m tests.bench sessions --cut 200       cuts alone
    python -m tests.bench sessions --interrupt 50  interruptions alone
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import psutil

from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.backends.engine.backend import EngineBackend, EngineModel
from causeway_server.edge_node.config.schema import Config, EngineConfig, ServerConfig
from causeway_server.router.bundle.settings import RealtimeConfig
from tests.bench.rows import Row, checks
from tests.e2e.sessions.peer import SAY_HELLO, Event, Peer, text_of
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf

from .figures import print_figures, quantile, table

POLICY = """
version: 1
name: bed
targets: {small: {at: edge, model: m-small}}
routes: [{name: all, use: [small]}]
limits: {concurrent: 512, queue: 512}
"""
IDLE_LIMIT_MB = 150.0
SILENCE_LIMIT_MS = 50.0
_START_S = 120.0
_ANSWER_TOKENS = 120
_CUTS = 3  # of each session
_SEED = 23


async def idle_memory(sessions: int, folder: Path) -> dict[str, float]:
    """Memory of the daemon's process without sessions and with so many that do nothing."""
    settings = {
        "server.port": 0,
        "server.max_connections": sessions + 64,
        "realtime.max_sessions": 2 * sessions + 2,  # one client has half of them
        "engine.enabled": "false",
        "clouds.main.url": "http://127.0.0.1:9/v1",
        "state_dir": folder / "state",
        "log": "error",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "causeway_server.edge_node", "serve", *flags), stdout=asyncio.subprocess.PIPE
    )
    peers: list[Peer] = []
    try:
        assert daemon.stdout is not None
        async with asyncio.timeout(_START_S):
            while not (line := await daemon.stdout.readline()).startswith(b"ready url="):
                assert line, "the daemon ended"
        port = int(line.rpartition(b":")[2].split(b"/")[0])
        process = psutil.Process(daemon.pid)
        warm = await Peer.connect(port)  # what the first session loads is no session's memory
        await warm.event()
        await warm.close()
        before = process.memory_info().rss
        for _ in range(sessions):
            peers.append(await Peer.connect(port))
            await peers[-1].event()
        after = process.memory_info().rss
    finally:
        for peer in peers:
            peer.cut()
        daemon.terminate()
        await daemon.wait()
    return {
        "sessions": sessions,
        "daemon_mb": before / 1e6,
        "with_sessions_mb": after / 1e6,
        "per_session_kb": (after - before) / 1e3 / max(1, sessions),
    }


@asynccontextmanager
async def daemon_with_engine(folder: Path, model: str) -> AsyncIterator[tuple[App, EngineBackend]]:
    """A daemon in this process, its engine child loaded."""
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    path = Path(model) if model else write_tiny_gguf(folder / "tiny.gguf")
    engine = EngineBackend(path, EngineConfig(sequences=32), EngineModel(name="m-small"))
    config = Config(
        policy=str(policy),
        state_dir=str(folder / "engine-state"),
        server=ServerConfig(port=0, drain_s=1.0),
        realtime=RealtimeConfig(max_sessions=512),
    )
    app = build(config, make_engine=lambda _: engine, environ={})
    await app.start()
    try:
        await engine.ready(asyncio.get_running_loop().time() + _START_S)
        yield app, engine
    finally:
        await app.close()


async def start_answer(peer: Peer) -> None:
    await peer.send("conversation.item.create", item=SAY_HELLO)
    await peer.send("response.create", response={"max_output_tokens": _ANSWER_TOKENS})


async def interruptions(rounds: int, app: App, engine: EngineBackend) -> dict[str, float]:
    """Milliseconds from `response.cancel` until the last delta came, and until the engine had no job."""
    chance = random.Random(_SEED)
    silence: list[float] = []
    stopped: list[float] = []
    gaps: list[float] = []
    while len(silence) < rounds:
        peer = await Peer.connect(app.port)
        await peer.event()
        await start_answer(peer)
        times = await _deltas(peer, chance.randint(2, 10))
        if peer.events[-1]["type"] == "response.done":  # it was a short one
            await peer.close()
            continue
        gaps += [later - earlier for earlier, later in pairwise(times)]
        cancelled = time.perf_counter()
        await peer.send("response.cancel")
        last = cancelled
        while (await peer.event())["type"] != "response.done":
            if peer.events[-1]["type"] == "response.output_text.delta":
                last = time.perf_counter()
        silence.append((last - cancelled) * 1e3)
        while engine.jobs:
            await asyncio.sleep(0.0005)
        stopped.append((time.perf_counter() - cancelled) * 1e3)
        await peer.close()
    return {
        "step_ms": quantile(gaps, 0.5) * 1e3,
        "silence_ms_p50": quantile(silence, 0.5),
        "silence_ms_max": max(silence),
        "stopped_ms_p50": quantile(stopped, 0.5),
        "stopped_ms_max": max(stopped),
    }


async def _deltas(peer: Peer, wanted: int) -> list[float]:
    """When the next deltas came, at most so many; fewer of an answer that ends before."""
    times: list[float] = []
    while len(times) < wanted and (await peer.event())["type"] != "response.done":
        if peer.events[-1]["type"] == "response.output_text.delta":
            times.append(time.perf_counter())
    return times


async def cut_sessions(sessions: int, app: App) -> dict[str, float]:
    """Sessions that are cut at random moments of their answers, and resumed until the end."""
    found = await asyncio.gather(*(_cut_session(app, random.Random(_SEED + at)) for at in range(sessions)))
    return {
        "sessions": sessions,
        "cuts": sum(cuts for _, cuts in found),
        "deltas": sum(sum(event["type"] == "response.output_text.delta" for event in events) for events, _ in found),
        "lost": sum(_missing(events) for events, _ in found),
        "repeated": sum(len(events) - len({event["sequence_number"] for event in events}) for events, _ in found),
        "different": sum(text_of(events) != _whole(events) for events, _ in found),
    }


async def _cut_session(app: App, chance: random.Random) -> tuple[list[Event], int]:
    """All events of one session, over all of its connections, and how often it was cut."""
    peer = await Peer.connect(app.port)
    await peer.event()
    session_id = peer.session_id
    await start_answer(peer)
    events: list[Event] = []
    cuts = 0
    while True:
        wanted = chance.randint(1, _ANSWER_TOKENS // 2) if cuts < _CUTS else sys.maxsize
        for _ in range(wanted):
            if (await peer.event())["type"] == "response.done":
                break
        events += peer.events
        if events[-1]["type"] == "response.done":
            await peer.close()
            return events, cuts
        peer.cut()
        cuts += 1
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() * 0.2)
        peer = await Peer.connect(app.port, f"session_id={session_id}&after={events[-1]['sequence_number']}")


def _missing(events: list[Event]) -> int:
    numbers = {event["sequence_number"] for event in events}
    return max(numbers) - len(numbers)


def _whole(events: list[Event]) -> str:
    """The text that the response itself reports."""
    items = events[-1]["response"]["output"]
    return "".join(part["text"] for item in items for part in item["content"])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--idle", type=int, help="sessions that do nothing")
    parser.add_argument("--interrupt", type=int, help="interrupted answers")
    parser.add_argument("--cut", type=int, help="sessions that are cut")
    parser.add_argument("--model", default="", help="GGUF file; by default a small one of random weights")


async def main(arguments: argparse.Namespace) -> list[Row]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    chosen = (arguments.idle, arguments.interrupt, arguments.cut)
    idle, interrupt, cut = (value or 0 for value in chosen) if any(chosen) else (2000, 50, 200)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(KeyboardInterrupt):
        folder = Path(name)
        if idle:
            figures |= {f"idle_{key}": value for key, value in (await idle_memory(idle, folder)).items()}
        if interrupt or cut:
            async with daemon_with_engine(folder, arguments.model) as (app, engine):
                if interrupt:
                    figures |= await interruptions(interrupt, app, engine)
                if cut:
                    figures |= {f"cut_{key}": value for key, value in (await cut_sessions(cut, app)).items()}
    print(table(("figure", "value"), sorted(figures.items())))
    print_figures(figures)
    faults = []
    if figures.get("idle_with_sessions_mb", 0.0) > IDLE_LIMIT_MB:
        faults.append(f"idle sessions take more than {IDLE_LIMIT_MB:g} MB")
    if figures.get("silence_ms_max", 0.0) > SILENCE_LIMIT_MS + figures.get("step_ms", 0.0):
        faults.append(f"silence comes later than {SILENCE_LIMIT_MS:g} ms after a step")
    if any(figures.get(f"cut_{name}", 0.0) for name in ("lost", "repeated", "different")):
        faults.append("a cut session lost or repeated something")
    return checks(faults)
