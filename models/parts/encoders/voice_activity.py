"""Detection of speech in the windows of an audio clip, by Silero's model from faster-whisper's wheel.

The model is read from the wheel without importing the package, which would load Whisper's libraries. Between two jobs
the caller holds the state of an audio clip, so one worker serves any number of clips and may be replaced at any time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnxruntime

from ..decoding.audio import TAPS, low_pass
from ..process.child import Link
from ..process.messages import (
    SAMPLE_RATE,
    SPEECH_RATE,
    SPEECH_WINDOW,
    DetectSpeech,
    Refusal,
    SpeechProbabilities,
    WorkerJob,
    WorkerResult,
    WorkerSpec,
)

Floats = npt.NDArray[np.float32]
_WINDOW = SPEECH_WINDOW * SAMPLE_RATE // SPEECH_RATE  # samples of Silero's windows
_CONTEXT = 64  # samples before a window that it sees too
_HIDDEN = 128  # values of each of its two recurrent states
_BEFORE = TAPS - 1  # samples before a window that the low-pass filter needs
_PARTS = np.cumsum([_BEFORE, _CONTEXT, _HIDDEN])  # where the parts of the state are divided
_STATE = int(_PARTS[-1]) + _HIDDEN


class SpeechDetector:
    """The worker that detects speech. `spec.options`: `model` is Silero's ONNX file (version 6)."""

    def __init__(self, spec: WorkerSpec) -> None:
        options = onnxruntime.SessionOptions()
        options.inter_op_num_threads = options.intra_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        self._session = onnxruntime.InferenceSession(
            spec.options["model"], sess_options=options, providers=["CPUExecutionProvider"]
        )
        self._filter = low_pass(SPEECH_RATE, SAMPLE_RATE)

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, DetectSpeech):
            raise Refusal("the part is not audio")
        if not job.pcm or len(job.pcm) % (2 * SPEECH_WINDOW):
            raise Refusal(f"the audio has {len(job.pcm)} bytes, which is not a whole number of windows")
        state = np.frombuffer(job.state, "<f4") if job.state else np.zeros(_STATE, np.float32)
        if state.size != _STATE:
            raise Refusal("the state that was sent with it belongs to another speech detector")
        before, context, hidden, cell = np.split(state, _PARTS)
        audio = np.concatenate([before, np.frombuffer(job.pcm, "<i2").astype(np.float32) / 2.0**15])
        windows = np.concatenate([context, self._lowered(audio)])
        seen = np.lib.stride_tricks.sliding_window_view(windows, _CONTEXT + _WINDOW)[::_WINDOW]
        output, hidden, cell = self._session.run(
            None, {"input": np.ascontiguousarray(seen), "h": hidden.reshape(1, 1, -1), "c": cell.reshape(1, 1, -1)}
        )
        after = np.concatenate([audio[-_BEFORE:], windows[-_CONTEXT:], hidden.ravel(), cell.ravel()])
        return SpeechProbabilities(tuple(output.ravel().tolist()), after.astype("<f4").tobytes())

    def _lowered(self, audio: Floats) -> Floats:
        """Return the audio at Silero's rate, interpolated within each window, so that no window depends on the next."""
        low = np.convolve(audio, self._filter, mode="valid")
        at = np.arange(low.size * SAMPLE_RATE // SPEECH_RATE) * (SPEECH_RATE / SAMPLE_RATE)
        lowered: Floats = np.interp(at, np.arange(low.size), low).astype(np.float32)
        return lowered
