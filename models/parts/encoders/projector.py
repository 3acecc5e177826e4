"""Conversion of an image to soft tokens of a language model, with an encoder and its projector, both in ONNX.

    encoder     ``pixels`` uint8 [images, height, width, 3] → ``features`` float32 [images, …]
    projector   ``features`` → ``embeddings`` float32 [images, tokens, embedding dimensions of the model]

Images of several requests are not encoded in one run, because on two cores that is not faster.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
from PIL import Image

from ..process.child import Link
from ..process.messages import ImagePixels, Projected, ProjectImage, Refusal, WorkerJob, WorkerResult, WorkerSpec

_THREADS = 2


class ImageProjector:
    """The worker that encodes and projects images. `spec.options`: `encoder` and `projector` are ONNX files."""

    def __init__(self, spec: WorkerSpec) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _THREADS
        self._encoder, self._projector = (
            onnxruntime.InferenceSession(spec.options[name], options, providers=["CPUExecutionProvider"])
            for name in ("encoder", "projector")
        )
        _, height, width, _ = self._encoder.get_inputs()[0].shape
        self._size = (int(width), int(height))

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, ProjectImage):
            raise Refusal("it is not an image")
        return self.project(job.image)

    def project(self, image: ImagePixels) -> Projected:
        rgb = Image.frombytes("RGB", (image.width, image.height), image.pixels)
        # The whole image, whatever its shape: nothing of it is cut off.
        pixels = np.asarray(rgb.resize(self._size, Image.Resampling.BILINEAR), np.uint8)
        (features,) = self._encoder.run(["features"], {"pixels": pixels[None]})
        (vectors,) = self._projector.run(["embeddings"], {"features": features})
        return Projected(vectors[0].astype("<f4").tobytes())
