"""Where a tier's endpoints are, as the configuration writes it.

host:port            one Triton, its gRPC port
dns:name:port        every address of the name, asked again every so often
…@zone               either of them, and the zone that it stands in
"""

from __future__ import annotations

import re

import msgspec

from router.errors import ConfigError

_FORM = re.compile(r"(?P<dns>dns:)?(?P<host>[^:/@\s\[\]]+|\[[0-9a-fA-F:.]+\]):(?P<port>\d{1,5})(?:@(?P<zone>[^@\s]+))?")


class EndpointAddress(msgspec.Struct, frozen=True):
    host: str  # an IPv6 address keeps its brackets
    port: int
    zone: str = ""
    is_dns: bool = False

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoint_address(text: str, where: str = "") -> EndpointAddress:
    """Raises ConfigError."""
    found = _FORM.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise ConfigError(f"{text!r} is not host:port, dns:name:port or one of them with @zone", where=where)
    if found["dns"] and found["host"].startswith("["):
        raise ConfigError(f"{text!r}: an address needs no DNS, leave `dns:` away", where=where)
    return EndpointAddress(found["host"], int(found["port"]), found["zone"] or "", bool(found["dns"]))
