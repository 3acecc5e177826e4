"""The sources of `causeway-models pull`."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import msgspec

from ..catalog.artifact import ArtifactError

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
