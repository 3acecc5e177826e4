"""`python -m tests.bed.hostile_files [--files 2000]`: seeded hostile sounds, pictures and files through both daemons.

Each is a good one with bytes flipped, cut, doubled or spliced, or one of the lists that the tests use. Decoders of the
edge are real, its encoders tiny; the gateway, which takes no parts, has a real Triton behind it. Every answer must be a
200, a 400 that names the part, or a 413; then a good request is answered, and the daemon has not grown. Needs Pillow
(extra `pictures`), and Triton's environment for the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from tests.cloud.conftest import ROOT, Command
from tests.edge.box import running
from tests.modalities.files import HOSTILE_PICTURES, HOSTILE_SOUNDS, HOSTILE_TEXTS, header, png, tone, wav
from tests.modalities.test_files import ALL, file
from tests.modalities.test_fusion import ask, picture, sound, text

TRITON = ROOT / ".venv-triton"
GATEWAY = """
server: {port: 0, max_body_bytes: 20000000}
tiers: [{name: assistant-large, aliases: [large]}]
"""

_BOUND_S = 30.0  # of one answer: far above any seen, below the branches' own time
_GROWTH_BYTES = 30_000_000


def good_pictures() -> list[bytes]:
    from PIL import Image

    files = [png(40, 30)]
    image = Image.effect_noise((80, 60), 60).convert("RGB")
    for kind in ("JPEG", "PNG", "GIF", "WEBP"):
        saved = io.BytesIO()
        image.save(saved, kind)
        files.append(saved.getvalue())
    return files


def good_sounds() -> list[bytes]:
    return [wav(tone(0.2, rate), rate, width=width) for rate, width in ((8_000, 1), (16_000, 2), (44_100, 3))]


def good_files() -> list[bytes]:
    return ["Total: 99,50 €\nDue: Friday\n".encode(), "Gruß".encode("utf-16"), b'{"total": 99.5}', png(40, 30)]


def spoiled(chance: random.Random, files: list[bytes]) -> bytes:
    data = bytearray(chance.choice(files))
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(64, len(data)))
        match chance.randrange(5):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                data[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
            case 2:
                del data[max(1, at) :]
            case 3:
                data[at:at] = data[: chance.randrange(1, 64)]
            case _:
                data += chance.randbytes(chance.randrange(64))
    return bytes(data)


def hostile_parts(chance: random.Random, files: int) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield kinds and parts: first the lists, which hold the largest files, then spoiled ones."""
    good = {"sound": [*good_sounds(), header(data=bytes(640))], "picture": good_pictures(), "file": good_files()}
    lists = {"sound": HOSTILE_SOUNDS, "picture": HOSTILE_PICTURES, "file": HOSTILE_TEXTS}
    named = [(name, data) for name, listed in lists.items() for data in listed.values()]
    for at in range(files):
        name = chance.choice(list(good))
        name, data = named[at] if at < len(named) else (name, spoiled(chance, good[name]))
        kind = chance.choice(("text/plain", "application/pdf", "image/png"))
        yield name, sound(data) if name == "sound" else picture(data) if name == "picture" else file(data, kind)


def check(status: int, message: str, place: str) -> None:
    assert status in (200, 400, 413), (status, message)
    assert status != 400 or place in message, message


async def through_edge(chance: random.Random, files: int) -> bool:
    counts: collections.Counter[str] = collections.Counter()
    watched = Watched(psutil.Process())
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), encoders=ALL) as box:
            for at, (name, part) in enumerate(hostile_parts(chance, files)):
                with watched.request(half=at == files // 2):
                    answer = await ask(box, text("hello"), part)
                check(answer.status, answer.message if answer.status == 400 else "", "messages[0].content[1]")
                said = answer.headers.get("x-causeway-modalities", "refused").partition("=")[2] or "refused"
                counts[f"{name} {said}"] += 1
            children = [child.memory_info().rss for child in psutil.Process().children(recursive=True)]
            last = await ask(box, sound(wav(np.asarray(tone(0.3)))), picture(png(9, 9)), file("hello"))
            box.assert_nothing_leaks()
    print(f"edge: {files} files: {dict(sorted(counts.items()))}; children {[round(n / 1e6) for n in children]} MB")
    return watched.report(last.status)


async def through_gateway(chance: random.Random, files: int) -> bool:
    ports = ("--grpc-port", "0", "--http-port", "0", "--metrics-port", "0")
    pool = Command("triton", *ports, CAUSEWAY_TRITON_ENV=os.environ.get("CAUSEWAY_TRITON_ENV", str(TRITON)))
    gateway = None
    try:
        grpc = pool.ready()["grpc"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "gateway.yaml").write_text(GATEWAY)
            gateway = Command("serve", "--config", f"{folder}/gateway.yaml", "--triton", grpc)
            url = gateway.ready()["url"] + "/chat/completions"
            watched = Watched(psutil.Process(gateway.process.pid))
            async with aiohttp.ClientSession() as session:
                for at, (_, part) in enumerate(hostile_parts(chance, files)):
                    messages = [{"role": "user", "content": [text("hello"), part]}]
                    with watched.request(half=at == files // 2):
                        async with session.post(url, json={"model": "large", "messages": messages}) as answer:
                            message = str((await answer.json())["error"]["message"])
                    check(answer.status, message, "messages[0].content[1]")
                hello = {"model": "large", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
                async with session.post(url, json=hello) as answer:
                    last = answer.status
        print(f"gateway: {files} files")
        return watched.report(last)
    finally:
        for command in filter(None, (gateway, pool)):
            command.stop()


class Watched:
    """The slowest answer of a daemon, and how much its process grew in the second half."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._half_bytes = 0
        self._slowest_s = 0.0

    @contextlib.contextmanager
    def request(self, *, half: bool) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._slowest_s = max(self._slowest_s, time.monotonic() - started)
        if half:
            self._half_bytes = self._process.memory_info().rss

    def report(self, last: int) -> bool:
        """Print the figures; return whether they are within their bounds. `last`: status of a good request."""
        grown = self._process.memory_info().rss - self._half_bytes
        print(
            f"  slowest {self._slowest_s:.2f} s; grew {grown / 1e6:.1f} MB in the second half; then a good one: {last}"
        )
        return last == 200 and self._slowest_s < _BOUND_S and grown < _GROWTH_BYTES


async def run(files: int, seed: int, daemons: tuple[str, ...]) -> bool:
    passed = True
    for daemon in daemons:
        through = through_edge if daemon == "edge" else through_gateway
        passed &= await through(random.Random(seed), files)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bed.hostile_files", description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemon", choices=("edge", "gateway"), action="append", help="by default both")
    arguments = parser.parse_args()
    daemons = tuple(arguments.daemon or ("edge", "gateway"))
    sys.exit(0 if asyncio.run(run(arguments.files, arguments.seed, daemons)) else 1)


if __name__ == "__main__":
    main()
