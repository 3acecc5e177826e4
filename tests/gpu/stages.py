"""A stage of `tests/gpu/run.sh`: `python -m tests.gpu.stages NAME [MODEL.gguf]` prints its figures as JSON."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.edge_node.signals.device import DeviceProbes
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.native.resources import choose_layers, probe_gpus
from causeway_server.models.llama_cpp.protocol import EngineOptions
from causeway_server.router.types import DeviceSignals
from tests.bench.decoding.raw import Raw
from tests.bench.decoding.real_weights import Prompts
from tests.bench.decoding.servers import our_engine

PROMPT_TOKENS, ANSWER_TOKENS = 64, 48


class Streams(msgspec.Struct, frozen=True):
    """Tokens/s of all streams together, prompts included, in each round. `layers`: offloaded to `gpus`."""

    model: str
    gpus: tuple[str, ...]
    layers: int
    streams: int
    ours: list[float]
    raw: list[float]


class Heat(msgspec.Struct, frozen=True):
    """The device's signals, idle and after `busy_s` seconds of decoding."""

    idle: DeviceSignals
    busy: DeviceSignals
    busy_s: float


async def streams(model: Path, count: int, rounds: int) -> Streams:
    """Measure the engine as the daemon starts it beside raw `llama_decode` with as many layers, in turns."""
    layers, cores = choose_layers(EngineOptions(model_path=str(model))), len(os.sched_getaffinity(0))
    raw = Raw(model, cores, count, PROMPT_TOKENS + ANSWER_TOKENS, gpu_layers=layers)
    prompts, ours, decoded = Prompts(), list[float](), list[float]()
    async with our_engine(model, EngineConfig()) as engine:
        for _ in range(rounds + 1):
            asked = prompts.take(count)
            ours.append(await engine.run(asked, ANSWER_TOKENS, whole=True))
            tokens = [raw.tokens(prompt)[:PROMPT_TOKENS] for prompt in asked]
            decoded.append(await asyncio.to_thread(raw.run, tokens, ANSWER_TOKENS))
    raw.close()
    gpus = tuple(f"{gpu.name} ({gpu.description})" for gpu in probe_gpus().gpus)
    return Streams(str(model), gpus, layers, count, ours[1:], decoded[1:])


async def heat(model: Path, rounds: int) -> Heat:
    """Read the signals before and after `rounds` rounds of four streams."""
    probes, prompts, started = DeviceProbes(), Prompts(), time.monotonic()
    idle = probes.read(started)
    async with our_engine(model, EngineConfig()) as engine:
        for _ in range(rounds):
            await engine.run(prompts.take(4), ANSWER_TOKENS, whole=True)
    ended = time.monotonic()
    return Heat(idle, probes.read(ended), ended - started)


def doctor() -> bytes:
    """Return the report of `causeway-edge doctor`, whose checks may fail: the figures are what it says."""
    command = [str(Path(sys.executable).with_name("causeway-edge")), "doctor", "--format", "json"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("doctor", "streams", "heat"))
    parser.add_argument("model", nargs="?", type=Path, default=find_artifact("assistant").path)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1 if os.environ.get("DRY_RUN") else 7)
    options = parser.parse_args()
    if options.stage == "doctor":
        figures = doctor()
    elif options.stage == "streams":
        figures = msgspec.json.encode(asyncio.run(streams(options.model, options.count, options.rounds)))
    else:
        figures = msgspec.json.encode(asyncio.run(heat(options.model, options.rounds)))
    print(figures.decode())


if __name__ == "__main__":
    main()
