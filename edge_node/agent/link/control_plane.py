"""The HTTP client of the control plane: a method for each message of `router.bundle.protocol`, and the published files.

Redirects are not followed, and proxies of the environment are ignored: a device communicates only with the host that it
joined.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from causeway_server.router.api.document import ErrorDocument
from causeway_server.router.bundle.protocol import (
    MAC_HEADER,
    MAX_MESSAGE_BYTES,
    SIGNATURE_HEADER,
    Enrolment,
    EnrolmentRequest,
    ErasureDone,
    IssuedToken,
    ReportKey,
    StatusReply,
    StatusReport,
    Telemetry,
    TokenRequest,
    mac_header,
    signed_bytes,
)
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls
from causeway_server.router.web_origins import is_loopback

_CONNECT_S = 10.0
_ANSWER_S = 30.0
_CHUNK_GAP_S = 60.0  # between two chunks of a file; the downloads have additional limits
_MAX_ANSWER_BYTES = 4 * 1024 * 1024  # an Enrolment contains the root metadata
_OTHER_KEY = ("signature_invalid", "token_expired")  # status codes such as those of a control plane with a new key
_T = TypeVar("_T")
_Headers = Callable[[str, bytes], dict[str, str]]


class FleetError(Exception):
    """A request to the control plane failed."""


class FleetUnreachable(FleetError):
    """The control plane did not answer, or asked for a pause."""


class FleetRefused(FleetError):
    """The control plane refuses this message permanently, so it is not repeated. `code`: the reason, such as
    `device_revoked`; `now`: the control plane's clock, Unix seconds; None without a `Date` header.
    """

    def __init__(self, code: str, message: str, now: float | None = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.now = now


class Wake(msgspec.Struct, frozen=True):
    """The response to a long poll."""

    etag: str
    changed: bool


class ControlPlane:
    """The client, which connects on first use; `close` it. `report_key` authenticates reports and telemetry; without it
    the device key (`sign`, None before the enrolment) signs them. `ca_file`: PEM of the trusted authorities; "" for the
    system's. Raises ConfigError if that or the URL cannot be used.
    """

    def __init__(self, url: str, ca_file: str = "", sign: Callable[[bytes], str] | None = None) -> None:
        self._url = checked_url(url)
        self._sign = sign
        self._tls = tls_context(ca_file)
        self._session: aiohttp.ClientSession | None = None
        self.report_key: ReportKey | None = None

    @property
    def name(self) -> str:
        """The control plane's address for messages."""
        return f"The control plane at {urlsplit(self._url).netloc}"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def enroll(self, request: EnrolmentRequest) -> Enrolment:
        """Ask for an identity. Raises FleetError."""
        return await self._post("/v1/enroll", request, Enrolment)

    async def token(self, request: TokenRequest) -> IssuedToken:
        """Ask for a token. Raises FleetError."""
        return await self._post("/v1/token", request, IssuedToken, self._signature)

    async def status(self, report: StatusReport) -> StatusReply:
        """Report the device's state. Raises FleetError."""
        return await self._report("/v1/status", report, StatusReply)

    async def telemetry(self, telemetry: Telemetry) -> None:
        """Send counts of the device's requests. Raises FleetError."""
        await self._report("/v1/telemetry", telemetry, None)

    async def erased(self, done: ErasureDone) -> None:
        """Send the receipt of an ordered erasure. Raises FleetError."""
        await self._report("/v1/erasures", done, None)

    async def wake(self, etag: str, wait_s: float, token: str) -> Wake:
        """Wait until there may be an update, for at most `wait_s`. Raises FleetError."""
        headers = {"Authorization": f"Bearer {token}"}
        if etag:
            headers["If-None-Match"] = etag
        path = f"/v1/wake?wait={wait_s:.0f}"
        async with (
            self._exchange(wait_s + _ANSWER_S),
            self._open().get(self._url + path, headers=headers, allow_redirects=False) as response,
        ):
            if response.status not in (200, 304):
                raise await self._failure(response)
            return Wake(response.headers.get("ETag", etag), response.status == 200)

    async def fetch(self, path: str, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yield a published file from `offset` on, such as ``tuf/metadata/timestamp.json`` or ``blobs/SHA256``. Raises
        FileNotFoundError; OSError if the control plane does not answer, or the transfer breaks off.
        """
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_CHUNK_GAP_S)
        try:
            async with self._open().get(
                f"{self._url}/{path}", headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status in (404, 410):
                    raise FileNotFoundError(f"{self.name} has no {path}.")
                if response.status == 416 and offset:
                    return  # the offset is the end of the file
                if response.status not in (200, 206):
                    raise OSError(f"{self.name} answered the request to {path} with HTTP {response.status}.")
                # a server without range requests sends the whole file
                skipped = 0 if response.status == 206 else offset
                async for chunk in response.content.iter_any():
                    passed = min(skipped, len(chunk))
                    skipped -= passed
                    if passed < len(chunk):
                        yield chunk[passed:] if passed else chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{self.name}: {_words(error)}") from error

    async def _report(self, path: str, message: msgspec.Struct, kind: type[_T] | None) -> _T:
        """Post a message with the report key; sign it if there is no key, or if the key is refused."""
        if self.report_key is not None:
            try:
                return await self._post(path, message, kind, self._mac)
            except FleetRefused as error:
                if error.code not in _OTHER_KEY:
                    raise
                self.report_key = None
        return await self._post(path, message, kind, self._signature)

    def _mac(self, path: str, body: bytes) -> dict[str, str]:
        assert self.report_key is not None
        return {MAC_HEADER: mac_header(self.report_key, path, body)}

    def _signature(self, path: str, body: bytes) -> dict[str, str]:
        assert self._sign is not None, "enrolled devices have a key"
        return {SIGNATURE_HEADER: self._sign(signed_bytes(path, body))}

    async def _post(
        self, path: str, message: msgspec.Struct, kind: type[_T] | None, proof: _Headers | None = None
    ) -> _T:
        """Send a message; return its reply, None if `kind` is None. `proof` makes the sender's headers."""
        body = msgspec.json.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise FleetRefused("message_too_large", f"The message to {path} has {len(body)} bytes, which is too many.")
        headers = {"Content-Type": "application/json"}
        if proof is not None:
            headers |= proof(path, body)
        async with (
            self._exchange(_ANSWER_S),
            self._open().post(self._url + path, data=body, headers=headers, allow_redirects=False) as response,
        ):
            if response.status not in (200, 201, 204):
                raise await self._failure(response)
            content = await _read(response)
        if kind is None:
            return None  # type: ignore[return-value]  # the caller's _T is None
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FleetUnreachable(f"{self.name} sent a malformed answer to {path}: {error}") from error

    @asynccontextmanager
    async def _exchange(self, seconds: float) -> AsyncIterator[None]:
        """Limit the duration of one exchange and translate its errors."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            raise FleetUnreachable(f"{self.name} does not answer in time.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise FleetUnreachable(f"{self.name} cannot be reached: {_words(error)}") from error

    async def _failure(self, response: aiohttp.ClientResponse) -> FleetError:
        """Return the error of a response: 4xx except 408, 425 and 429 is permanent, everything else is temporary."""
        try:
            fault = msgspec.json.decode(await _read(response), type=ErrorDocument).error
            code, text = fault.code, fault.message[:1000]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, aiohttp.ClientError):
            code, text = "", ""
        message = f"{self.name}: {text or f'HTTP {response.status}'}"
        if 400 <= response.status < 500 and response.status not in (408, 425, 429):
            return FleetRefused(code or f"http_{response.status}", message, _date(response.headers))
        return FleetUnreachable(message)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=8),
                headers={"User-Agent": "causeway-edge"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                trust_env=False,
            )
        return self._session


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            raise aiohttp.ClientPayloadError(f"The answer has more than {_MAX_ANSWER_BYTES} bytes.")
    return bytes(body)


def _date(headers: Mapping[str, str]) -> float | None:
    try:
        return parsedate_to_datetime(headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return None


def _words(error: BaseException) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return str(cause) or type(cause).__name__


def checked_url(url: str) -> str:
    """Return the URL without a trailing slash. Raise ConfigError unless it is https or loopback: it gets tokens."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"The URL of the fleet must be like https://fleet.example, not {url!r}.", where="fleet URL")
    if not carries_secrets(url):
        raise ConfigError(
            "Tokens over plain HTTP could be stolen; use https, for example https://fleet.example.", where="fleet URL"
        )
    return url.rstrip("/")


def carries_secrets(url: str) -> bool:
    """Return whether a token may be sent to a URL: only over https, or to loopback."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        return True
    return is_loopback(parts.hostname or "")


def tls_context(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    return client_tls(TlsFiles(where="fleet", ca_file=ca_file))
