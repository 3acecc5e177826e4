"""`DELETE /v1/me/data`: the erasure of what the gateways' stores have of a client, with a signed receipt.

A caller erases its own data. A tenant's administrator (scope `keys`) also that of another client (`?client=NAME`) and
of an end user (`?user=NAME`, the value of `user` in requests).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.router.errors import InvalidRequest, JobStoreUnavailable, QueueFull
from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import ServerResponse, body_response

from ..core.subject import ErasureSubject
from ..erasure import Erasure, StoreFailed, sign
from .request_admission import RequestAdmission

log = logging.getLogger(__name__)


class ErasureRoute(msgspec.Struct, frozen=True):
    """The handler of the path.

    `key` signs the receipts, `opened` opens the stores, and `turn` is held by the erasure in progress: each reads all
    keys.
    """

    admission: RequestAdmission
    key: Ed25519PrivateKey
    opened: Callable[[], AbstractAsyncContextManager[Erasure]]
    turn: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    async def erase(self, http: AiohttpRequest) -> ServerResponse:
        principal = self.admission.principal(http)
        client, user = http.query.get("client", principal.device), http.query.get("user", "")
        for name in ("client", "user"):
            if http.query.get(name) == "":  # it would be the whole tenant
                raise InvalidRequest(
                    f"`{name}` is empty. Name a client or a user, or leave `{name}` out to erase your own data.",
                    param=name,
                )
        if not (user or client):  # it would be the whole tenant
            raise InvalidRequest("Your token names no client. Name a `client` or a `user`.", param="client")
        if user and "client" in http.query:
            raise InvalidRequest("Name a client or a user, not both.", param="user")
        if user or client != principal.device:
            principal.require("keys")
        await self.admission.ledger.admit_submission(principal)
        subject = ErasureSubject(principal.tenant, user=user) if user else ErasureSubject(principal.tenant, client)
        if self.turn.locked():
            raise QueueFull("Another erasure is in progress on this gateway. Try again later.", retry_after_s=5.0)
        try:
            async with self.turn, self.opened() as erasure:
                receipt = await erasure.erase(subject)
                await erasure.forget(subject)
        except StoreFailed as error:
            log.warning("The erasure of %s stopped: %s", subject.name, error.message)
            raise JobStoreUnavailable(
                "A store does not answer, so the erasure stopped. Erase again later.", retry_after_s=5.0
            ) from error
        log.warning("The data of %s was erased by %s", subject.name, principal.owner)
        return body_response(sign(receipt, self.key))
