"""Download one file over HTTP with huggingface_hub: resumed, checked, with progress.

`huggingface_hub.hf_hub_download` starts again from nothing after its process ended, so the parts of the library under
it are used: `http_get`, which resumes and retries, and its HTTP client with the owner's proxy settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import get_session

from .plan import PullError, RemoteFile, check_sha256, is_full, locked, no_space, partial_of

_PEEK_BYTES = 256 * 1024
_CHUNK_BYTES = 256 * 1024
_PEEK_TIMEOUT_S = 20.0
_IDENTITY = {"Accept-Encoding": "identity"}


def peek(url: str, headers: Mapping[str, str], sha256: str = "") -> tuple[RemoteFile, bytes]:
    """Read a file's size and first bytes, without downloading it.

    Raises:
        PullError: the server does not answer, refuses, or names no size.
    """
    wanted = {**headers, **_IDENTITY, "Range": f"bytes=0-{_PEEK_BYTES - 1}"}
    try:
        with get_session().stream("GET", url, headers=wanted, timeout=_PEEK_TIMEOUT_S) as response:
            response.raise_for_status()
            first = bytearray()
            for block in response.iter_raw(16 * 1024):
                first += block
                if len(first) >= _PEEK_BYTES:
                    break
            total = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get(
                "Content-Length", ""
            )
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise PullError(f"{url}: {_reason(error)}") from error
    if not total.isdigit():
        raise PullError(f"{url}: the server does not say how large the file is")
    return RemoteFile(url, int(total), sha256, ""), bytes(first[:_PEEK_BYTES])


def download(url: str, target: Path, remote: RemoteFile, headers: Mapping[str, str]) -> None:
    """Download a file to `target`. What an earlier call has left in ``target.partial`` is kept and completed.

    Raises:
        PullError: the download ended early (the part is kept), the disk is full (likewise), another process downloads
            the same file, or the checksum is wrong (the part is deleted).
    """
    partial = partial_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(partial):
        done = partial.stat().st_size
        if done > remote.size_bytes:
            partial.write_bytes(b"")
            done = 0
        _fetch(url, partial, done, remote, headers)
        check_sha256(partial, remote.sha256, url)
        partial.replace(target)


def _fetch(url: str, partial: Path, done: int, remote: RemoteFile, headers: Mapping[str, str]) -> None:
    try:
        with partial.open("ab") as file:
            # The library writes whole chunks only: of a line that breaks within its 10 MB nothing would be kept.
            constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
            http_get(
                url,
                file,
                resume_size=done,
                headers={**headers, **_IDENTITY},
                expected_size=remote.size_bytes,
                displayed_filename=Path(remote.name).name,
            )
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise _interrupted(url, partial, remote, _reason(error)) from error
    except OSError as error:
        left = remote.size_bytes - partial.stat().st_size
        if is_full(error):
            raise no_space(error, partial, left) from error
        raise _interrupted(url, partial, remote, str(error).partition("\n")[0]) from error


def _interrupted(url: str, partial: Path, remote: RemoteFile, reason: str) -> PullError:
    done = partial.stat().st_size / 2**20
    return PullError(
        f"{url}: {reason}; {done:,.0f} of {remote.size_bytes / 2**20:,.0f} MiB are here: repeat the command to resume"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, (httpx2.HTTPStatusError, HfHubHTTPError)) and error.response is not None:
        return f"the server answers with HTTP {error.response.status_code}"
    return f"the server cannot be reached or does not answer ({str(error) or type(error).__name__})"
