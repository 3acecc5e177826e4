"""Certificates of peers, which the handshake has verified."""

from __future__ import annotations

import asyncio
import re
import ssl

import msgspec

_SPIFFE_ID = re.compile(r"spiffe://[^/]+/tenant/([^/]+)/device/([^/]+)")


class PeerCertificate(msgspec.Struct, frozen=True):
    """A verified certificate of a peer.

    Attributes:
        organization, common_name: Of its subject; "" for none.
        begins, ends: Its validity, Unix seconds.
    """

    uris: tuple[str, ...]  # its names of the kind URI, such as a SPIFFE ID
    organization: str
    common_name: str
    serial: str  # serial number, in hex
    begins: float
    ends: float

    @property
    def holder(self) -> tuple[str, str]:
        """Tenant and device: those of the SPIFFE ID `spiffe://FLEET/tenant/TENANT/device/DEVICE` if there is one, else
        organization and common name. "" for what is missing.
        """
        found = next(filter(None, map(_SPIFFE_ID.fullmatch, self.uris)), None)
        return (self.organization, self.common_name) if found is None else (found[1], found[2])

    @property
    def name(self) -> str:
        """The device, or what else tells its holder from others."""
        return self.holder[1] or next(iter(self.uris), "") or self.serial


def spiffe_id(fleet: str, tenant: str, device: str) -> str:
    """Return the name of a fleet's device in its certificate."""
    return f"spiffe://{fleet.lower()}/tenant/{tenant}/device/{device}"


def peer_certificate(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    """Return the verified certificate of the peer of a connection; None if it did not have to send one."""
    found = transport.get_extra_info("peercert")
    if not found:
        return None
    subject = {name: value for part in found.get("subject", ()) for name, value in part}
    return PeerCertificate(
        uris=tuple(value for kind, value in found.get("subjectAltName", ()) if kind == "URI"),
        organization=subject.get("organizationName", ""),
        common_name=subject.get("commonName", ""),
        serial=found["serialNumber"],
        begins=ssl.cert_time_to_seconds(found["notBefore"]),
        ends=ssl.cert_time_to_seconds(found["notAfter"]),
    )
