"""Reading of the text in an image: PP-OCRv4 by RapidOCR on ONNX Runtime, whose models are in its package."""

from __future__ import annotations

import numpy as np

from causeway_server.router.types import Fact

from ..process.child import Link
from ..process.messages import Found, ImagePixels, Refusal, Segment, WorkerJob, WorkerResult, WorkerSpec

_MIN_CONFIDENCE = 0.5  # of a line
_THREADS = 2


class ImageEncoder:
    """Reads an image's lines of text, from top to bottom."""

    def __init__(self, spec: WorkerSpec) -> None:
        from rapidocr_onnxruntime import RapidOCR

        self._read = RapidOCR(intra_op_num_threads=_THREADS, inter_op_num_threads=1, text_score=_MIN_CONFIDENCE)

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, ImagePixels):
            raise Refusal("the part is not an image")
        pixels = np.frombuffer(job.pixels, np.uint8).reshape(job.height, job.width, 3)
        lines, _ = self._read(np.ascontiguousarray(pixels[:, :, ::-1]))  # OpenCV's order
        segments = tuple(Segment(text, float(score)) for _, text, score in lines or ())
        weights = [len(line.text) for line in segments]
        confidence = sum(len(line.text) * line.confidence for line in segments) / sum(weights) if segments else 1.0
        return Found(Fact("\n".join(line.text for line in segments), confidence), segments)
