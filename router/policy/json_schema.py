"""The JSON schema of policy files, for editors: made from the same structs that read them."""

from __future__ import annotations

import msgspec

from .file import PolicyDoc

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def policy_schema() -> bytes:
    """JSON text, indented, ending in a newline. What it refuses the daemon refuses; the daemon checks more."""
    schema = {"$schema": _DIALECT, "title": "Causeway policy", **msgspec.json.schema(PolicyDoc)}
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2) + b"\n"
