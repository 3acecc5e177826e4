"""The text in a picture, and what it shows.

Text: PP-OCRv4 by RapidOCR on ONNX Runtime; its models are in its package. What it shows: a classifier, where its owner
has pulled one (`classifier.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rapidocr_onnxruntime import RapidOCR

from router.types import Fact

from ..process.child import Link
from ..process.messages import Found, Picture, Refusal, Segment, WorkerJob, WorkerResult, WorkerSpec
from .classifier import PictureClassifier

_LEAST_CONFIDENCE = 0.5  # of a line
_THREADS = 2


class PictureEncoder:
    """Reads the lines of a picture, from top to bottom. `spec.options`: `classifier` is an ONNX file, "" for none."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._read = RapidOCR(intra_op_num_threads=_THREADS, inter_op_num_threads=1, text_score=_LEAST_CONFIDENCE)
        path = spec.options.get("classifier", "")
        self._classify = PictureClassifier(Path(path), _THREADS) if path else None

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, Picture):
            raise Refusal("it is no picture")
        pixels = np.frombuffer(job.pixels, np.uint8).reshape(job.height, job.width, 3)
        lines, _ = self._read(np.ascontiguousarray(pixels[:, :, ::-1]))  # OpenCV's order
        segments = tuple(Segment(text, float(score)) for _, text, score in lines or ())
        weights = [len(line.text) for line in segments]
        confidence = sum(len(line.text) * line.confidence for line in segments) / sum(weights) if segments else 1.0
        labels = () if self._classify is None else self._classify(job)
        return Found(Fact("\n".join(line.text for line in segments), confidence, labels=labels), segments)
