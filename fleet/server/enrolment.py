"""Enrolment of devices: with a join token and the proof of a key, a device gets an identity."""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64decode
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from causeway_server.router.bundle.protocol import EnrolmentRequest, enrolment_proof
from causeway_server.router.errors import CausewayError

from ..repository.fleet_file import FleetDoc, cohort_of
from ..store.devices import Device, read_device
from ..store.enrolment import JoinToken, enrol, find_join_token
from .refusals import (
    DeviceNameTaken,
    DeviceRevoked,
    EnrolmentProofInvalid,
    JoinTokenExpired,
    JoinTokenUnknown,
    JoinTokenUsed,
    NoCohort,
)


def verified(public_key: str, signature: str, signed: bytes) -> bool:
    """Return whether an Ed25519 signature is valid; key and signature in base64url."""
    try:
        _key(public_key).verify(urlsafe_b64decode(signature + "=" * (-len(signature) % 4)), signed)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=20_000)
def _key(public_key: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(public_key + "="))


def check_proof(request: EnrolmentRequest) -> None:
    """Check that the device holds the key that it wants to enrol. Raises EnrolmentProofInvalid."""
    if not verified(request.public_key, request.proof, enrolment_proof(request.token, request.public_key)):
        raise EnrolmentProofInvalid("The proof is not a signature of the sent key over the join token.")


class Enrolling(msgspec.Struct, frozen=True):
    """Enrols devices. `handle` is the `work` of a `fleet.store.database.GroupCommit`. `clock`: Unix s.

    1. The device holds its key (`check_proof`); this is checked before its request waits for a transaction.
    2. This control plane issued the token. A device that repeats its request after a lost answer gets the same answer
       again, and the token loses only one use.
    3. The token is not expired and has a use left.
    4. The token's labels override those of the device. The cohort is the token's, or the first one that matches.
    5. The name is free.
    """

    fleet: FleetDoc
    clock: Callable[[], float]

    async def handle(
        self, connection: AsyncConnection, requests: Sequence[EnrolmentRequest]
    ) -> list[Device | CausewayError]:
        """Enrol devices in one transaction.

        If another process took a name or key meanwhile, it raises DeviceNameTaken for a single device, else
        IntegrityError: `GroupCommit` then handles each alone.
        """
        answers: dict[int, Device | CausewayError] = {}
        # Sorted by token, so that all processes lock in the same order and cannot deadlock.
        for index, request in sorted(enumerate(requests), key=lambda one: one[1].token):
            try:
                answers[index] = await self._enrol(connection, request)
            except CausewayError as error:
                answers[index] = error
            except IntegrityError as error:
                if len(requests) > 1:
                    raise
                raise DeviceNameTaken(_taken(request.name)) from error
        return [answers[index] for index in range(len(requests))]

    async def _enrol(self, connection: AsyncConnection, request: EnrolmentRequest) -> Device:
        """Enrol a device. Raises JoinTokenUnknown or DeviceRevoked (2), JoinTokenExpired or JoinTokenUsed (3), NoCohort
        (4), DeviceNameTaken (5).
        """
        token = await find_join_token(connection, request.token)
        if token is None:  # (2)
            raise JoinTokenUnknown("The join token is unknown. Make one with `causeway-fleet enroll`.")
        known = await read_device(connection, public_key=request.public_key)
        if known is not None and known.join_token == token.hash:
            if known.revoked is not None:
                raise DeviceRevoked(f"{known.id} was revoked. Enrol with a new key and a new join token.")
            return known
        now = self.clock()
        _check(token, now)
        labels = {**request.labels, **token.labels}
        device = Device(
            id=request.name.strip() or f"device-{secrets.token_hex(6)}",
            tenant=token.tenant,
            cohort=_cohort(self.fleet, token, labels),
            public_key=request.public_key,
            join_token=token.hash,
            labels_json=msgspec.json.encode(labels, order="sorted").decode(),
            site=request.site,
            enrolled=now,
            daemon=request.daemon,
        )
        if known is not None or await read_device(connection, device.id) is not None:  # (5)
            raise DeviceNameTaken(_taken(device.id))
        await enrol(connection, device)
        return device


def _taken(name: str) -> str:
    return f"a device {name!r} is enrolled already: choose another name"


def _check(token: JoinToken, now: float) -> None:
    """Check expiry and uses of a join token (3)."""
    if now >= token.expires:
        raise JoinTokenExpired("The join token has expired. Make a new one with `causeway-fleet enroll`.")
    if token.uses_left < 1:
        raise JoinTokenUsed("The join token has no uses left. If your device did not use it, the token was stolen.")


def _cohort(fleet: FleetDoc, token: JoinToken, labels: dict[str, str]) -> str:
    """Return the cohort of a new device (4)."""
    if token.cohort:
        if token.cohort not in fleet.cohorts:
            raise NoCohort(f"The join token is for the cohort {token.cohort!r}, which the fleet no longer has.")
        return token.cohort
    cohort = cohort_of(fleet, labels)
    if cohort is None:
        raise NoCohort(f"No cohort of the fleet matches the labels {labels}.")
    return cohort
