"""Conversion of an image to soft tokens of a vision model, with the model's `mmproj` file."""

from __future__ import annotations

from pathlib import Path

from causeway_server.router.errors import InvalidRequest

from ...llama_cpp.native.mtmd import VisionEncoder
from ...llama_cpp.native.resources import allowed_cores
from ..process.child import Link
from ..process.messages import Projected, ProjectImage, Refusal, WorkerJob, WorkerResult, WorkerSpec


class VisionModel:
    """The worker of a vision model. `spec.options`: GGUF files `mmproj` and `model`. Only pixels reach mtmd."""

    def __init__(self, spec: WorkerSpec) -> None:
        mmproj, model = (Path(spec.options[name]) for name in ("mmproj", "model"))
        self._encoder = VisionEncoder(mmproj, model, threads=max(1, int(allowed_cores())))

    def run(self, job: WorkerJob, link: Link) -> WorkerResult:
        if not isinstance(job, ProjectImage):
            raise Refusal("the part is not an image")
        image = job.image
        try:
            vectors, runs = self._encoder.encode(image.pixels, image.width, image.height)
        except InvalidRequest as error:
            raise Refusal(error.message) from error
        return Projected(vectors.astype("<f4").tobytes(), runs)
