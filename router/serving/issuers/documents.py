"""The documents of an OpenID Connect issuer (OpenID Connect Discovery 1.0), bounded in bytes and time.

Each of them comes from the URL that was asked: redirects are not followed and proxies of the environment are ignored. A
document that says where another one is must name our issuer, and its URLs are https if the issuer's is.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final, Self, TypeVar

import anyio
import msgspec

from ...errors import ConfigError
from .config import check_url

if TYPE_CHECKING:  # imported for the first document
    import aiohttp

MAX_BYTES: Final = 256 * 1024
TIMEOUT_S: Final = 10.0
Document = TypeVar("Document")
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
"""Exceptions raised by a document that is malformed or nested too deeply."""


def unreachable() -> tuple[type[Exception], type[OSError], type[TimeoutError]]:
    """Return the exceptions raised if a server does not answer."""
    from aiohttp import ClientError

    return ClientError, OSError, TimeoutError


class DocumentsUnavailable(Exception):
    """An issuer does not answer, or its answer is invalid."""


class Discovery(msgspec.Struct, frozen=True):
    """An issuer's discovery document. Only sign-in needs both endpoints."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return a body of at most `max_bytes`. Raises ValueError for more, or as aiohttp does."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > max_bytes:
            raise ValueError(f"{response.url.path} has more than {max_bytes} bytes.")
    return bytes(body)


class IssuerDocuments:
    """Reads the documents of one issuer, a URL. `tls`: True: the system's CAs."""

    def __init__(self, issuer: str, tls: ssl.SSLContext | bool = True) -> None:
        self.issuer = issuer
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def discover(self) -> Discovery:
        """Return the discovery document. Raises DocumentsUnavailable."""
        url = self.issuer.rstrip("/") + "/.well-known/openid-configuration"
        found = await self.read(url, Discovery)
        if found.issuer != self.issuer:
            raise DocumentsUnavailable(f"{url} is the document of the issuer {found.issuer}, not of {self.issuer}.")
        try:
            for other in filter(None, (found.jwks_uri, found.token_endpoint)):
                check_url(other.partition("?")[0], url)
                if self.issuer.startswith("https:") and not other.startswith("https:"):
                    raise DocumentsUnavailable(f"{url} names {other}, which is not https.")
        except ConfigError as error:
            raise DocumentsUnavailable(f"{url} names a URL that cannot be used. {error.message}") from error
        return found

    async def keys(self) -> bytes:
        """Return the issuer's JWKS. Raises DocumentsUnavailable."""
        return bytes(await self.read((await self.discover()).jwks_uri, msgspec.Raw))

    async def read(self, url: str, kind: type[Document], form: dict[str, str] | None = None) -> Document:
        """Read a JSON document; with a `form`, the answer to its POST. Raises DocumentsUnavailable."""
        try:
            with anyio.fail_after(TIMEOUT_S):
                return msgspec.json.decode(await self._content(url, form), type=kind)
        except (*UNREADABLE, *unreachable()) as error:
            reason = str(error) or f"no answer within {TIMEOUT_S:g} s"
            raise DocumentsUnavailable(f"The issuer's answer at {url} is invalid: {reason}.") from error

    async def _content(self, url: str, form: dict[str, str] | None) -> bytes:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=self._tls), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        method, headers = "GET" if form is None else "POST", {"Accept-Encoding": "identity"}
        async with self._session.request(method, url, data=form, headers=headers, allow_redirects=False) as response:
            if response.status != 200 or "Content-Encoding" in response.headers:
                raise ValueError(
                    f"HTTP status {response.status}, content encoding: "
                    f"{response.headers.get('Content-Encoding', 'not encoded')}"
                )
            return await read_bounded(response, MAX_BYTES)
