"""The sources of `causeway-models pull`, and a file that is being downloaded from one: its place, checksum and lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ..catalog.artifact import ArtifactError, sha256_of

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class PullError(ArtifactError):
    """A model cannot be pulled; the message says why and what to do."""


class HubSource(msgspec.Struct, frozen=True):
    """A repository on a hub that speaks Hugging Face's API. `choice`: a file, a quantisation, or empty."""

    repository: str
    choice: str = ""


class UrlSource(msgspec.Struct, frozen=True):
    url: str
    sha256: str


class DemoSource(msgspec.Struct, frozen=True):
    """Models of the demonstration, by the name of the pair or of one model."""

    name: str


Source = HubSource | UrlSource | DemoSource


class RemoteFile(msgspec.Struct, frozen=True):
    """A weights file elsewhere."""

    name: str  # of the file, with its folders
    size_bytes: int
    sha256: str
    licence: str  # empty: not named


def parse_source(text: str, sha256: str | None) -> Source:
    """Read a source: ``hf:OWNER/REPO[:FILE or quantisation]``, ``demo:NAME``, or an http(s) URL with its SHA-256.

    Raises:
        PullError: it is none of these.
    """
    kind, _, rest = text.partition(":")
    if sha256 is not None:
        sha256 = sha256.lower().removeprefix("sha256:")
        if not _SHA256.fullmatch(sha256):
            raise PullError(f"--sha256 {sha256}: 64 hexadecimal digits are expected")
    if kind in ("http", "https") and urlsplit(text).hostname:
        if sha256 is None:
            raise PullError(f"{text}: a URL needs --sha256, so that you get the file that you mean")
        return UrlSource(text, sha256)
    if sha256 is not None:
        raise PullError("--sha256 is for URLs; other sources name their checksums themselves")
    if kind == "hf":
        repository, _, choice = rest.partition(":")
        if not _REPOSITORY.fullmatch(repository):
            raise PullError(f"{text}: write hf:OWNER/REPO, hf:OWNER/REPO:FILE.gguf or hf:OWNER/REPO:Q4_K_M")
        return HubSource(repository, choice)
    if kind == "demo" and rest:
        return DemoSource(rest)
    raise PullError(f"{text}: write hf:OWNER/REPO[:FILE or quantisation], demo:NAME, speech, pictures, or a URL")


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def check_sha256(partial: Path, expected: str, origin: str) -> None:
    """Compare a downloaded file with its checksum, and delete it if it differs.

    Raises:
        PullError: it differs.
    """
    actual = sha256_of(partial)
    if actual != expected:
        partial.unlink()
        raise PullError(
            f"{origin}: the downloaded file's sha256 is {actual}, not {expected}: the download was deleted, "
            "nothing else was changed"
        )


def no_space(error: OSError, partial: Path, left_bytes: int) -> PullError:
    """Return the error for a disk that became full."""
    return PullError(
        f"{partial.parent}: {error.strerror}: {left_bytes / 2**20:,.0f} MiB are still to come; free some space and "
        "repeat the command, which resumes"
    )


def is_full(error: OSError) -> bool:
    """Return whether the error is a full disk, or a limit on files."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def locked(partial: Path) -> Iterator[None]:
    """Hold a lock on the part, which is created. The lock ends with the process.

    Raises:
        PullError: another process holds it.
    """
    with partial.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PullError(f"{partial}: another process is downloading this file; wait for it") from error
        yield
