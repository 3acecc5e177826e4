"""Speech synthesis, by espeak-ng or by a Piper voice that an owner added, and the audio formats in which it is sent.

A Piper voice reads phonemes, which espeak-ng produces: the voice's process never sees the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import struct
import wave
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.parts.installed import PROGRAM, find_program, is_onnxruntime_installed
from causeway_server.models.parts.process.messages import Refusal, Synthesize, Synthesized
from causeway_server.models.parts.process.parent import WorkerFailed, WorkerProcess, WorkerTimeout
from causeway_server.models.parts.voices import (
    DEFAULT,
    Voice,
    find_voice,
    list_voices,
    phoneme_ids,
    split_clauses,
    split_sentences,
    worker_spec,
)
from causeway_server.router.child_environment import minimal_environment
from causeway_server.router.documents.reader import did_you_mean
from causeway_server.router.errors import EncoderFailed, InvalidRequest, UnsupportedFeature

PCM_HZ = 24_000
"""Sample rate of OpenAI's `pcm`, which has no header."""
_WORDS_PER_MINUTE = 175  # words per minute at speed 1.0
_SLOWEST, _FASTEST = 80, 450  # limits of the program, words per minute
_MAX_BYTES = 64 * 1024 * 1024  # maximum audio of one text: 25 minutes
_LIST_S = 10.0
_EXAMPLE = "`en-us`"
_READ_BYTES = 1 << 16


class SpokenText(msgspec.Struct, frozen=True):
    """Synthesised speech. `samples`: int16 little endian, one channel, at `rate` Hz."""

    samples: bytes
    rate: int

    def wav(self) -> bytes:
        """Return the speech as a WAV file."""
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

        from causeway_server.models.parts.decoding.audio import resample

        samples = np.frombuffer(self.samples, "<i2").astype(np.float32)
        return np.round(resample(samples, self.rate, rate)).astype("<i2").tobytes()


class Espeak:
    """espeak-ng, a program of the distribution, found on `PATH`: one process per text, limited in time and bytes. The
    text is passed by stdin, so that a client's text never becomes an argument.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._voices: tuple[str, ...] = ()

    async def speak(self, text: str, voice: str, speed: float, deadline: float, others: Sequence[str]) -> SpokenText:
        """Return the speech of a text. Raises UnsupportedFeature without the program; InvalidRequest if the voice does
        not exist; EncoderFailed if the program was late, or failed.

        Args:
            voice: A language of the program, such as `en-gb`.
            speed: Multiple of the voice's own speed; limited by the program's range.
            deadline: Deadline in the loop's time.
            others: Other voices of this device, to name in an error.
        """
        program = self._program()
        await self._check_voice(program, voice, others)
        pace = min(max(round(_WORDS_PER_MINUTE * speed), _SLOWEST), _FASTEST)
        command = (program, "--stdin", "--stdout", "-b", "1", "-v", voice, "-s", str(pace))
        return _parse(await _run(command, text.encode(), deadline))

    async def phonemes(self, text: str, voice: str, deadline: float) -> str:
        """Return a clause in IPA. Raises UnsupportedFeature if the program is not installed; EncoderFailed if the
        program does not know `voice`, was late, or failed.
        """
        command = (self._program(), "-q", "--ipa", "--stdin", "-b", "1", "-v", voice)
        return (await _run(command, text.encode(), deadline)).decode(errors="replace")

    def _program(self) -> str:
        program = find_program(self._environ)
        if program is None:
            raise UnsupportedFeature(
                f"The text-to-speech program {PROGRAM} is not installed. Install it, for example with "
                f"`apt install {PROGRAM}`."
            )
        return program

    async def _check_voice(self, program: str, voice: str, others: Sequence[str]) -> None:
        if not self._voices:
            listed = await _run((program, "--voices"), b"", asyncio.get_running_loop().time() + _LIST_S)
            self._voices = _voices(listed)
        if voice not in self._voices:
            added = f", or one that was added: {', '.join(others)}" if others else ""
            near = did_you_mean(voice[:64], (*others, *self._voices))
            near = near or f". Send the code of a language, such as {_EXAMPLE}{added}"
            advice = f"{near} (`{PROGRAM} --voices` lists all {len(self._voices)})."
            raise InvalidRequest(f"`voice`: there is no voice {voice[:64]!r} on this device{advice}", param="voice")


async def _run(command: Sequence[str], text: bytes, deadline: float) -> bytes:
    """Run the program and return its output. Raises EncoderFailed."""
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
            with contextlib.suppress(ConnectionError):  # it ended early; its exit status gives the reason
                process.stdin.write(text)
                await process.stdin.drain()
            process.stdin.close()
            written = bytearray()
            while data := await process.stdout.read(_READ_BYTES):
                written += data
                if len(written) > _MAX_BYTES:
                    raise EncoderFailed(f"{PROGRAM} produced too much audio. Send a shorter text.")
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
    return bytes(written)


def _voices(listed: bytes) -> tuple[str, ...]:
    """Return the second column of the program's table: the languages, in its order."""
    rows = [line.split() for line in listed.decode(errors="replace").splitlines()[1:]]
    return tuple(dict.fromkeys(row[1] for row in rows if len(row) > 1))


def _parse(written: bytes) -> SpokenText:
    """Parse a WAV file whose header was written before its length was known. Raises EncoderFailed."""
    at = written.find(b"data")
    if written[:4] != b"RIFF" or at < 36:
        raise EncoderFailed(f"{PROGRAM} produced no audio.")
    channels, rate = struct.unpack_from("<HI", written, 22)
    (bits,) = struct.unpack_from("<H", written, 34)
    if (channels, bits) != (1, 16):
        raise EncoderFailed(f"{PROGRAM} produced {channels} channels of {bits} bits, not 1 channel of 16 bits.")
    samples = written[at + 8 :]
    return SpokenText(samples[: len(samples) - len(samples) % 2], rate)


log = logging.getLogger(__name__)

_PAUSE_S = 0.2  # silence between two sentences, as in Piper's program
IDLE_S = 300.0
"""Time in seconds after which the idle process of a voice is ended."""
LOADED = 2
SEPARATOR = "+"
"""The character between a voice and its speaker, the same as between a model and its adapter."""


class NothingToSpeak(InvalidRequest):
    """The voice cannot pronounce the text."""


class Speaker:
    """The speech synthesis of this device; espeak-ng is found on `PATH`. `default`: the voice for `auto`."""

    def __init__(self, environ: Mapping[str, str], voices: Voices | None = None, default: str = "en-us") -> None:
        self._espeak = Espeak(environ)
        self._voices = voices or Voices(())
        self._default = default

    def model_of(self, voice: str) -> str:
        """Return the model that speaks for `voice`: an added voice's name, or the program's."""
        try:
            named = self._voices.find(self._named(voice))
        except ArtifactError:  # reported when it speaks
            return self._named(voice).partition(SEPARATOR)[0]
        return PROGRAM if named is None else named[0].name

    async def speak(self, text: str, voice: str, speed: float, deadline: float) -> SpokenText:
        """Return the speech of a whole text: the result of `sentences`, joined. Raises the same errors."""
        async with contextlib.aclosing(self.sentences(text, voice, speed, deadline)) as sentences:
            pieces = [piece async for piece in sentences]
        return SpokenText(b"".join(piece.samples for piece in pieces), pieces[0].rate)

    async def sentences(self, text: str, voice: str, speed: float, deadline: float) -> AsyncGenerator[SpokenText, None]:
        """Yield the speech of each sentence as soon as it is made; espeak-ng makes the whole text at once.

        `voice`: ``VOICE`` or ``VOICE+SPEAKER`` of an added voice, else a language of espeak-ng; `speed`: multiple of
        its own; `deadline`: the loop's time. Raises UnsupportedFeature if a program or package is not installed;
        InvalidRequest if the voice or speaker does not exist, or no part of the text can be spoken; EncoderFailed if
        the voice was late, or failed.
        """
        voice = self._named(voice)
        try:
            named = self._voices.find(voice)
        except ArtifactError as error:
            log.error("The voice %s cannot be used: %s", voice, error)
            raise EncoderFailed(f"The voice {voice!r} cannot be used: its files are damaged.") from None
        if named is None:
            yield await self._espeak.speak(text, voice, speed, deadline, self._voices.names())
            return
        async with contextlib.aclosing(self._added(named[0], _speaker_id(*named), text, speed, deadline)) as pieces:
            async for piece in pieces:
                yield piece

    async def close(self) -> None:
        """End the processes of the voices."""
        await self._voices.close()

    def _named(self, voice: str) -> str:
        return self._default if voice == DEFAULT else voice

    async def _added(
        self, voice: Voice, speaker: int, text: str, speed: float, deadline: float
    ) -> AsyncGenerator[SpokenText, None]:
        if not is_onnxruntime_installed():
            raise UnsupportedFeature(
                "ONNX Runtime, which runs voices, is not installed. Run `pip install 'causeway-router[voice]'`."
            )
        made = 0
        try:
            async with self._voices.using(voice, deadline) as worker:
                for sentence in split_sentences(text):
                    samples = await self._sentence(voice, worker, speaker, sentence, speed, deadline)
                    if not samples:
                        continue
                    rate = voice.settings.audio.sample_rate
                    pause = bytes(2 * round(_PAUSE_S * rate)) if made else b""
                    made += len(pause) + len(samples)
                    if made > _MAX_BYTES:
                        raise EncoderFailed(f"The voice {voice.name!r} produced too much audio. Send a shorter text.")
                    yield SpokenText(pause + samples, rate)
        except (WorkerTimeout, TimeoutError):
            raise EncoderFailed(f"The voice {voice.name!r} took too long. Send a shorter text.") from None
        except WorkerFailed as error:
            log.error("The voice %s failed: %s", voice.name, error)
            raise EncoderFailed(f"The voice {voice.name!r} failed: {error}. Send the text again.") from None
        except Refusal as refusal:
            log.error("The voice %s cannot be used: %s", voice.name, refusal)
            raise EncoderFailed(
                f"The voice {voice.name!r} cannot speak this text, or is damaged. See the log."
            ) from None
        if not made:
            raise NothingToSpeak(
                f"The voice {voice.name!r} cannot pronounce `input`. Send a text in the language of the voice.",
                param="input",
            )

    async def _sentence(
        self, voice: Voice, worker: WorkerProcess, speaker: int, sentence: str, speed: float, deadline: float
    ) -> bytes:
        """Return the samples of a sentence; empty if the voice cannot pronounce it. Raises as `WorkerProcess.run`."""
        settings = voice.settings
        spoken = [
            (await self._espeak.phonemes(clause.words, settings.espeak.voice, deadline), clause.mark)
            for clause in split_clauses(sentence)
        ]
        ids = phoneme_ids(spoken, settings)
        if not ids:
            return b""
        scales = settings.inference  # the voice's own
        job = Synthesize(ids, scales.noise_scale, scales.length_scale / speed, scales.noise_w, speaker)
        result = await worker.run(job, deadline)
        assert isinstance(result, Synthesized)
        return result.samples


def _speaker_id(voice: Voice, name: str) -> int:
    """Return the number of a voice's speaker. Raises InvalidRequest."""
    speakers = voice.settings.speakers
    if not name:
        return 0
    if name in speakers:
        return speakers[name]
    some = ", ".join(list(speakers)[:8])
    near = did_you_mean(name, tuple(speakers)) or (
        f"; its speakers are {some}" if some else ": it has only one speaker"
    )
    raise InvalidRequest(f"`voice`: {voice.name!r} has no speaker {name!r}{near}.", param="voice")


class _VoiceProcess:
    """The process of one version of a voice. `uses`: number of texts that it is speaking now."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.uses = 0
        self.ends: asyncio.TimerHandle | None = None


class Voices:
    """The voices in `model_dirs` and the account's own folder. Each has a process, from its first text until it is
    idle. At most `loaded` are in memory: a text for another one waits until one is idle, and replaces it.
    """

    def __init__(
        self,
        model_dirs: Sequence[Path],
        *,
        idle_s: float = IDLE_S,
        loaded: int = LOADED,
        memory_bytes: Callable[[Voice], int] = lambda voice: voice.memory_bytes,
    ) -> None:
        self._model_dirs = model_dirs
        self._idle_s = idle_s
        self._limit = loaded
        self._memory_bytes = memory_bytes
        self._loaded: dict[tuple[Path, str], _VoiceProcess] = {}  # the least recently used one first
        self._changed = asyncio.Condition()
        self._ending: set[asyncio.Task[None]] = set()
        self._former_starts = 0

    @property
    def starts(self) -> int:
        """Number of processes started so far."""
        return self._former_starts + sum(process.worker.starts for process in self._loaded.values())

    @property
    def running(self) -> int:
        """Number of running processes."""
        return sum(process.worker.pid is not None for process in self._loaded.values())

    @property
    def busy(self) -> int:
        """Number of sentences that are being spoken now."""
        return sum(process.worker.busy for process in self._loaded.values())

    def names(self) -> tuple[str, ...]:
        try:
            return tuple(voice.name for voice in list_voices(self._model_dirs))
        except ArtifactError as error:
            log.warning("The voices cannot be listed: %s", error)
            return ()

    def find(self, name: str) -> tuple[Voice, str] | None:
        """Return the voice that ``VOICE`` or ``VOICE+SPEAKER`` names, and the speaker's name, if any. Raises
        ArtifactError if its files are missing, malformed or altered.
        """
        base, _, speaker = name.partition(SEPARATOR)
        voice = find_voice(base, self._model_dirs)
        return None if voice is None else (voice, speaker)

    @contextlib.asynccontextmanager
    async def using(self, voice: Voice, deadline: float) -> AsyncIterator[WorkerProcess]:
        """Hold the process of a voice, which starts with its first text. Raise TimeoutError if other voices were
        speaking until the `deadline`, in the loop's time.
        """
        key = (voice.path, voice.sha256)
        async with asyncio.timeout_at(deadline), self._changed:
            await self._changed.wait_for(lambda: key in self._loaded or self._has_place())
            process = self._loaded.pop(key, None) or await self._load(voice)
            self._loaded[key] = process
            process.uses += 1
        if process.ends is not None:
            process.ends.cancel()
            process.ends = None
        try:
            yield process.worker
        finally:
            process.uses -= 1
            if not process.uses:
                process.ends = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle, key)
            await asyncio.shield(self._tell())

    async def close(self) -> None:
        """End all processes."""
        for process in self._loaded.values():
            if process.ends is not None:
                process.ends.cancel()
            await process.worker.close()
        if self._ending:
            await asyncio.wait(self._ending)

    def _has_place(self) -> bool:
        return len(self._loaded) < self._limit or any(not one.uses for one in self._loaded.values())

    async def _load(self, voice: Voice) -> _VoiceProcess:
        """Make room in memory, and return the process of a voice, which is not started yet."""
        if len(self._loaded) >= self._limit:
            await self._remove(next(key for key, one in self._loaded.items() if not one.uses)).close()
        spec = worker_spec(voice.path, voice.sha256, voice.settings, self._memory_bytes(voice))
        return _VoiceProcess(WorkerProcess(spec))

    def _remove(self, key: tuple[Path, str]) -> WorkerProcess:
        process = self._loaded.pop(key)
        if process.ends is not None:
            process.ends.cancel()
        self._former_starts += process.worker.starts
        return process.worker

    def _end_idle(self, key: tuple[Path, str]) -> None:
        task = asyncio.get_running_loop().create_task(self._remove(key).close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
