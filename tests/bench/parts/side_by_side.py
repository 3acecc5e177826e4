"""Branches side by side: what a request with an audio clip and an image takes, beside its branches alone.

Paced: at most `LIMIT` × its slowest branch, plus the language model's own time. Real: at most `LIMIT` × the longer of
the slowest branch alone and the CPU seconds of both / cores, plus the language model's own time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.types import Modality
from tests.edge_node.parts.test_fusion import audio, image, text
from tests.models.parts.files import png, tone, wav

from .device import Reply, benched
from .files import invoice, speech

LIMIT = 1.15
QUESTION = "What is the total of this invoice?"
Make = Callable[[int], tuple[dict[str, object], ...]]  # a round's number → parts that no other round sends


async def paced(rounds: int) -> bool:
    """Measure with encoders that wait for a given time. Returns whether the limit holds."""
    holds = True
    for audio_s, image_s in ((0.4, 0.8), (0.8, 0.4), (0.6, 0.6)):
        encoders: dict[Modality, WorkerSpec] = {"audio": _paced(audio_s), "image": _paced(image_s)}
        async with benched("assistant", encoders=encoders) as bench:
            await bench.ask(*_drawn(-1))  # children and the language model are loaded
            replies = [await bench.ask(*_drawn(number)) for number in range(rounds)]
        holds &= _report(f"paced {audio_s:g} s and {image_s:g} s", replies, max(audio_s, image_s))
    parts = PartsConfig(image_timeout_s=1.0)
    encoders = {"audio": _paced(0.4), "image": _paced(3600.0)}
    async with benched("assistant", encoders=encoders, parts=parts) as bench:
        await bench.ask(audio(wav(tone(0.2))), text("hello"))
        replies = [await bench.ask(*_drawn(number)) for number in range(rounds)]
    assert {reply.modalities for reply in replies} == {"audio=ok,image=timeout"}
    return holds & _report("the image's branch stalled, its time-out 1 s", replies, 1.0)


async def real(model: str, folders: Sequence[Path], espeak: str, rounds: int) -> bool:
    """Measure with the encoders that are installed. Returns whether the limit holds."""
    async with benched(model, folders) as bench:
        assert bench.app.parts.encoders is not None
        assert {"audio", "image"} <= set(bench.app.parts.encoders.kinds), "install the extras, and pull speech"

        def spoken(number: int) -> dict[str, object]:
            return audio(speech(QUESTION, espeak, speed=140 + number))

        def seen(number: int) -> dict[str, object]:
            return image(invoice(4712 + number))

        await bench.ask(spoken(-1), seen(-1))
        alone: dict[str, list[float]] = {"audio": [], "image": []}
        replies, cpu_s = [], []
        for number in range(rounds):  # interleaved: other load on the machine changes with time
            alone["audio"].append((await bench.ask(spoken(2 * number))).slowest_s)
            alone["image"].append((await bench.ask(text(QUESTION), seen(2 * number))).slowest_s)
            before_s = _cpu_s()
            replies.append(await bench.ask(spoken(2 * number + 1), seen(2 * number + 1)))
            cpu_s.append(_cpu_s() - before_s)
    slowest = {name: statistics.median(seconds) for name, seconds in alone.items()}
    both_s = statistics.median(cpu_s)
    print(f"alone: audio {slowest['audio']:.2f} s, image {slowest['image']:.2f} s; both: {both_s:.2f} CPU seconds")
    return _report("real", replies, max(*slowest.values(), both_s / (os.cpu_count() or 1)))


def _paced(seconds: float) -> WorkerSpec:
    options = {"text": "turn on the light", "pace_s": str(seconds)}
    return WorkerSpec("tests.models.parts.workers:TinyEncoder", options=options)


def _drawn(number: int) -> tuple[dict[str, object], ...]:
    return text("hello"), audio(wav(tone(0.2, hertz=300.0 + number))), image(png(40 + number, 30))


def _report(name: str, replies: list[Reply], branches_s: float) -> bool:
    """Print medians; return whether the limit holds. `branches_s`: what the branches take at least."""
    whole_s = statistics.median(reply.seconds for reply in replies)
    model_s = statistics.median(reply.model_s for reply in replies)
    ratio = (whole_s - model_s) / branches_s
    verdict = "holds" if ratio <= LIMIT else "MISSES"
    print(f"{name}: whole {whole_s:.3f} s, language model {model_s:.3f} s, rest / {branches_s:.2f} s = {ratio:.2f} "
          f"(limit {LIMIT:g}, {verdict})")  # fmt: skip
    return ratio <= LIMIT


def _cpu_s() -> float:
    """CPU seconds of the encoders' and decoders' processes."""
    return sum(
        child.cpu_times().user + child.cpu_times().system
        for child in psutil.Process().children()
        if "causeway_server.models.parts.process.child" in child.cmdline()
    )
