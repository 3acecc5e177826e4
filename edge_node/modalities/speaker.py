"""Text → sound, by espeak-ng or by a Piper voice that an owner added, sentence by sentence.

A Piper voice reads phonemes, which espeak-ng writes: its child never sees the text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping

from models.catalog.artifact import ArtifactError
from models.modalities.process.messages import Refusal, Synthesize, Synthesized
from models.modalities.process.parent import WorkerFailed, WorkerProcess, WorkerTimeout
from models.modalities.voices.files import DEFAULT, Voice, VoiceSettings
from models.modalities.voices.phonemes import phoneme_ids, split_clauses, split_sentences
from router.documents.reader import did_you_mean
from router.errors import EncoderFailed, InvalidRequest, UnsupportedFeature

from .espeak import Espeak
from .sound import PROGRAM, SpokenText, is_onnxruntime_installed
from .voices import SEPARATOR, Voices

log = logging.getLogger(__name__)

_PAUSE_S = 0.2  # between two sentences, as Piper's program makes it
_MAX_BYTES = 64 * 1024 * 1024  # of one text: 25 minutes


class NothingToSpeak(InvalidRequest):
    """A voice knows no sound of a text."""


class Speaker:
    """What this box speaks with.

    Args:
        environ: where `PATH` says what is installed.
        voices: those that an owner added.
        default: the voice of a request for `auto`.
    """

    def __init__(self, environ: Mapping[str, str], voices: Voices | None = None, default: str = "en-us") -> None:
        self._espeak = Espeak(environ)
        self._voices = voices or Voices(())
        self._default = default

    def model_of(self, voice: str) -> str:
        """Return what speaks for `voice`: the name of an added voice, or the program's."""
        try:
            found = self._voices.find(self._named(voice))
        except ArtifactError:  # said when it speaks
            return self._named(voice).partition(SEPARATOR)[0]
        return PROGRAM if found is None else found[0].name

    async def speak(self, text: str, voice: str, speed: float, deadline: float) -> SpokenText:
        """Return the sound of a text: the sentences of `sentences` together.

        Raises:
            As `sentences`.
        """
        async with contextlib.aclosing(self.sentences(text, voice, speed, deadline)) as sentences:
            pieces = [piece async for piece in sentences]
        return SpokenText(b"".join(piece.samples for piece in pieces), pieces[0].rate)

    async def sentences(self, text: str, voice: str, speed: float, deadline: float) -> AsyncGenerator[SpokenText, None]:
        """Yield the sound of each sentence as soon as it is made; espeak-ng's comes at once.

        Args:
            voice: ``VOICE`` or ``VOICE+SPEAKER`` of a voice that was added, else a language that espeak-ng speaks.
            speed: 1.0 is the voice's own.
            deadline: in the loop's time.

        Raises:
            UnsupportedFeature: a program or package that speaks is not installed.
            InvalidRequest: there is no such voice or speaker, or nothing in the text can be spoken.
            EncoderFailed: it was late, or failed.
        """
        voice = self._named(voice)
        try:
            found = self._voices.find(voice)
        except ArtifactError as error:
            log.error("the voice %s cannot be used: %s", voice, error)
            raise EncoderFailed(f"the voice {voice!r} cannot be used: its files are damaged.") from None
        if found is None:
            yield await self._espeak.speak(text, voice, speed, deadline, self._voices.names())
            return
        async with contextlib.aclosing(self._added(found[0], _speaker_id(*found), text, speed, deadline)) as pieces:
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
        """Yield the sentences by a voice that was added."""
        if not is_onnxruntime_installed():
            raise UnsupportedFeature(
                "this box has no ONNX Runtime, which runs voices: `pip install 'causeway[voice]'`."
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
                        raise EncoderFailed(f"the voice {voice.name!r} made too much sound. Send a shorter text.")
                    yield SpokenText(pause + samples, rate)
        except (WorkerTimeout, TimeoutError):
            raise EncoderFailed(f"the voice {voice.name!r} took too long. Send a shorter text.") from None
        except WorkerFailed as error:
            log.error("the voice %s failed: %s", voice.name, error)
            raise EncoderFailed(f"the voice {voice.name!r} failed: {error}. Send the text again.") from None
        except Refusal as refusal:
            log.error("the voice %s cannot be used: %s", voice.name, refusal)
            raise EncoderFailed(f"the voice {voice.name!r} cannot speak this, or is damaged; see the log.") from None
        if not made:
            raise NothingToSpeak(
                f"`input`: the voice {voice.name!r} knows no sound of it. Send words of its language.", param="input"
            )

    async def _sentence(
        self, voice: Voice, worker: WorkerProcess, speaker: int, sentence: str, speed: float, deadline: float
    ) -> bytes:
        """The samples of a sentence; none if the voice knows no sound of it. Raises as `WorkerProcess.run`."""
        settings = voice.settings
        spoken = [
            (await self._espeak.phonemes(clause.words, settings.espeak.voice, deadline), clause.mark)
            for clause in split_clauses(sentence)
        ]
        ids = phoneme_ids(spoken, settings)
        if not ids:
            return b""
        result = await worker.run(synthesize(ids, settings, speaker, speed), deadline)
        assert isinstance(result, Synthesized)
        return result.samples


def synthesize(ids: tuple[int, ...], settings: VoiceSettings, speaker: int, speed: float) -> Synthesize:
    """Return the job of a sentence, with the voice's own scales."""
    scales = settings.inference
    return Synthesize(ids, scales.noise_scale, scales.length_scale / speed, scales.noise_w, speaker)


def _speaker_id(voice: Voice, name: str) -> int:
    """Raises InvalidRequest."""
    speakers = voice.settings.speakers
    if not name:
        return 0
    if name in speakers:
        return speakers[name]
    some = ", ".join(list(speakers)[:8])
    near = did_you_mean(name, tuple(speakers)) or (f"; there are {some}" if some else ": it has one speaker")
    raise InvalidRequest(f"`voice`: {voice.name!r} has no speaker {name!r}{near}.", param="voice")
