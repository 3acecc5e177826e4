"""Speech synthesis: the phoneme ids of a sentence → its audio, by a Piper voice in ONNX Runtime."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from .process.child import Link
from .process.messages import Refusal, Synthesize, Synthesized, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2
_MAX_S = 120.0  # of one sentence
_CANCEL_S = 0.02  # between two looks for a cancellation
_QUIETEST = 0.01  # the peak below which a sentence is not made louder
_INPUTS = {"input": ("tensor(int64)", 2), "input_lengths": ("tensor(int64)", 1), "scales": ("tensor(float)", 1)}
_SPEAKER = {"sid": ("tensor(int64)", 1)}


class VoiceSynthesizer:
    """The worker of a Piper voice. `spec.options`: its ONNX file `model`, `sha256`, `rate` in Hz, `speakers` (a
    number).

    A missing, altered or other file makes it refuse each job, with the reason for the daemon.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self._max_samples = int(_MAX_S * int(spec.options["rate"]))
        self._has_speakers = int(spec.options["speakers"]) > 1
        self._fault = ""
        try:
            self._session = self._load(Path(spec.options["model"]), spec.options["sha256"])
        except Refusal as refusal:
            self._fault = str(refusal)
        except MemoryError:
            self._fault = "its file is too large for the memory that it may have"

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if self._fault:
            raise Refusal(self._fault)
        if not isinstance(job, Synthesize):
            raise Refusal("the job is not a sentence to speak")
        feeds: dict[str, npt.NDArray[np.generic]] = {
            "input": np.array([job.ids], np.int64),
            "input_lengths": np.array([len(job.ids)], np.int64),
            "scales": np.array([job.noise, job.length, job.noise_w], np.float32),
        }
        if self._has_speakers:
            feeds["sid"] = np.array([job.speaker], np.int64)
        audio = self._run(feeds, link)
        return Synthesized(b"" if audio is None else self._samples(audio))

    def _run(self, feeds: dict[str, npt.NDArray[np.generic]], link: Link) -> npt.NDArray[np.float32] | None:
        """Return the network's output; None if the job was cancelled. Raises Refusal."""
        options = onnxruntime.RunOptions()
        options.log_severity_level = 4
        done = threading.Event()
        found: list[npt.NDArray[np.float32]] = []
        faults: list[Exception] = []

        def run() -> None:
            try:
                found.append(self._session.run(None, feeds, options)[0])
            except Exception as error:  # onnxruntime's exception classes have no common base
                faults.append(error)
            done.set()

        thread = threading.Thread(target=run)
        thread.start()
        while not done.wait(_CANCEL_S):
            if link.cancelled:
                options.terminate = True  # it ends with the operator that runs now
                thread.join()
                return None
        thread.join()
        if faults:
            raise Refusal(f"ONNX Runtime cannot run the voice ({_first_line(faults[0])})")
        return found[0]

    def _samples(self, audio: npt.NDArray[np.float32]) -> bytes:
        """Return the samples as int16, little endian, scaled to full loudness as Piper does it. Raises Refusal."""
        if not 0 < audio.size <= self._max_samples:
            raise Refusal(f"the voice made {audio.size} samples of one sentence, not 1 to {self._max_samples}")
        flat = np.asarray(audio, np.float32).reshape(-1)
        peak = float(np.abs(flat).max())
        if not np.isfinite(peak):
            raise Refusal("the voice made samples that are not finite numbers")
        flat = flat / np.float32(max(peak, _QUIETEST))
        return np.round(flat * np.float32(32767.0)).astype("<i2").tobytes()

    def _load(self, path: Path, sha256: str) -> onnxruntime.InferenceSession:
        """Load the file if its bytes have this hash. Raises Refusal."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise Refusal(f"{path}: {error.strerror}; add the voice again") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Refusal(f"{path}: the file was altered after the voice was added; add the voice again")
        options = onnxruntime.SessionOptions()
        options.inter_op_num_threads, options.intra_op_num_threads = 1, _THREADS
        options.enable_cpu_mem_arena = False  # what a long sentence needed is given back
        options.log_severity_level = 4
        try:
            session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exception classes have no common base
            raise Refusal(f"ONNX Runtime cannot load the voice ({_first_line(error)})") from error
        self._check(session)
        return session

    def _check(self, session: onnxruntime.InferenceSession) -> None:
        """Check that a model has the inputs and the output of a Piper voice. Raises Refusal."""
        wanted = _INPUTS | _SPEAKER if self._has_speakers else _INPUTS
        found = {one.name: (one.type, len(one.shape)) for one in session.get_inputs()}
        if found != wanted:
            raise Refusal(f"the file is not a Piper voice: its inputs are {_ports(found)}, not {_ports(wanted)}")
        types = [one.type for one in session.get_outputs()]
        if types[:1] != ["tensor(float)"]:
            raise Refusal(f"the file is not a Piper voice: its output is {types or 'missing'}, not tensor(float)")


def _ports(ports: dict[str, tuple[str, int]]) -> str:
    return ", ".join(f"{name} {kind} of rank {rank}" for name, (kind, rank) in sorted(ports.items())) or "none"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
