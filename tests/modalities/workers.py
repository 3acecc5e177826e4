"""Workers for tests of the child process: they do what the job says."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from models.modalities.process.child import Link
from models.modalities.process.messages import (
    DecodeSound,
    Found,
    Picture,
    Refusal,
    Sound,
    WorkerJob,
    WorkerResult,
    WorkerSpec,
)
from router.types import Fact


class Scripted:
    """`data` says what happens; otherwise the sound is its bytes."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, DecodeSound)
        if job.data == b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        if job.data == b"hang":
            time.sleep(3600)
        if job.data == b"work":  # until it is cancelled
            while not link.cancelled:
                time.sleep(0.01)
        if job.data == b"grow":
            return Sound(bytes(self._spec.memory_bytes * 2))
        if job.data == b"write":
            with tempfile.TemporaryFile() as file:
                file.write(b"x")
        if job.data == b"refuse":
            raise Refusal("it is wrong")
        return Sound(job.data)


class TinyEncoder:
    """Hears and reads what `options` say, or hangs or dies; a sound without amplitude is silence."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._options = spec.options

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        assert isinstance(job, Sound | Picture)
        fault = self._options.get("fault")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            while not link.cancelled:
                time.sleep(0.01)
        silent = isinstance(job, Sound) and not any(job.samples)
        return Found(Fact("" if silent else self._options["text"], 0.875, "en"))


class SlowToLoad(TinyEncoder):
    """Loads until its file `gate` is there."""

    def __init__(self, spec: WorkerSpec) -> None:
        while not Path(spec.options["gate"]).exists():
            time.sleep(0.01)
        super().__init__(spec)


class Broken:
    def __init__(self, spec: WorkerSpec) -> None:
        raise RuntimeError("no such model")
