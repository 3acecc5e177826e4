"""Weights for demonstrations and tests, and models for audio and images, distributed in parts in Python packages.

They are fetched with the owner's own pip, whose configuration names the package index. The parts and the whole file
have pinned checksums (demo.json, packaged.json).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from causeway_server.router.child_environment import minimal_environment

from ..catalog.artifact import Artifact, Manifest, save_manifest
from ..catalog.gguf import GgufFile
from ..child_process import child_command
from ..publish.publish import place
from .plan import PullError, RemoteFile, check_sha256, is_full, locked, no_space, partial_of

_DATA = Path(__file__).with_name("demo.json")
_BLOCK_BYTES = 1 << 20
_PIP_TIMEOUT_S = 1800.0
_OF_PIP = (
    "PIP_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "SSL_CERT",
    "REQUESTS_CA",
    "XDG_",
)

_PACKAGED = Path(__file__).with_name("packaged.json")


class Part(msgspec.Struct, frozen=True):
    """A part of the weights, in its own wheel. `member`: its path in the wheel."""

    package: str
    member: str
    size_bytes: int
    sha256: str


class DemoModel(msgspec.Struct, frozen=True):
    """A file whose parts are in packages. `gguf`: figures from the model's header, for the estimate of its memory."""

    name: str
    title: str
    version: str  # version of the packages
    file: RemoteFile
    gguf: GgufFile | None
    parts: tuple[Part, ...]
    pairs: tuple[str, ...] = ()  # demonstrations that it is part of


@lru_cache(maxsize=1)
def demo_models() -> tuple[DemoModel, ...]:
    """Return the models of all demonstrations."""
    return msgspec.json.decode(_DATA.read_bytes(), type=tuple[DemoModel, ...])


def find_demo_models(name: str) -> tuple[DemoModel, ...]:
    """Return the models of the pair `name`, or the one model of that name. Raises PullError."""
    found = tuple(model for model in demo_models() if name in (*model.pairs, model.name))
    if not found:
        names = dict.fromkeys(text for model in demo_models() for text in (*model.pairs, model.name))
        raise PullError(f"demo:{name} is unknown; the names are {', '.join(names)}")
    return found


def cache_folder() -> Path:
    """Return the folder of unfinished downloads: ``~/.cache/causeway/weights``, or below $XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "causeway" / "weights"


def present_bytes(model: DemoModel) -> int:
    """Return how many bytes of the weights have been fetched."""
    return sum(part.size_bytes for part in _present(model, partial_of(_target(model))))


def fetch(model: DemoModel, tick: Callable[[int], None], wheels: Path | None = None) -> Path:
    """Fetch and join the parts that are missing, and return the whole file.

    `tick` gets the bytes of each part; `wheels` stores packages for further files (None: each is deleted after its
    part). Raises PullError if a package cannot be had, a checksum is wrong, or the disk is full.
    """
    target = _target(model)
    partial = partial_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        done = _present(model, partial)
        os.truncate(partial, sum(part.size_bytes for part in done))
        tick(partial.stat().st_size)
        for part in model.parts[len(done) :]:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                try:
                    _append(_download(part, model.version, wheels or Path(folder)), part, partial)
                except OSError as error:
                    if not is_full(error):
                        raise PullError(f"{partial}: {error.strerror}") from error
                    raise no_space(error, partial, model.file.size_bytes - partial.stat().st_size) from error
            tick(part.size_bytes)
        check_sha256(partial, model.file.sha256, f"demo:{model.name}")
        partial.replace(target)
    return target


def _target(model: DemoModel) -> Path:
    return cache_folder() / model.file.name


def _present(model: DemoModel, partial: Path) -> tuple[Part, ...]:
    """Return the parts that the unfinished file holds whole."""
    left = partial.stat().st_size if partial.exists() else 0
    parts = []
    for part in model.parts:
        if left < part.size_bytes:
            break
        parts.append(part)
        left -= part.size_bytes
    return tuple(parts)


def _download(part: Part, version: str, folder: Path) -> Path:
    folder /= part.package
    if kept := list(folder.glob("*.whl")):
        return kept[0]
    wish = f"{part.package}=={version}"
    flags = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input", "-q")
    command = child_command("pip", "download", *flags, "--dest", str(folder), wish)
    try:
        result = subprocess.run(
            command,
            env=minimal_environment(os.environ, *_OF_PIP),
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PullError(
            f"pip download {wish} did not finish within {_PIP_TIMEOUT_S:.0f} s; repeat the command"
        ) from None
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
        raise PullError(f"pip download {wish} failed: {reason}. Repeat the command to resume")
    return wheels[0]


def _append(wheel: Path, part: Part, partial: Path) -> None:
    """Append the part to the unfinished file if its size and checksum are right; otherwise leave the file unchanged."""
    before = partial.stat().st_size
    digest = hashlib.sha256()
    try:
        with partial.open("ab") as file:
            for block in _blocks(wheel, part):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != part.sha256:
            raise PullError(
                f"{part.package}: the downloaded part has the sha256 {digest.hexdigest()}, not {part.sha256}"
            )
    except BaseException:
        os.truncate(partial, before)
        raise


def _blocks(wheel: Path, part: Part) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            left = part.size_bytes + 1  # never more than the part may have, whatever the archive says
            while left and (block := member.read(min(left, _BLOCK_BYTES))):
                left -= len(block)
                yield block
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(f"{part.package}: the package does not contain {part.member} ({error})") from error


class PackagedModel(msgspec.Struct, frozen=True):
    """A model of several files; the first holds the weights. `memory_bytes`: measured memory of its process."""

    name: str
    title: str
    licence: str
    format: str
    architecture: str
    quantisation: str
    memory_bytes: int
    files: tuple[DemoModel, ...]

    @property
    def weights(self) -> RemoteFile:
        """The file that the model is loaded from."""
        return self.files[0].file

    @property
    def size_bytes(self) -> int:
        return sum(one.file.size_bytes for one in self.files)

    @property
    def present_bytes(self) -> int:
        """The number of fetched bytes."""
        return sum(present_bytes(one) for one in self.files)


@lru_cache(maxsize=1)
def packaged_models() -> dict[str, PackagedModel]:
    """Return the models by name."""
    models = msgspec.json.decode(_PACKAGED.read_bytes(), type=tuple[PackagedModel, ...])
    return {model.name: model for model in models}


def fetch_packaged(model: PackagedModel, root: Path, tick: Callable[[int], None]) -> Artifact:
    """Fetch a model's files and put them into `root/NAME`, the manifest last.

    `tick` gets the bytes of each part. Raises PullError as `fetch`, ArtifactError if a file cannot be written.
    """
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as wheels:  # one package may hold parts of several files
        fetched = [fetch(one, tick, Path(wheels)) for one in model.files]
    folder, weights = root / model.name, model.weights
    sources = {_file_name(one.file): one.file.sha256 for one in model.files}
    for path in fetched:
        place(path, folder / path.name, "move")
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
        files={name: sha256 for name, sha256 in sources.items() if name != _file_name(weights)},
        command=f"causeway-models pull {model.name}",
        note=f"{model.title}, from packages",
    )
    return save_manifest(manifest, folder)


def _file_name(file: RemoteFile) -> str:
    return Path(file.name).name
