"""Pictures → soft tokens of a language model: an encoder and the projector that belongs to it, both in ONNX.

encoder     ``pixels`` uint8 [pictures, height, width, 3] → ``features`` float32 [pictures, tokens, n]
projector   ``features`` → ``embeddings`` float32 [pictures, tokens, embedding dimensions of the model]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from ..process.child import Link
from ..process.messages import Picture, Projected, ProjectPictures, Refusal, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2


class PictureProjector:
    """`spec.options`: `encoder` and `projector` are ONNX files."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._encoder, self._projector = (_open(spec.options[name]) for name in ("encoder", "projector"))
        _, height, width, _ = self._encoder.get_inputs()[0].shape
        self._size = (int(width), int(height))

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, ProjectPictures):
            raise Refusal("these are no pictures")
        pixels = as_pixels(job.pictures, self._size)
        (features,) = self._encoder.run(["features"], {"pixels": pixels})
        (vectors,) = self._projector.run(["embeddings"], {"features": features})
        return Projected(tuple(one.astype("<f4").tobytes() for one in vectors))


def as_pixels(pictures: Sequence[Picture], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return whole pictures, each scaled to (width, height): [pictures, height, width, 3]."""
    images = (Image.frombytes("RGB", (one.width, one.height), one.pixels) for one in pictures)
    return np.stack([np.asarray(one.resize(size, Image.Resampling.BILINEAR), np.uint8) for one in images])


def _open(path: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _THREADS
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
