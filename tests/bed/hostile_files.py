"""`python -m tests.bed.hostile_files [--files 2000]`: seeded hostile sounds and pictures through a daemon.

Decoders are real, encoders tiny. Each file is a good one with bytes flipped, cut, doubled or spliced, or one of the
lists that the tests use. Every answer must be a 200, a 400 that names the part, or a 413; then a good request is
answered, and the daemon has not grown. Needs Pillow (extra `pictures`).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import io
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests.edge.box import Box, running
from tests.modalities.files import HOSTILE_PICTURES, HOSTILE_SOUNDS, header, png, tone, wav
from tests.modalities.test_fusion import BOTH, ask, picture, sound, text

_BOUND_S = 30.0  # of one answer: far above any seen, below the branches' own time
_GROWTH_BYTES = 30_000_000


def good_pictures() -> list[bytes]:
    from PIL import Image

    files = [png(40, 30)]
    image = Image.effect_noise((80, 60), 60).convert("RGB")
    for kind in ("JPEG", "PNG", "GIF", "WEBP"):
        file = io.BytesIO()
        image.save(file, kind)
        files.append(file.getvalue())
    return files


def good_sounds() -> list[bytes]:
    return [wav(tone(0.2, rate), rate, width=width) for rate, width in ((8_000, 1), (16_000, 2), (44_100, 3))]


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


async def send(box: Box, chance: random.Random, sounds: list[bytes], pictures: list[bytes]) -> tuple[str, float]:
    """Send one file; return its kind of answer and its seconds."""
    if chance.random() < 0.5:
        data = chance.choice(list(HOSTILE_SOUNDS.values())) if chance.random() < 0.1 else spoiled(chance, sounds)
        part, name = sound(data), "sound"
    else:
        data = chance.choice(list(HOSTILE_PICTURES.values())) if chance.random() < 0.1 else spoiled(chance, pictures)
        part, name = picture(data), "picture"
    started = time.monotonic()
    answer = await ask(box, text("hello"), part)
    assert answer.status in (200, 400, 413), answer.body
    assert answer.status != 400 or "messages[0].content[1]" in answer.message, answer.message
    said = answer.headers.get("x-causeway-modalities", "refused").partition("=")[2] or "refused"
    return f"{name} {said}", time.monotonic() - started


async def run(files: int, seed: int) -> bool:
    chance = random.Random(seed)
    sounds, pictures = [*good_sounds(), header(data=bytes(640))], good_pictures()
    counts: collections.Counter[str] = collections.Counter()
    slowest_s, half_bytes = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        async with running(Path(folder), encoders=BOTH) as box:
            for at in range(files):
                kind, seconds = await send(box, chance, sounds, pictures)
                counts[kind] += 1
                slowest_s = max(slowest_s, seconds)
                if at == files // 2:
                    half_bytes = psutil.Process().memory_info().rss
            grown = psutil.Process().memory_info().rss - half_bytes
            children = {child.pid: child.memory_info().rss for child in psutil.Process().children(recursive=True)}
            last = await ask(box, sound(wav(np.asarray(tone(0.3)))), picture(png(9, 9)))
            box.assert_nothing_leaks()
    print(f"{files} files, seed {seed}: {dict(sorted(counts.items()))}")
    print(f"slowest {slowest_s:.2f} s; daemon grew {grown / 1e6:.1f} MB in the second half")
    print(f"children {[round(size / 1e6) for size in children.values()]} MB; then a good request: {last.status}")
    return last.status == 200 and slowest_s < _BOUND_S and grown < _GROWTH_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bed.hostile_files", description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    sys.exit(0 if asyncio.run(run(arguments.files, arguments.seed)) else 1)


if __name__ == "__main__":
    main()
