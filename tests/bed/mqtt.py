"""Machines that ask a device by MQTT while its daemon is killed again and again.

The broker is mosquitto, the daemon is the command that operators start, and the cloud is the gateway's `/v1/jobs` in
memory, which does each key once and counts. Every second message has correlation data; the others are told apart by
their text, and recognised by their packet's number when the broker sends them again.

    python -m tests.bench mqtt                      1,500 messages, 12 kills; exits with 1 if one is lost or done twice
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.bench.rows import Row, checks
from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.mqtt.peer import Peer
from tests.mosquitto import Mosquitto
from tests.stack import Stack

_PAUSE_S = 0.005  # between two messages
_LONGEST_LIFE_S = 2.8
_TIMEOUT_S = 300.0


async def run(messages: int, kills: int, folder: Path) -> bool:
    """Return whether each message had one effect and an answer."""
    chance = random.Random(5)
    broker = Mosquitto(folder)
    broker.settings.append("max_queued_messages 0")
    broker.start()
    cloud = await JobCloud().start()
    assert isinstance(cloud, JobCloud)
    peer = Peer(broker.port)
    stack = Stack(folder / "stack")
    config = f"""
engine: {{enabled: false}}
jobs: {{jitter_s: 0, cloud_rate_per_s: 1000, cloud_concurrency: 32}}
mqtt:
  url: mqtt://127.0.0.1:{broker.port}
  client_id: device
  response_topics: [plant/+/answers]
  topics: [{{filter: plant/+/ask}}]
"""
    answers: Counter[str] = Counter()

    async def ask() -> None:
        for number in range(messages):
            name = b"" if number % 2 else b"%d" % number
            peer.ask(f"question {number}", correlation=name, answers=f"plant/{number}/answers")
            await asyncio.sleep(_PAUSE_S)

    async def collect() -> None:
        while len(answers) < messages:
            answers[(await peer.answer()).topic] += 1

    began = time.monotonic()
    try:
        daemon = stack.start_edge(config, cloud_port=cloud.port)
        await peer.state("online")
        async with asyncio.timeout(_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(ask())
            tasks.create_task(collect())
            for _ in range(kills):
                await asyncio.sleep(chance.uniform(0.3, _LONGEST_LIFE_S))
                await asyncio.to_thread(daemon.kill)
                daemon = stack.start_edge(config, cloud_port=cloud.port)
    finally:
        await asyncio.to_thread(stack.close)
        await cloud.stop()
        peer.close()
        broker.kill()
    doubled = sum(count > 1 for count in cloud.effects.values())
    again = sum(count > 1 for count in answers.values())
    print(
        f"{messages} messages, {kills} kills, {time.monotonic() - began:.0f} s: {messages - len(answers)} lost, ",
        end="",
    )
    print(f"{doubled} done twice, {again} answers published twice")
    return len(answers) == len(cloud.effects) == messages and not doubled


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--messages", type=int, default=1500)
    parser.add_argument("--kills", type=int, default=12)


def main(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        whole = asyncio.run(run(arguments.messages, arguments.kills, Path(folder)))
    return checks([] if whole else ["a message was lost or done twice"])
