"""`python -m tests.bench hostile-files [--files 2000]`: seeded hostile audio, images and files through both daemons.

Each is a good one with bytes flipped, cut, doubled or spliced, or one of the lists that the tests use. Decoders are
real, encoders tiny; those of the gateway are in a real Triton. Every answer must be a 200, a 400 that names the part,
or a 413; then a good request is answered, and neither the daemon nor Triton's models have grown. On a busy machine the
probes of Triton are late, and the gateway takes it out of use for a moment: a 503, and an answer without a part
because no encoder was in use, are repeated and counted. Any other part that is left out fails the bed. Needs Pillow
(extra `images`), and Triton's environment for the gateway; with PyAV (extra `voice`) some audio clips are compressed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import importlib.util
import io
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from causeway_server.models.parts.installed import ENCODERS
from tests.bench.rows import Row, checks
from tests.cloud_pool.conftest import ROOT, Command
from tests.cloud_pool.dispatch.replica import Replica
from tests.edge_node.device import running
from tests.edge_node.parts.test_fusion import ask, audio, image, text
from tests.models.parts.compressed import COMPRESSED, compressed
from tests.models.parts.files import HOSTILE_CLIPS, HOSTILE_IMAGES, HOSTILE_TEXTS, header, png, tone, wav
from tests.models.parts.test_files import ALL, file

GATEWAY = f"""
server: {{port: 0, max_body_bytes: 20000000}}
tiers:
  - {{name: large, model: obedient, template_file: {ROOT}/tests/cloud_pool/plain.jinja, context_tokens: 4096}}
  - {{name: speech, can: [audio]}}
  - {{name: images, can: [image]}}
  - {{name: files, can: [file]}}
"""

_BOUND_S = 30.0  # of one answer: far above any seen, below the branches' own time
_GROWTH_BYTES = 30_000_000
_UNREAD = ("failed", "timeout")
_AWAY = "can take the request"  # of the log line that no endpoint of the encoder is in use
_TRIES = 10  # of a request whose language model or encoder is out of use for the moment


def good_images() -> list[bytes]:
    from PIL import Image

    files = [png(40, 30)]
    image = Image.effect_noise((80, 60), 60).convert("RGB")
    for kind in ("JPEG", "PNG", "GIF", "WEBP"):
        saved = io.BytesIO()
        image.save(saved, kind)
        files.append(saved.getvalue())
    return files


def good_clips() -> list[bytes]:
    plain = [wav(tone(0.2, rate), rate, width=width) for rate, width in ((8_000, 1), (16_000, 2), (44_100, 3))]
    if importlib.util.find_spec("av") is None:
        return plain
    return [*plain, *(compressed(kind) for kind in COMPRESSED)]


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
    good = {"audio": [*good_clips(), header(data=bytes(640))], "image": good_images(), "file": good_files()}
    lists = {"audio": HOSTILE_CLIPS, "image": HOSTILE_IMAGES, "file": HOSTILE_TEXTS}
    named = [(name, data) for name, listed in lists.items() for data in listed.values()]
    for at in range(files):
        name = chance.choice(list(good))
        name, data = named[at] if at < len(named) else (name, spoiled(chance, good[name]))
        kind = chance.choice(("text/plain", "application/pdf", "image/png"))
        yield name, audio(data) if name == "audio" else image(data) if name == "image" else file(data, kind)


def check(status: int, message: str, place: str) -> None:
    assert status in (200, 400, 413), (status, message)
    assert status != 400 or place in message, message


async def through_edge(chance: random.Random, files: int) -> bool:
    counts: collections.Counter[str] = collections.Counter()
    unread = 0
    watched = Watched(psutil.Process())
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), encoders=ALL) as device:
            for at, (name, part) in enumerate(hostile_parts(chance, files)):
                with watched.request(half=at == files // 2):
                    answer = await ask(device, text("hello"), part)
                check(answer.status, answer.message if answer.status == 400 else "", "messages[0].content[1]")
                said = answer.headers.get("x-causeway-modalities", "refused").partition("=")[2] or "refused"
                counts[f"{name} {said}"] += 1
                unread += said in _UNREAD
            children = [child.memory_info().rss for child in psutil.Process().children(recursive=True)]
            last = await ask(device, audio(wav(np.asarray(tone(0.3)))), image(png(9, 9)), file("hello"))
            device.assert_nothing_leaks()
    print(f"edge: {files} files: {dict(sorted(counts.items()))}; children {[round(n / 1e6) for n in children]} MB")
    return watched.report(last.status) and not unread


async def through_gateway(chance: random.Random, files: int) -> bool:
    counts: collections.Counter[str] = collections.Counter()
    unread: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        replica, gateway = Replica("a", Path(folder), encoders=True), None
        try:
            replica.process.ready()
            (Path(folder) / "gateway.yaml").write_text(GATEWAY)
            gateway = Command("serve", "--config", f"{folder}/gateway.yaml", "--triton", replica.address)
            url = gateway.ready()["url"] + "/chat/completions"
            watched = [Watched(psutil.Process(gateway.process.pid))]
            watched += [Watched(replica.stub(model)) for model in ENCODERS]
            async with aiohttp.ClientSession() as session:
                for at, (name, part) in enumerate(hostile_parts(chance, files)):
                    messages = [{"role": "user", "content": [text("hello"), part]}]
                    with contextlib.ExitStack() as requests:
                        for one in watched:
                            requests.enter_context(one.request(half=at == files // 2))
                        for _ in range(_TRIES):
                            async with session.post(url, json={"model": "large", "messages": messages}) as answer:
                                message = str((await answer.json()).get("error", {}).get("message", ""))
                                said = answer.headers.get("x-causeway-modalities", "refused").partition("=")[2]
                            if answer.status != 503 and not (said in _UNREAD and _AWAY in gateway.log[-1]):
                                break
                            counts["repeated"] += 1
                            await asyncio.sleep(1.0)
                    check(answer.status, message, "messages[0].content[1]")
                    counts[f"{name} {said or 'refused'}"] += 1
                    if said in _UNREAD:
                        unread.append(f"file {at}, a {name}: {said}; the gateway's log: {gateway.log[-1]}")
                good = [audio(wav(np.asarray(tone(0.3)))), image(png(9, 9)), file("hello")]
                async with session.post(
                    url, json={"model": "large", "messages": [{"role": "user", "content": good}]}
                ) as answer:
                    last = answer.status
            starts = [replica.gauge("process_starts", model) for model in ENCODERS]
            print(f"gateway: {files} files: {dict(sorted(counts.items()))}; processes started {starts}")
            for line in unread:
                print(f"  not examined: {line}")
            passed = [one.report(last) for one in watched]
            return all(passed) and not unread
        finally:
            if gateway is not None:
                gateway.stop()
            replica.process.stop()


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--daemon", choices=("edge", "gateway"), action="append", help="by default both")


def main(arguments: argparse.Namespace) -> list[Row]:
    daemons = tuple(arguments.daemon or ("edge", "gateway"))
    passed = asyncio.run(run(arguments.files, arguments.seed, daemons))
    return checks([] if passed else ["a daemon is not within its bounds"])
