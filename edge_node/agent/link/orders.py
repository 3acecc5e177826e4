"""Orders of the fleet's operators to erase what this device stores.

1. The signature is of a key that the fleet's artifacts, which this device has verified, name for the role rollout.
2. The order is for this device, and newer than any that it has carried out: none is repeated.
3. The receipt is on the disk before it is sent, and is sent again until the control plane has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from causeway_server.router.bundle.protocol import ErasureDone, ErasureOrder, SignedOrder

from .identity import write_synced

_DONE: Final = "erased.json"
_TARGETS: Final = ("tuf", "targets.json")
Erase = Callable[[str], Awaitable[str]]
"""Erases what is stored of a client ("": of all), and returns the receipt as a compact JWS."""


class OrderRefused(Exception):
    """The order is not signed by this fleet, or not for this device."""


class _Done(msgspec.Struct, frozen=True):
    order: str
    at: float
    receipt: str


async def carry_out(folder: Path, signed: SignedOrder, device: str, erase: Erase) -> ErasureDone | None:
    """Carry out an order in `folder`, STATE_DIR/fleet. Return what to send; None for one before the last. Raises
    OrderRefused, OSError, or as `erase`.
    """
    order = _verified(folder, signed, device)  # (1)
    try:
        done = msgspec.json.decode((folder / _DONE).read_bytes(), type=_Done)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        done = _Done("", 0.0, "")
    if order.at > done.at:  # (2)
        done = _Done(order.id, order.at, await erase(order.client))
        write_synced(folder / _DONE, msgspec.json.encode(done))  # (3)
    return ErasureDone(device=device, order=done.order, receipt=done.receipt) if done.order == order.id else None


def _verified(folder: Path, signed: SignedOrder, device: str) -> ErasureOrder:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        delegations: Any = msgspec.json.decode(folder.joinpath(*_TARGETS).read_bytes())["signed"]["delegations"]
        keys = [key for role in delegations["roles"] if role["name"] == "rollout" for key in role["keyids"]]
        if signed.key not in keys:
            raise OrderRefused(
                f"The key {signed.key[:16]}, which signed the order, is not a key of the fleet's role rollout."
            )
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(delegations["keys"][signed.key]["keyval"]["public"]))
        public.verify(bytes.fromhex(signed.signature), signed.order.encode())
        order = msgspec.json.decode(signed.order, type=ErasureOrder)
    except (FileNotFoundError, KeyError, ValueError, TypeError, InvalidSignature) as error:
        raise OrderRefused(f"The signature of the order cannot be verified: {type(error).__name__}.") from error
    if order.device != device:
        raise OrderRefused(f"The order is for the device {order.device}.")
    return order
