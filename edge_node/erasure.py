"""`DELETE /v1/me/data`: the erasure of what this device stores of a client, with a signed receipt.

1. Jobs come first: they end, so that they write nothing into the other stores.
2. A second pass finds what requests in progress have stored during the first one. An erasure can be repeated.
3. The receipt counts what was erased and names what is left. It is signed with the device's key in its fleet, else with
   a key that is derived from the key of the state folder: JWS (RFC 7515) with the public key in its header.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from causeway_server.router.bundle.protocol import base64url
from causeway_server.router.errors import InvalidRequest, PermissionDenied
from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response

from .daemon.components import Components
from .storage.state_folder import FLEET_FOLDER

if TYPE_CHECKING:
    from .agent.link.identity import DeviceKey

PATH: Final = "/v1/me/data"
_LEFT: Final = {
    "requests in progress": "what they store later: erase again",
    "egress ledger, shadow answers": "they name no client and have no content",
    "records that were sent to the fleet": "they name no client and have no content",
    "sums of spending": "by day and keyed digest of the client, so that an erasure resets no budget",
    "system prompts": "they are of no single client; `engine.stored_prompts_bytes: 0` removes them",
    "logs and traces": "ids and times, no content: they expire as you rotate them",
    "unreadable files": "until they expire (`files.ttl_s`): their owner cannot be read",
    "blocks that a flash disk keeps, and backups": "encrypted, until `causeway-edge rotate-key` and their own end",
    "clouds and brokers": "erase there, at a gateway with `causeway-cloud erase`",
}


class ErasureReceipt(msgspec.Struct, frozen=True):
    """The receipt of an erasure.

    Attributes:
        client: The client; "": all of them.
        device: The device's name in its fleet; "" without one.
        started: UTC.
        finished: UTC.
        erased: Number of erased items by kind.
        left: Kinds of data that are not erased, with the reason.
    """

    client: str
    device: str
    started: str
    finished: str
    erased: Mapping[str, int]
    left: Mapping[str, str]


class SignedErasure(msgspec.Struct, frozen=True):
    """The answer of an erasure. `jws`: the same receipt, signed (compact JWS, EdDSA)."""

    receipt: ErasureReceipt
    jws: str


class ErasureApi:
    """The handler of the path."""

    def __init__(self, parts: Components, folder: Path | None) -> None:
        self._parts = parts
        self._folder = folder

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {PATH: ("DELETE", self._erase)}

    async def _erase(self, http: AiohttpRequest) -> ServerResponse:
        caller = self._parts.reader.caller(http)
        client = http.query.get("client", caller.name)
        if not client:  # it would be all of them
            raise InvalidRequest(
                "`client` is empty. Name a client, or leave `client` out to erase your own data.", param="client"
            )
        if client != caller.name and not caller.erases_all:
            raise PermissionDenied(
                f"The API key of {caller.name!r} erases only its own data. To erase the data of {client[:64]!r}, add "
                "`rights: [erasure]` to this key in server.keys."
            )
        return json_response(await self.erase(client))

    async def for_fleet(self, client: str) -> str:
        """Carry out an order of the fleet, and return the signed receipt. Raises like `erase`."""
        return (await self.erase(client)).jws

    async def erase(self, client: str) -> SignedErasure:
        """Erase what is stored of a client ("": of all). Raises like `_pass`."""
        started, erased = self._now(), Counter[str]()
        for _ in range(2):
            await self._pass(client, erased)
        key, device = await asyncio.to_thread(self._signer)
        return sign(ErasureReceipt(client, device, started, self._now(), erased, _LEFT), key)

    async def _pass(self, client: str, erased: Counter[str]) -> None:
        """Erase what is found, and count it. Raises JobStoreUnavailable, FileFolderUnavailable or OSError."""
        parts = self._parts
        jobs, secrets = await parts.jobs.erase(client)
        erased.update(jobs=jobs, webhook_secrets=secrets)
        parts.reader.forget()
        erased["cached_answers"] += await parts.cache.erase(client)
        parts.service.sources.semantic.clear()
        if parts.encoders is not None:
            parts.encoders.forget()
        erased["files"] += await parts.files.erase(client)
        erased["responses"] += await parts.response_store.erase(client)
        erased["sessions"] += await parts.service.sessions.store.erase(client)
        erased["decisions"] += await parts.decisions.erase(client)
        if parts.fleet is not None:
            erased["unsent_records"] += parts.fleet.records.forget(client)
            erased["unsent_records"] += await parts.fleet.telemetry.forget_records()

    def _now(self) -> str:
        return datetime.fromtimestamp(self._parts.clock.unix(), UTC).isoformat(timespec="milliseconds")

    def _signer(self) -> tuple[DeviceKey, str]:
        """Return the key that signs, and the device's name. Raises ConfigError or OSError."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        from .agent.link.identity import DeviceKey, open_key, read_identity

        if self._folder is None or self._parts.keys is None:
            return DeviceKey(Ed25519PrivateKey.generate()), ""
        if (identity := read_identity(self._folder / FLEET_FOLDER)) is not None:
            return open_key(self._folder / FLEET_FOLDER), identity.device
        return DeviceKey(Ed25519PrivateKey.from_private_bytes(self._parts.keys.derive("receipts"))), ""


def sign(receipt: ErasureReceipt, key: DeviceKey) -> SignedErasure:
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": key.public}
    header = {"alg": "EdDSA", "typ": "causeway-erasure", "jwk": jwk}
    signed = ".".join(base64url(msgspec.json.encode(part)) for part in (header, receipt))
    return SignedErasure(receipt, f"{signed}.{key.sign(signed.encode())}")
