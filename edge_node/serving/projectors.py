"""Pictures → soft tokens of a model on this device, by the projector that its manifest names.

Each projector has a child, which starts with the first picture for its model. Soft tokens are remembered as facts are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection

from models.catalog.artifact import ArtifactError, ArtifactNotFound
from models.catalog.projector import Projector, missing_packages
from models.llama_cpp.protocol import SoftTokens
from models.modalities.process.messages import (
    DecodePicture,
    Picture,
    Projected,
    ProjectPicture,
    WorkerSpec,
)
from models.modalities.process.parent import WorkerFailed, WorkerProcess
from router.types import Modality

log = logging.getLogger(__name__)

WORKER = "models.modalities.encoders.projector:PictureProjector"
VISION_WORKER = "models.modalities.encoders.mmproj:VisionModel"


class Projectors:
    """The projectors of the models that the active policy names.

    Args:
        find: a model's, or None. Raises ArtifactError.
        decoder: of pictures.
        remembered: limit of the pictures whose soft tokens are kept.
        timeout_s: for each picture.
    """

    def __init__(
        self,
        find: Callable[[str], Projector | None],
        decoder: WorkerProcess,
        remembered: int,
        timeout_s: float,
    ) -> None:
        self._find = find
        self._decoder = decoder
        self._limit = remembered
        self._timeout_s = timeout_s
        self._known: dict[str, Projector] = {}  # by model
        self._named: frozenset[str] | None = None  # models of the active policy; None: any
        self._workers: dict[str, WorkerProcess] = {}  # by the projector's digest
        self._reading: Counter[str] = Counter()  # pictures that a worker reads, or that wait for it
        self._remembered: OrderedDict[tuple[str, str], SoftTokens] = OrderedDict()
        self._former_starts = 0  # of workers that were dropped

    @property
    def starts(self) -> int:
        """Children started so far."""
        return self._former_starts + sum(worker.starts for worker in self._workers.values())

    @property
    def running(self) -> int:
        """Children that are there: one that was killed counts until the next picture needs it."""
        return sum(worker.pid is not None for worker in self._workers.values())

    def kinds(self, model: str) -> tuple[Modality, ...]:
        """Read the model's manifest anew; return the kinds of parts that it takes as soft tokens."""
        self._known.pop(model, None)
        try:
            projector = self._find(model)
        except ArtifactError as error:
            if not isinstance(error, ArtifactNotFound):
                log.error("%s takes no pictures as soft tokens: %s", model, error)
            return ()
        if projector is None or missing_packages(has_encoder=projector.encoder is not None):
            return ()
        self._known[model] = projector
        return ("image",)

    def use(self, models: Collection[str]) -> None:
        """End the children that none of the active policy's models needs any more.

        One that reads a picture, for a request of the policy before, ends after it.
        """
        self._named = frozenset(models)
        self._end_unused()

    def digest(self, model: str) -> str:
        """Return what tells the projector of a model apart; "" if it has none."""
        projector = self._known.get(model)
        return "" if projector is None else projector.digest

    def remembered(self, model: str, sha256: str) -> SoftTokens | None:
        """Return the soft tokens of an equal picture, if they are known."""
        projector = self._known.get(model)
        return None if projector is None else self._remembered.get((projector.digest, sha256))

    async def run(self, model: str, picture: bytes, sha256: str, deadline: float) -> SoftTokens:
        """Return the soft tokens of a picture.

        Args:
            deadline: the loop's time; the picture also has its own.

        Raises:
            Refusal: the picture is invalid.
            WorkerTimeout, WorkerFailed: it was not read.
        """
        projector = self._known.get(model)
        if projector is None:
            raise WorkerFailed(f"{model} has no projector any more")
        deadline = min(deadline, asyncio.get_running_loop().time() + self._timeout_s)
        decoded = await self._decoder.run(DecodePicture(picture), deadline)
        assert isinstance(decoded, Picture)
        self._reading[projector.digest] += 1
        try:
            found = await self._worker_of(projector).run(ProjectPicture(decoded), deadline)
        finally:
            self._reading[projector.digest] -= 1
            self._end_unused()
        assert isinstance(found, Projected)
        soft = self._remembered[projector.digest, sha256] = SoftTokens(found.vectors, found.runs)
        if len(self._remembered) > self._limit:
            self._remembered.popitem(last=False)
        return soft

    async def close(self) -> None:
        """End all children; the decoder is its owner's."""
        for worker in self._workers.values():
            await worker.close()

    def _worker_of(self, projector: Projector) -> WorkerProcess:
        worker = self._workers.get(projector.digest)
        if worker is None:
            worker = self._workers[projector.digest] = WorkerProcess(_worker_spec(projector))
        return worker

    def _end_unused(self) -> None:
        """End the children of projectors whose place another version took, or whose model the policy does not name."""
        named = self._known if self._named is None else self._known.keys() & self._named
        used = {self._known[model].digest for model in named}
        for digest in [one for one in self._workers if one not in used and not self._reading[one]]:
            worker = self._workers.pop(digest)
            self._former_starts += worker.starts
            worker.end()
            del self._reading[digest]


def _worker_spec(projector: Projector) -> WorkerSpec:
    if projector.encoder is None:
        options = {"mmproj": str(projector.path), "model": str(projector.model)}
        return WorkerSpec(VISION_WORKER, options=options, memory_bytes=2 * projector.memory_bytes)
    options = {"encoder": str(projector.encoder), "projector": str(projector.path)}
    return WorkerSpec(WORKER, options=options, memory_bytes=projector.memory_bytes)
