"""Repositories on the hub: the list of a repository's GGUF files, and the download into huggingface_hub's cache.

The owner's settings for huggingface_hub apply: HF_ENDPOINT (a mirror), HF_HOME, HF_HUB_CACHE, HF_TOKEN or `hf auth
login`, HF_HUB_OFFLINE.

A file is downloaded over HTTP: resumed, checked, with progress. `huggingface_hub.hf_hub_download` starts from the
beginning after its process ended, so the functions below it are used: `http_get`, which resumes and retries, and its
HTTP client with the owner's proxy settings.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

import httpx2
import msgspec
from huggingface_hub import HfApi, ModelCardData, constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session

from ..catalog.artifact import sha256_of
from .plan import HubSource, PullError, RemoteFile, check_sha256, is_full, locked, no_space, partial_of

_PEEK_BYTES = 256 * 1024
_CHUNK_BYTES = 256 * 1024
_PEEK_TIMEOUT_S = 20.0
_IDENTITY = {"Accept-Encoding": "identity"}
_TIMEOUT_S = 20.0
_PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q5_K_M", "Q8_0")  # if the owner names none
_PREFERRED_MMPROJ = ("F16", "Q8_0", "BF16", "F32")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def peek(url: str, headers: Mapping[str, str], sha256: str = "") -> tuple[RemoteFile, bytes]:
    """Read a file's size and first bytes, without downloading it. Raises PullError."""
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
    """Download a file to `target`. A part that an earlier call left in ``target.partial`` is completed.

    Raises PullError: on an early end or a full disk (the part is kept), another process's download, a wrong checksum
    (the part is deleted).
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
        f"{url}: {reason}; {done:,.0f} of {remote.size_bytes / 2**20:,.0f} MiB are downloaded: repeat "
        "the command to resume"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, (httpx2.HTTPStatusError, HfHubHTTPError)) and error.response is not None:
        return f"the server answers with HTTP {error.response.status_code}"
    return f"the server cannot be reached or does not answer ({str(error) or type(error).__name__})"


class HubListing(msgspec.Struct, frozen=True):
    """The GGUF files of a repository at one commit, largest first. `mmproj`: those that add image input."""

    repository: str
    commit: str
    files: tuple[RemoteFile, ...]
    mmproj: tuple[RemoteFile, ...] = ()


def list_files(source: HubSource) -> HubListing:
    """Ask the hub for the repository's GGUF files. Raises PullError, also without a usable one."""
    name = source.repository
    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=_TIMEOUT_S)
        if info.gated:  # its list of files is public, its files are not
            HfApi().auth_check(name)
    except GatedRepoError as error:
        raise PullError(
            f"hf:{name}: accept the model's licence at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise PullError(
            f"hf:{name}: {constants.ENDPOINT} has no such repository, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except OfflineModeIsEnabled as error:
        raise PullError(f"hf:{name}: HF_HUB_OFFLINE is set, so nothing is downloaded") from error
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"answers with HTTP {status}" if status else f"cannot be reached ({error})"
        raise PullError(f"hf:{name}: {constants.ENDPOINT} {reason}; set HF_ENDPOINT to use a mirror") from error
    licence = _licence(info.card_data)
    found = [
        RemoteFile(one.rfilename, one.lfs.size, one.lfs.sha256, licence)
        for one in info.siblings or ()
        if one.rfilename.endswith(".gguf") and one.lfs is not None
    ]
    found.sort(key=lambda file: -file.size_bytes)
    files = tuple(file for file in found if not _is_mmproj(file))
    if not files:
        raise PullError(f"hf:{name}: the repository has no GGUF file; look for one whose name ends in -GGUF")
    return HubListing(name, info.sha or "main", files, tuple(file for file in found if _is_mmproj(file)))


def choose(listing: HubListing, choice: str) -> RemoteFile:
    """Return the file that `choice` names: a file, a quantisation, or "" for the default.

    Raises PullError if none or several match, or it is one part of several.
    """
    whole = [file for file in listing.files if not _SPLIT.search(file.name)]
    if choice.endswith(".gguf"):
        matches = [file for file in listing.files if file.name == choice]
    elif choice:
        matches = [file for file in whole if quantisation(file.name) == choice.upper()]
    elif len(whole) == 1:
        matches = whole
    else:
        by_quantisation = {quantisation(file.name): file for file in whole}
        matches = [by_quantisation[one] for one in _PREFERRED if one in by_quantisation][:1]
    if len(matches) != 1:
        names = ", ".join(file.name for file in listing.files)
        fault = "several files match" if matches else f"no file matches {choice!r}" if choice else "name one of them"
        raise PullError(f"hf:{listing.repository}: {fault}; the files are: {names}")
    if _SPLIT.search(matches[0].name):
        raise PullError(
            f"hf:{listing.repository}:{matches[0].name}: a model in several files cannot be pulled; name a smaller "
            "quantisation, or merge the files with `llama-gguf-split --merge` and add the result"
        )
    return matches[0]


def choose_mmproj(listing: HubListing) -> RemoteFile:
    """Return the mmproj file of the default precision. Raises PullError for none, or several of no known precision."""
    if not listing.mmproj:
        raise PullError(
            f"hf:{listing.repository}: the repository has no mmproj file, so its model is not a vision model"
        )
    by_precision = {quantisation(file.name): file for file in listing.mmproj}
    matches = [by_precision[one] for one in _PREFERRED_MMPROJ if one in by_precision] or list(listing.mmproj)
    if len(listing.mmproj) > 1 and not set(by_precision) & set(_PREFERRED_MMPROJ):
        names = ", ".join(file.name for file in listing.mmproj)
        raise PullError(f"hf:{listing.repository}: several mmproj files ({names}): use `causeway-models add-mmproj`")
    return matches[0]


def _is_mmproj(file: RemoteFile) -> bool:
    return "mmproj" in Path(file.name).name.lower()


def quantisation(file_name: str) -> str:
    """Return the quantisation at the end of a file's name, such as Q4_K_M; empty if there is none."""
    found = re.search(r"[-._]((?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*))\.gguf$", Path(file_name).name, re.IGNORECASE)
    return found[1].upper() if found else ""


def first_bytes(listing: HubListing, file: RemoteFile) -> bytes:
    """Read the first bytes of a file on the hub. Raises PullError."""
    return peek(_url(listing, file), build_hf_headers())[1]


def present_bytes(listing: HubListing, file: RemoteFile) -> int:
    """Return how many bytes of the file the cache holds."""
    if _cached(listing, file) is not None:
        return file.size_bytes
    partial = partial_of(_blob(listing, file))
    return partial.stat().st_size if partial.exists() else 0


def cache_folder() -> Path:
    """Return huggingface_hub's cache folder."""
    return Path(constants.HF_HUB_CACHE)


def fetch(listing: HubListing, file: RemoteFile) -> Path:
    """Return the file's path in huggingface_hub's cache, after downloading what is missing. Raises PullError."""
    cached = _cached(listing, file)
    if cached is None:
        blob = _blob(listing, file)
        download(_url(listing, file), blob, file, build_hf_headers())
        cached = blob
        # The blob is there under its checksum: the library only makes the snapshot's link to it, for other programs.
        with contextlib.suppress(OSError):
            cached = Path(hf_hub_download(listing.repository, file.name, revision=listing.commit))
    if sha256_of(cached) != file.sha256:
        raise PullError(
            f"{cached}: the file differs from the hub's checksum {file.sha256}: delete the file and pull again"
        )
    return cached


def _cached(listing: HubListing, file: RemoteFile) -> Path | None:
    path = try_to_load_from_cache(listing.repository, file.name, revision=listing.commit)
    return Path(path) if isinstance(path, str) else None


def _blob(listing: HubListing, file: RemoteFile) -> Path:
    return cache_folder() / repo_folder_name(repo_id=listing.repository, repo_type="model") / "blobs" / file.sha256


def _url(listing: HubListing, file: RemoteFile) -> str:
    return hf_hub_url(listing.repository, file.name, revision=listing.commit)


def _licence(card: ModelCardData | None) -> str:
    """Return the licence that the model card names, with its link if it is a custom licence."""
    if card is None:
        return ""
    licence = card.license_name if card.license == "other" else card.license
    return " ".join(str(one) for one in (licence, card.license_link) if one)
