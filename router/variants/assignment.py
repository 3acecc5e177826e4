"""Assignment of requests to variants: by a digest of what stays with one model, so that shares are nested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

from ..types import Request
from .settings import Sticky, VariantConfig
from .verdict import Tally

_WHOLE: Final = 1 << 64


def unit_of(request: Request, sticky: Sticky, device: str) -> str:
    """Return what stays with one model: the unit of this kind. `device`: this device's name; "" at a gateway, where it
    is the client (`hints.client`).
    """
    client = request.hints.client
    if sticky == "device":
        return device or client
    if sticky == "user":
        return f"{client}\0{request.user or ''}"
    if request.kind == "chat":
        first = next((message.content for message in request.messages if message.role == "user"), "")
        return f"{client}\0{first!r}"
    return f"{client}\0{request.prompts[:1]!r}"


def assign(place: str, unit: str, variants: Sequence[VariantConfig], share_of: Callable[[VariantConfig], float]) -> str:
    """Return the model of the variant that answers a unit (`unit_of`); "" for that of the target or tier `place`
    itself. Each variant has an order of units: a larger share (`share_of`, percent) includes the units of a smaller
    one. The first variant of the list whose share includes the unit answers it.
    """
    for variant in variants:
        share = share_of(variant)
        if share > 0 and _position(f"{place}\0{variant.model}\0{unit}") < share / 100 * _WHOLE:
            return variant.model
    return ""


def group_of(unit: str) -> int:
    """Return the group of a unit in a `Tally`, which does not depend on its variant."""
    return _position(f"group\0{unit}") % Tally.GROUPS


def _position(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
