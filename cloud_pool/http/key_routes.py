"""The API keys of a tenant, for its administrators: callers with the scope `keys`.

POST   /v1/keys               make one; the answer alone has the key itself
GET    /v1/keys               the tenant's keys
POST   /v1/keys/{id}/rotate   another secret; that before is accepted for `overlap_s`
DELETE /v1/keys/{id}          refused at this gateway at once, at the others within seconds
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal

import msgspec
from redis.exceptions import RedisError

from causeway_server.router.errors import IdentityUnavailable, MethodNotAllowed
from causeway_server.router.openai.request_body import load, validate
from causeway_server.router.serving.request import AiohttpRequest, allowed_methods, served_method
from causeway_server.router.serving.responses import Handler, ServerResponse, json_response

from ..accounts.accounts import Accounts
from ..accounts.identity.api_keys import ApiKey, ApiKeys, NewApiKey, Rotation
from ..core.principal import Grants, Principal
from .request_admission import RequestAdmission

KEYS: Final = "/v1/keys"
PATHS: Final[Mapping[str, str]] = {KEYS: "GET, POST", f"{KEYS}/{{id}}": "DELETE", f"{KEYS}/{{id}}/rotate": "POST"}
log = logging.getLogger(__name__)
_Handle = Callable[[AiohttpRequest, Principal, str], Awaitable[object]]


class ApiKeyView(msgspec.Struct, frozen=True):
    """An API key. Times are Unix seconds. `key`: the key itself, only in the answer that makes it; `previous_until`:
    when the secret before the last rotation ends.
    """

    id: str
    name: str
    scopes: tuple[str, ...]
    grants: Grants
    created_at: int
    expires_at: int
    usd_per_day: float = 0.0
    last_used_at: int | None = None
    previous_until: int | None = None
    key: str | msgspec.UnsetType = msgspec.UNSET
    object: Literal["api_key"] = "api_key"


class ApiKeyList(msgspec.Struct, frozen=True):
    """A tenant's API keys."""

    data: tuple[ApiKeyView, ...]
    object: Literal["list"] = "list"


class ApiKeyDeleted(msgspec.Struct, frozen=True):
    """The answer to the deletion of an API key."""

    id: str
    deleted: bool = True


class KeyRoutes(msgspec.Struct, frozen=True):
    """The handlers of a tenant's API keys."""

    keys: ApiKeys
    accounts: Accounts
    admission: RequestAdmission

    def handler(self, http: AiohttpRequest) -> Handler | None:
        """Return the handler of a request; None for another path. Raises MethodNotAllowed."""
        head, _, rest = http.path.removeprefix(KEYS).partition("/")
        if head or not http.path.startswith(KEYS):
            return None
        key_id, _, action = rest.partition("/")
        methods: Mapping[str, _Handle] = {"GET": self._list, "POST": self._create}
        if rest:
            methods = {"DELETE": self._delete} if not action else {"POST": self._rotate} if action == "rotate" else {}
        if not methods:
            return None
        handle = methods.get(served_method(http.method, http.headers))
        if handle is None:
            allowed = allowed_methods(", ".join(methods))
            raise MethodNotAllowed(f"{http.method[:20]} is not allowed here. Use {allowed}.", allow=allowed)
        return partial(self._answer, handle, key_id)

    async def _answer(self, handle: _Handle, key_id: str, http: AiohttpRequest) -> ServerResponse:
        principal = self.admission.principal(http)
        principal.require("keys")
        await self.admission.ledger.admit_submission(principal)
        with _translated():
            answer = await handle(http, principal, key_id)
            if http.method != "GET":  # the caller's next request may have the key
                await self.keys.refresh()
                await self.accounts.revocations.refresh()
        return json_response(answer)

    async def _create(self, http: AiohttpRequest, principal: Principal, _: str) -> ApiKeyView:
        asked = validate(load(await self.admission.read(http, principal)), NewApiKey)
        key, secret = await self.keys.store.create(principal.tenant, asked, principal.grants)
        log.warning("API key %s of tenant %s was made by %s", key.id, key.tenant, principal.owner)
        return view_of(key, secret)

    async def _list(self, _: AiohttpRequest, principal: Principal, __: str) -> ApiKeyList:
        used = await self.keys.store.last_used()
        found = await self.keys.store.list(principal.tenant)
        return ApiKeyList(tuple(view_of(key, used_at=used.get(key.id)) for key in found))

    async def _rotate(self, http: AiohttpRequest, principal: Principal, key_id: str) -> ApiKeyView:
        body = await self.admission.read(http, principal)
        asked = validate(load(body), Rotation) if body else Rotation()
        key, secret = await self.keys.store.rotate(principal.tenant, key_id, asked, principal.grants)
        log.warning("API key %s of tenant %s was rotated by %s", key.id, key.tenant, principal.owner)
        return view_of(key, secret)

    async def _delete(self, _: AiohttpRequest, principal: Principal, key_id: str) -> ApiKeyDeleted:
        await self.keys.store.delete(principal.tenant, key_id)
        log.warning("API key %s of tenant %s was deleted by %s", key_id, principal.tenant, principal.owner)
        return ApiKeyDeleted(key_id)


def view_of(key: ApiKey, secret: str | msgspec.UnsetType = msgspec.UNSET, used_at: int | None = None) -> ApiKeyView:
    """Return what is shown of a key. `used_at`: Unix seconds."""
    newest, *before = key.secrets
    return ApiKeyView(
        id=key.id,
        name=key.name,
        scopes=key.scopes,
        grants=key.grants,
        created_at=int(key.made),
        expires_at=int(newest.until),
        usd_per_day=key.usd_per_day,
        last_used_at=used_at,
        previous_until=int(before[0].until) if before else None,
        key=secret,
    )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise IdentityUnavailable("The API keys cannot be read or changed now.", retry_after_s=5.0) from error
