"""The sound of a text, the forms in which it leaves, and espeak-ng, the program that speaks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import os
import shutil
import struct
from collections.abc import Mapping, Sequence

import msgspec

from models.modalities.installed import SPEECH_MODEL
from router.child_environment import minimal_environment
from router.documents.reader import did_you_mean
from router.errors import EncoderFailed, InvalidRequest, UnsupportedFeature

PCM_HZ = 24_000
"""Rate of OpenAI's `pcm`, which has no header to say so."""
NO_SPEECH = (
    "this box has nothing that understands speech: `pip install 'causeway[voice]'`, then `causeway-models pull "
    f"{SPEECH_MODEL}`, then restart the daemon."
)
PROGRAM = "espeak-ng"
"""It speaks; a package of the distribution."""
INSTALL = f"install it, such as by `apt install {PROGRAM}`"
_WORDS_PER_MINUTE = 175  # of speed 1.0
_SLOWEST, _FASTEST = 80, 450  # words per minute, of the program
_MAX_BYTES = 64 * 1024 * 1024  # 25 minutes
_LIST_S = 10.0
_EXAMPLE = "`en-us`"
_READ_BYTES = 1 << 16


class SpokenText(msgspec.Struct, frozen=True):
    """`samples`: int16 little endian, one channel, at `rate` Hz."""

    samples: bytes
    rate: int

    def wav(self) -> bytes:
        """Return it as a WAV file."""
        import wave  # the daemon needs the rest of this module without a sound

        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(self.rate)
            writer.writeframes(self.samples)
        return file.getvalue()

    def pcm(self, rate: int) -> bytes:
        """Return the samples alone, at `rate` Hz."""
        import numpy as np

        from models.modalities.decoding.sound import resample

        samples = np.frombuffer(self.samples, "<i2").astype(np.float32)
        return np.round(resample(samples, self.rate, rate)).astype("<i2").tobytes()


def find_program(environ: Mapping[str, str]) -> str | None:
    """Return the path of the program that speaks; None where it is not installed."""
    return shutil.which(PROGRAM, path=environ.get("PATH", ""))


def is_onnxruntime_installed() -> bool:
    """Whether the package that runs added voices is there; imports nothing of it."""
    return importlib.util.find_spec("onnxruntime") is not None


class Espeak:
    """espeak-ng, a program of the distribution: one process per text, bounded in time and bytes.

    The text reaches it by stdin: a client's words are never arguments.

    Args:
        environ: where `PATH` says what is installed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._voices: tuple[str, ...] = ()

    async def speak(self, text: str, voice: str, speed: float, deadline: float, others: Sequence[str]) -> SpokenText:
        """Return the sound of a text.

        Args:
            voice: a language that the program speaks, such as `en-gb`.
            speed: 1.0 is the voice's own; bounded by what the program can do.
            deadline: in the loop's time.
            others: voices of this box that are not the program's, to name in an error.

        Raises:
            UnsupportedFeature: the program is not installed.
            InvalidRequest: there is no such voice.
            EncoderFailed: it was late, or failed.
        """
        program = self._program()
        await self._check_voice(program, voice, others)
        pace = min(max(round(_WORDS_PER_MINUTE * speed), _SLOWEST), _FASTEST)
        command = (program, "--stdin", "--stdout", "-b", "1", "-v", voice, "-s", str(pace))
        return _parse(await _run(command, text.encode(), deadline))

    async def phonemes(self, text: str, voice: str, deadline: float) -> str:
        """Return a clause in IPA.

        Raises:
            UnsupportedFeature: the program is not installed.
            EncoderFailed: it does not know `voice`, was late, or failed.
        """
        command = (self._program(), "-q", "--ipa", "--stdin", "-b", "1", "-v", voice)
        return (await _run(command, text.encode(), deadline)).decode(errors="replace")

    def _program(self) -> str:
        program = find_program(self._environ)
        if program is None:
            raise UnsupportedFeature(f"this box has no {PROGRAM}, which speaks: {INSTALL}.")
        return program

    async def _check_voice(self, program: str, voice: str, others: Sequence[str]) -> None:
        """Raises InvalidRequest."""
        if not self._voices:
            listed = await _run((program, "--voices"), b"", asyncio.get_running_loop().time() + _LIST_S)
            self._voices = _voices(listed)
        if voice not in self._voices:
            added = f", or one that was added: {', '.join(others)}" if others else ""
            near = did_you_mean(voice[:64], (*others, *self._voices))
            near = near or f". Send the code of a language, such as {_EXAMPLE}{added}"
            advice = f"{near} (`{PROGRAM} --voices` lists all {len(self._voices)})."
            raise InvalidRequest(f"`voice`: there is no {voice[:64]!r} here{advice}", param="voice")


async def _run(command: Sequence[str], text: bytes, deadline: float) -> bytes:
    """Return what the program writes. Raises EncoderFailed."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=minimal_environment(os.environ),
        )
    except OSError as error:
        raise EncoderFailed(f"{PROGRAM} cannot be started: {error.strerror}.", phase="connect") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout_at(deadline):
            with contextlib.suppress(ConnectionError):  # it ended early; its exit status says so
                process.stdin.write(text)
                await process.stdin.drain()
            process.stdin.close()
            written = await _read(process.stdout)
            status = await process.wait()
    except TimeoutError:
        raise EncoderFailed(f"{PROGRAM} took too long. Send a shorter text.") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    if status != 0:
        raise EncoderFailed(f"{PROGRAM} failed with status {status}.")
    return written


async def _read(stream: asyncio.StreamReader) -> bytes:
    written = bytearray()
    while data := await stream.read(_READ_BYTES):
        written += data
        if len(written) > _MAX_BYTES:
            raise EncoderFailed(f"{PROGRAM} made too much sound. Send a shorter text.")
    return bytes(written)


def _voices(listed: bytes) -> tuple[str, ...]:
    """The second column of the program's table: the languages, in its order."""
    rows = [line.split() for line in listed.decode(errors="replace").splitlines()[1:]]
    return tuple(dict.fromkeys(row[1] for row in rows if len(row) > 1))


def _parse(written: bytes) -> SpokenText:
    """A WAV file whose header was written before its length was known. Raises EncoderFailed."""
    at = written.find(b"data")
    if written[:4] != b"RIFF" or at < 36:
        raise EncoderFailed(f"{PROGRAM} made no sound.")
    channels, rate = struct.unpack_from("<HI", written, 22)
    (bits,) = struct.unpack_from("<H", written, 34)
    if (channels, bits) != (1, 16):
        raise EncoderFailed(f"{PROGRAM} made {channels} channels of {bits} bits, not 1 of 16.")
    samples = written[at + 8 :]
    return SpokenText(samples[: len(samples) - len(samples) % 2], rate)
