"""Workers for tests of the child process: they do what the job says."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np

from causeway_server.models.parts.process.child import Link
from causeway_server.models.parts.process.messages import (
    SPEECH_WINDOW,
    AudioSamples,
    Decode,
    DetectSpeech,
    Found,
    ImagePixels,
    Refusal,
    Segment,
    SegmentFound,
    SpeechProbabilities,
    Transcribe,
    Word,
    WorkerJob,
    WorkerResult,
    WorkerSpec,
)
from causeway_server.router.types import Fact


class Scripted:
    """`data` says what happens; otherwise the audio is its bytes."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, Decode)
        if job.data == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.data == b"hang":
            time.sleep(3600)
        if job.data == b"work":  # until it is cancelled
            while not link.cancelled:
                time.sleep(0.01)
        if job.data == b"grow":
            return AudioSamples(bytes(self._spec.memory_bytes * 2))
        if job.data == b"write":
            with tempfile.TemporaryFile() as file:
                file.write(b"x")
        if job.data == b"refuse":
            raise Refusal("it is wrong")
        return AudioSamples(job.data)


class TinyEncoder:
    """Hears and reads what `options` say, in `pace_s`, or dies, or hangs until the file `until` is there.

    An audio clip of zeros is silence. `meet`: it waits for the worker of the other kind. Where segments are told, they
    are the pieces of the text between "|": the first at once, the others and the result once the file `then` is there.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._options = spec.options

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, Transcribe | ImagePixels)
        if isinstance(job, Transcribe) and job.terms.language == "xx":
            raise Refusal("the language 'xx' is not known", "language")
        fault = self._options.get("fault")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            awake = self._options.get("until")
            while not link.cancelled and not (awake and Path(awake).exists()):
                time.sleep(0.01)
        if fault == "meet":
            folder, kind = Path(self._options["folder"]), type(job).__name__
            (folder / kind).touch()
            while len(list(folder.iterdir())) < 2 and not link.cancelled:
                time.sleep(0.01)
        time.sleep(float(self._options.get("pace_s", "0")))
        if isinstance(job, Transcribe) and not any(job.audio.samples):
            return Found(Fact("", 1.0))
        text = self._options["text"]
        if isinstance(job, Transcribe) and job.tell:
            for segment in text.split("|"):
                link.send(SegmentFound(Segment(segment, 0.875)))
                while not Path(self._options["then"]).exists() and not link.cancelled:
                    time.sleep(0.01)
            text = text.replace("|", " ")
        sure = float(self._options.get("confidence", "0.875"))
        timed: tuple[Word, ...] = ()
        if isinstance(job, Transcribe) and job.terms.words and fault != "no words":
            timed = tuple(Word(word, 0.05 * at, 0.05 * at + 0.05) for at, word in enumerate(text.split()))
        return Found(Fact(text, sure, "en"), (Segment(text, sure, 0.0, 0.2, 0.125, timed),))


class SizedEncoder(TinyEncoder):
    """An image's width in pixels and an audio clip's length in seconds say more.

    Of 3 it dies, of 5 it hangs until it is cancelled, or the file `until` is there.
    """

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, Transcribe | ImagePixels)
        size = job.width if isinstance(job, ImagePixels) else round(job.audio.seconds)
        if size == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while size == 5 and not link.cancelled and not Path(self._options["until"]).exists():
            time.sleep(0.01)
        return super().run(job, link)


class LoudnessDetector:
    """Takes what is loud for speech. `options`: with `fault`, it dies until the file `until` is there."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._options = spec.options

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, DetectSpeech)
        if "fault" in self._options and not Path(self._options["until"]).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        windows = np.abs(np.frombuffer(job.pcm, "<i2").astype(np.int32)).reshape(-1, SPEECH_WINDOW).mean(axis=1)
        return SpeechProbabilities(tuple(float(loud > 1000) for loud in windows), b"state")


class SlowToLoad(TinyEncoder):
    """Loads until something is written to its pipe `gate`."""

    def __init__(self, spec: WorkerSpec) -> None:
        Path(spec.options["gate"]).read_bytes()
        super().__init__(spec)


class Broken:
    def __init__(self, spec: WorkerSpec) -> None:
        raise RuntimeError("no such model")
