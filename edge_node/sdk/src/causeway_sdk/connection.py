"""The address of the device, the time limits of requests, and the translation of the HTTP library's errors."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import httpx

from .errors import CausewayAPIError, CausewayConnectionBroken, CausewayError, CausewayTimeout, CausewayUnreachable

DEFAULT_URL = "http://127.0.0.1:8080"
GRACE_S = 1.0  # grace period past a deadline: the device's own error is more specific
_POLL_S, _MAX_POLL_S = 0.1, 2.0  # interval of checking a job
_RETRIED_STATUSES = frozenset({429, 503})

HTTP_ERRORS = (httpx.HTTPError, ssl.SSLError)
"""Errors of a request. httpx does not translate TLS's alerts that come after the handshake, as a missing certificate's
does with TLS 1.3.
"""
Sleep = Callable[[float], None]
AsyncSleep = Callable[[float], Awaitable[None]]
sleep_for: Sleep = time.sleep
async_sleep: AsyncSleep = asyncio.sleep


@dataclass(frozen=True, repr=False)
class Address:
    """A device's URL or Unix socket (`uds`), with the headers and timeouts of every request to it."""

    url: str
    uds: str | None
    headers: Mapping[str, str]
    connect_timeout_s: float
    timeout_s: float

    def timeout(self, left_s: float | None) -> httpx.Timeout:
        """Return the timeouts of a request. `left_s`: seconds until its deadline; None: use the client's own
        timeout.
        """
        wait_s = self.timeout_s if left_s is None else left_s + GRACE_S
        return httpx.Timeout(wait_s, connect=min(self.connect_timeout_s, wait_s))

    def certificates(self) -> bool | ssl.SSLContext:
        """Return httpx's `verify`. Plain HTTP loads no certificates, which takes 20 ms, and so trusts none.

        $CAUSEWAY_CA_FILE names the CAs of the device's certificate, $CAUSEWAY_CLIENT_CERT_FILE the client's certificate
        with its key.

        Raises:
            CausewayError: A file cannot be used.
        """
        if not self.url.startswith("https:"):
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ca_file = os.environ.get("CAUSEWAY_CA_FILE", "")
        own = os.environ.get("CAUSEWAY_CLIENT_CERT_FILE", "")
        if not (ca_file or own):
            return True
        try:
            context = ssl.create_default_context(cafile=ca_file or None)
            if own:
                context.load_cert_chain(own)
        except OSError as error:
            raise CausewayError(f"The certificates {ca_file} {own} cannot be used: {error}") from error
        return context

    def translate(self, error: httpx.HTTPError | ssl.SSLError) -> CausewayError:
        where = self.uds or self.url
        if isinstance(error, ssl.SSLError):
            return CausewayUnreachable(f"{where} refuses the TLS connection: {error.reason or error}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return CausewayUnreachable(f"Cannot reach {where}: {str(error) or 'timed out'}")
        if isinstance(error, httpx.TimeoutException):
            return CausewayTimeout(f"{where} did not answer in time.")
        return CausewayConnectionBroken(f"The connection to {where} broke: {str(error) or type(error).__name__}")


def resolve_address(url: str, api_key: str, connect_timeout_s: float, timeout_s: float) -> Address:
    """Return the address of `url`, else of $CAUSEWAY_URL, else of the default port of this machine.

    Raises:
        CausewayError: The URL or the key is malformed.
    """
    url = url or os.environ.get("CAUSEWAY_URL", "") or DEFAULT_URL
    api_key = api_key or os.environ.get("CAUSEWAY_API_KEY", "")
    if not (api_key.isascii() and api_key.isprintable()):
        raise CausewayError("The API key has a line break or another character that a header cannot carry.")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    if url.startswith("unix://"):
        uds = url.removeprefix("unix://")
        if not uds:
            raise _malformed(url)
        return Address("http://causeway", uds, headers, connect_timeout_s, timeout_s)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        raise _malformed(url) from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise _malformed(url)
    url = url.rstrip("/").removesuffix("/v1")  # the base_url of an OpenAI client is accepted, too
    return Address(url, None, headers, connect_timeout_s, timeout_s)


def _malformed(url: str) -> CausewayError:
    return CausewayError(
        f"{url!r} is not the URL of a device: use http://HOST:PORT, https://… or unix:///path/to.sock."
    )


def is_away(error: CausewayError) -> bool:
    """Return whether the device is temporarily unavailable, as during a restart."""
    if isinstance(error, CausewayAPIError):
        return error.status in _RETRIED_STATUSES
    return isinstance(error, (CausewayUnreachable, CausewayConnectionBroken))


class Deadline:
    """The remaining time of one request. Without a `deadline_s` it never passes."""

    def __init__(self, deadline_s: float | None, clock: Callable[[], float]) -> None:
        self.started = clock()
        self._clock = clock
        self._deadline_s = deadline_s
        self._pause_s = _POLL_S

    def left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - (self._clock() - self.started))

    def pause_s(self, left: str) -> float:
        """Return the seconds until the next check of jobs, which grow until `restart`.

        Raises:
            CausewayTimeout: The deadline has passed, and `left` has not ended.
        """
        left_s, pause_s = self.left_s(), self._pause_s
        if left_s is not None and left_s <= 0.0:
            raise CausewayTimeout(f"{left} have not ended in time.")
        self._pause_s = min(_MAX_POLL_S, pause_s * 1.5)
        return pause_s if left_s is None else min(pause_s, left_s)

    def restart(self) -> None:
        """Check again soon, because a job has ended and others may follow."""
        self._pause_s = _POLL_S

    def check(self) -> None:
        """Raise CausewayTimeout if the deadline and its grace period have passed."""
        if self._deadline_s is not None and self._clock() - self.started > self._deadline_s + GRACE_S:
            raise CausewayTimeout(f"The answer took longer than its deadline of {self._deadline_s:g} s.")


def retry_pause_s(error: CausewayAPIError, attempts: int, retries: int, left_s: float | None) -> float | None:
    """Return the seconds to wait before the next attempt; None for no further attempt.

    A request is retried only after a 429 or 503 with Retry-After, and only if the pause fits into the deadline.
    """
    if attempts >= retries or error.status not in _RETRIED_STATUSES or error.retry_after_s is None:
        return None
    return error.retry_after_s if left_s is None or error.retry_after_s < left_s else None
