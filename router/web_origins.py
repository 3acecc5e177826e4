"""Protection of listeners against web pages: DNS rebinding, cross-site requests, and CORS. A browser sends requests of
any page to any address, this machine's included. For each request:

1. Host: a page can point its own name at this machine (DNS rebinding) and is then same-origin. Its requests have that
   name in `Host`, so a listener without keys accepts only loopback names, its own address and configured names.
2. A request that changes nothing (GET, HEAD, OPTIONS) is answered, as the browser hides the answer from a foreign page.
3. Any other request of a foreign page, and the handshake of a WebSocket, is refused. A foreign page is recognised by
   `Sec-Fetch-Site`, or, in browsers without it, by comparing `Origin` with `Host`. A client without both headers is not
   a browser. `same-site` is foreign, too, since it includes other ports of this machine. This is the algorithm of Go's
   `http.CrossOriginProtection`.
4. Pages of allowed origins are answered by the rules of CORS, preflights included
   (https://fetch.spec.whatwg.org/#http-cors-protocol).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final
from urllib.parse import urlsplit

from msgspec import Meta

from .errors import MisdirectedRequest, OriginNotAllowed

Origin = Annotated[str, Meta(pattern=r"^(null|file://|[a-z][a-z0-9+.-]*://[^/\\\s?#@*,]+)$")]
"""An origin as browsers send it: scheme, host and port without a path; `null` or `file://` of embedded web views."""
HostName = Annotated[str, Meta(pattern=r"^([A-Za-z0-9._-]+|[0-9a-fA-F:.]+)$")]
"""A DNS name or an IP address, without a port."""

_HARMLESS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_MAX_AGE_S: Final = 600
_MAX_KNOWN: Final = 64
_METHODS: Final = "GET, HEAD, POST, PUT, DELETE"
_VARY: Final[Mapping[str, str]] = {"Vary": "Origin"}


class WebOrigins:
    """The rules of a listener; its methods take case-insensitive `headers`. `allowed`: origins, besides its own, whose
    pages may use it; `hosts`: names in `Host` besides loopback names; None: any; `key`: the configuration key of
    `allowed`.
    """

    def __init__(self, allowed: Iterable[str] = (), hosts: Iterable[str] | None = None, key: str = "") -> None:
        self._allowed = frozenset(origin.lower() for origin in allowed)
        self._vary: Mapping[str, str] = _VARY if self._allowed else {}
        self._hosts = None if hosts is None else _LOOPBACK | {host.lower() for host in hosts}
        self._known: set[str] = set()  # admitted values of `Host`, which nearly every request has
        self._advice = f"To allow it, add the origin to `{key}`." if key else "Send the request from a program."

    def admit(self, method: str, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return the CORS headers of the answer. Raises MisdirectedRequest if `Host` is not a name of this listener
        (1); OriginNotAllowed if a page of a foreign origin may not send this request (3).
        """
        host = headers.get("Host")  # None in HTTP/1.0, which browsers do not use
        if self._hosts is not None and host is not None and host not in self._known:
            self._check_host(host, self._hosts)
        origin = headers.get("Origin")
        site = headers.get("Sec-Fetch-Site")
        if origin is not None and origin.lower() in self._allowed:
            return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": "*", **_VARY}
        if origin is None and site is None:  # not a browser, or a page that only reads
            return self._vary
        changes = method not in _HARMLESS or "Upgrade" in headers
        if changes and _is_foreign(origin, site, host or ""):
            page = "of another site" if origin is None else f"of the origin {origin[:200]!r}"
            raise OriginNotAllowed(f"A web page {page} may not send this request. {self._advice}")
        return self._vary

    def preflight(self, method: str, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the further headers of an allowed preflight's answer (204); None for another request."""
        if method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
            return None
        if headers.get("Origin", "").lower() not in self._allowed:
            return None
        answer = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_MAX_AGE_S)}
        if names := headers.get("Access-Control-Request-Headers"):
            answer["Access-Control-Allow-Headers"] = names  # SDKs send many of their own; the origin is trusted
        if headers.get("Access-Control-Request-Private-Network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        return answer

    def _check_host(self, host: str, hosts: Collection[str]) -> None:
        """Check the header `Host`. Raises MisdirectedRequest."""
        name = _name_of(host)
        if name not in hosts and not is_local_name(name):
            raise MisdirectedRequest(
                f"This server does not answer to the name {host[:200]!r}. Call the server as `localhost`, or add the "
                "name to `server.hosts`."
            )
        if len(self._known) < _MAX_KNOWN:
            self._known.add(host)


def listener_hosts(bound: str, named: Iterable[str], *, needs_key: bool) -> tuple[str, ...] | None:
    """Return `hosts` for a listener at the address `bound`, with the names that its configuration adds; None if each
    request needs a key or token, or if other machines may connect.
    """
    return None if needs_key or not is_local_name(bound.lower()) else (bound, *named)


def is_loopback(host: str) -> bool:
    """Return whether only this machine's programs reach `host`; False for unknown names and "" (all)."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_local_name(name: str) -> bool:
    """Return whether a lower-case name or address without brackets is this machine's, as is `*.localhost`: no public
    name is below it, and resolvers keep it on loopback (RFC 6761, 6.3).
    """
    return name.endswith(".localhost") or is_loopback(name)


def _name_of(host: str) -> str:
    """Return the lower-case name of a `Host` header, without port, brackets and trailing dot."""
    name = host.strip().lower()
    if name.startswith("["):
        address, closed, _ = name[1:].partition("]")
        return address if closed else name
    return name.partition(":")[0].removesuffix(".")


def _is_foreign(origin: str | None, site: str | None, host: str) -> bool:
    if site is not None:
        return site.strip().lower() not in ("same-origin", "none")
    if origin is None:
        return False
    try:
        return urlsplit(origin.lower()).netloc != host.strip().lower()
    except ValueError:
        return True
