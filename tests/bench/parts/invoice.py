"""`make demo-invoice`: questions about a rendered and a distorted invoice, both synthetic, to a model that takes text.

Each question is typed and spoken (synthetic speech), about each image. The last requests find the image's branch
stalled (its process is stopped): the answer comes without it, and the next is whole again. At the end the state folder
and the records are searched for what may be in neither: images, audio clips, and the words in them.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from causeway_server.router.bundle.settings import PartsConfig
from tests.edge_node.parts.test_fusion import audio, image, text

from .device import Bench, Reply, benched
from .files import LINES, distorted, invoice, speech

STALL_S = 5.0
"""Time-out of an image's branch in the last requests."""
_QUESTIONS = {
    "What is the total of this invoice?": ("99.50",),
    "What is the number of the invoice?": ("4711",),
    "When is the invoice due?": ("15 March", "March 15"),
    "Which company sent this invoice?": ("Acme",),
    "How much is the grease?": ("19.50",),
}
"""Questions, and what a right answer says: one of these."""
_VOICES = ("en-us", "en-gb")
_TRIES = 10


class _Asked(msgspec.Struct, frozen=True):
    """One answer. `image`: rendered or distorted; `voice`: "" of a typed question; `heard`: of a spoken one."""

    image: str
    question: str
    voice: str
    heard: str
    reply: Reply

    @property
    def is_right(self) -> bool:
        return any(one in self.reply.text for one in _QUESTIONS[self.question])


async def run(model: str, folders: Sequence[Path], espeak: str) -> bool:
    """Ask, print what is right and wrong, and search what is kept.

    Returns:
        Whether nothing but hashes was found, and the answer without the image came in time, marked. Wrong answers
        are the models', and are only printed.
    """
    images = {"rendered": invoice(), "distorted": distorted(invoice())}
    spoken = {(question, voice): speech(question, espeak, voice) for question in _QUESTIONS for voice in _VOICES}
    async with benched(model, folders) as bench:
        await bench.ask(text("Hello"))  # the language model is loaded
        asked = [
            await _ask(bench, name, shown, question, voice, spoken.get((question, voice)))
            for name, shown in images.items()
            for voice in ("", *_VOICES)
            for question in _QUESTIONS
        ]
        kept = await _kept(bench)
    _report(asked)
    timeouts = PartsConfig(audio_timeout_s=100.0, image_timeout_s=STALL_S)
    question = next(iter(_QUESTIONS))
    async with benched(model, folders, parts=timeouts) as bench:
        degrades = await _degrades(bench, question, spoken[question, _VOICES[0]])
        kept += await _kept(bench)
    hashes = {part.sha256 for one in asked for part in one.reply.record.parts}
    words = [words for one in asked for words in (one.question, one.heard) if words]
    leaked = [one for one in _secrets([*images.values(), *spoken.values()], words) if one in kept]
    print(f"kept: {len(kept)} bytes of records and files, {len(hashes)} hashes, {len(leaked)} of the parts' contents")
    return degrades and not leaked and len(hashes) == len(images) + len(spoken)


async def _ask(bench: Bench, name: str, shown: bytes, question: str, voice: str, wav: bytes | None) -> _Asked:
    reply = await bench.ask(image(shown), text(question) if wav is None else audio(wav))
    return _Asked(name, question, voice, "" if wav is None else await bench.hear(wav), reply)


def _report(asked: Sequence[_Asked]) -> None:
    for one in asked:
        way = f"spoken ({one.voice}), heard as {one.heard!r}" if one.voice else "typed"
        verdict = "right" if one.is_right else "WRONG"
        print(f"{verdict}  {one.image}, {one.question!r} {way}: {one.reply.text!r}, {one.reply.modalities}")
    for is_spoken in (False, True):
        for name in dict.fromkeys(one.image for one in asked):
            own = [one for one in asked if one.image == name and bool(one.voice) == is_spoken]
            whole_s = statistics.median(one.reply.seconds for one in own)
            model_s = statistics.median(one.reply.model_s for one in own)
            way = "spoken" if is_spoken else "typed"
            right = sum(one.is_right for one in own)
            print(f"{name}, {way}: {right} of {len(own)} right, median {whole_s:.1f} s (the model {model_s:.1f} s)")


async def _degrades(bench: Bench, question: str, wav: bytes) -> bool:
    """Stop the reader of images. Returns whether answers without it come in time, marked, and whole ones again."""
    await _until_read(bench, image(invoice(1)), audio(wav))
    holds = True
    for number, asks in ((2, text(question)), (3, audio(wav))):
        os.kill(await asyncio.to_thread(_encoder_pid), signal.SIGSTOP)
        late = await bench.ask(image(invoice(number)), asks)
        afterwards = await _until_read(bench, image(invoice(number + 10)), asks)
        in_time = late.seconds - late.model_s < 1.15 * STALL_S
        print(
            f"the reader of images stopped, its time-out {STALL_S:g} s: {late.text!r}, {late.modalities}, after "
            f"{late.seconds:.1f} s (the model {late.model_s:.1f} s); afterwards "
            f"{', '.join(afterwards)}"
        )
        holds &= in_time and "image=timeout" in late.modalities and "image=ok" in afterwards[-1]
    return holds


async def _until_read(bench: Bench, *parts: dict[str, object]) -> list[str]:
    """Ask until the image is read: a new process loads its models first, which may take longer than the time-out."""
    modalities = [(await bench.ask(*parts)).modalities]
    while "image=ok" not in modalities[-1] and len(modalities) < _TRIES:
        modalities.append((await bench.ask(*parts)).modalities)
    return modalities


def _encoder_pid() -> int:
    """The child that reads text in images: the one that has loaded its reader."""
    for child in psutil.Process().children():
        if any("rapidocr" in part.path or "cv2" in part.path for part in child.memory_maps()):
            return child.pid
    raise RuntimeError("no child has loaded the reader of images")


async def _kept(bench: Bench) -> bytes:
    """All records, and all files of the state folder."""
    await asyncio.sleep(2.0)  # records are written in batches
    newest = bench.app.parts.decisions.newest
    files = b"".join(path.read_bytes() for path in bench.state.rglob("*") if path.is_file())
    return msgspec.json.encode(newest) + files


def _secrets(parts: Sequence[bytes], words: Sequence[str]) -> list[bytes]:
    """Pieces of the parts, raw and as they were sent, the lines of the invoice, and these words."""
    raw = [part[len(part) // 2 :][:64] for part in parts]  # not of the beginning: headers, and silence, are everywhere
    sent = [encoded[len(encoded) // 2 :][:64] for encoded in map(base64.b64encode, parts)]
    return [*raw, *sent, *(line[:14].encode() for line in LINES[1:]), *(one.encode() for one in words)]
