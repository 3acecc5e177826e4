"""A rendered and a distorted invoice, both synthetic: questions about it to a brought model that takes text only.

The last request finds the picture's branch stalled (its process is stopped): the answer comes without it. At the end
the state folder and the records are searched for what may be in neither: the picture, the sound, the words in them.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from edge_node.config.schema import ModalitiesConfig
from tests.modalities.test_fusion import picture, sound, text

from .box import Bench, Reply, benched
from .files import LINES, distorted, invoice, speech
from .side_by_side import QUESTION

_STALL_S = 5.0  # of a picture's branch in the last request


async def run(model: str, folders: Sequence[Path], espeak: str) -> bool:
    """Ask, print the answers, and search what is kept. Returns whether nothing but hashes was found."""
    straight, turned, question = invoice(), distorted(invoice()), speech(QUESTION, espeak)
    cases = {
        "rendered, typed": (picture(straight), text(QUESTION)),
        "rendered, typed again": (picture(straight), text(QUESTION)),
        "distorted, typed": (picture(turned), text(QUESTION)),
        "rendered, spoken": (picture(straight), sound(question)),
    }
    replies: list[Reply] = []
    async with benched(model, folders) as bench:
        for name, parts in cases.items():
            replies.append(await _asked(bench, name, *parts))
        kept = await _kept(bench)
    timeouts = ModalitiesConfig(audio_timeout_s=100.0, image_timeout_s=_STALL_S)
    async with benched(model, folders, modalities=timeouts) as bench:
        await _asked(bench, "before the stall", picture(invoice(1)), text(QUESTION))
        os.kill(await _encoder_pid(), signal.SIGSTOP)
        stalled = await _asked(bench, "stalled", picture(invoice(2)), text(QUESTION))
        after = await _asked(bench, "after the stall", picture(invoice(3)), text(QUESTION))
        kept += await _kept(bench)
    hashes = [part.sha256 for reply in replies for part in reply.record.parts]
    leaked = [one for one in _secrets(straight, turned, question) if one in kept]
    print(f"kept: {len(kept)} bytes of records and files, {len(hashes)} hashes, {len(leaked)} of the parts' contents")
    in_time = stalled.seconds - stalled.model_s < 1.15 * _STALL_S
    return not leaked and stalled.modalities == "image=timeout" and in_time and after.modalities == "image=ok"


async def _asked(bench: Bench, name: str, *parts: dict[str, object]) -> Reply:
    reply = await bench.ask(*parts)
    print(f"{name}: {reply.text!r} in {reply.seconds:.1f} s, {reply.modalities}, model {reply.model_s:.1f} s")
    return reply


async def _encoder_pid() -> int:
    """The child that reads text in pictures: the largest, with its models loaded."""
    children = [one for one in psutil.Process().children() if "models.modalities.process.child" in one.cmdline()]
    return max(children, key=lambda one: one.memory_info().rss).pid


async def _kept(bench: Bench) -> bytes:
    """All records, and all files of the state folder."""
    await asyncio.sleep(2.0)  # records are written in batches
    newest = bench.app.parts.decisions.newest
    files = b"".join(path.read_bytes() for path in bench.state.rglob("*") if path.is_file())
    return msgspec.json.encode(newest) + files


def _secrets(*parts: bytes) -> list[bytes]:
    """Pieces of the parts, raw and as they were sent, and the lines of the invoice."""
    raw = [part[200:264] for part in parts]
    return [*raw, *(base64.b64encode(part)[300:360] for part in parts), *(line[:14].encode() for line in LINES[1:])]
