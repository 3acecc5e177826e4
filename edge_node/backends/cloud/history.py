"""The history of a conversation that began at a cloud, read there under the key of the client that goes on with it."""

from __future__ import annotations

import asyncio
import re
from typing import Final
from urllib.parse import quote

import msgspec
from yarl import URL

from causeway_server.router.errors import BodyTooLarge, CloudUnreadable, InvalidRequest, PermissionDenied
from causeway_server.router.openai.responses.state import NotEnded, StoredTurn
from causeway_server.router.serving.http_client import HttpResponse
from causeway_server.router.serving.request import TAGS, read_tags
from causeway_server.router.serving.upstream.responses import UpstreamCall, read_error, read_whole
from causeway_server.router.serving.upstream.server import FixedToken, OpenAIServer, ServerAddress

CLOUD_KEY = "x-causeway-cloud-key"
_READ_S = 10.0
_TAGS: Final = TAGS.encode()
_PREFER: Final = b"x-causeway-prefer"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,8192}")
_ENDED = ("completed", "incomplete")


class _Response(msgspec.Struct):
    status: str
    output: list[msgspec.Raw]


class _Page(msgspec.Struct):
    data: list[msgspec.Raw]
    has_more: bool = False
    last_id: str | None = None


class _Unobserved:
    """A client's own key says nothing about the cloud's health (`ServerObserver`)."""

    def answered(self, response: HttpResponse) -> None: ...

    def lost(self, error: Exception) -> None: ...


class CloudHistory:
    """Reads responses that a cloud stores. `address`: of its backend. `max_bytes`: the largest history."""

    def __init__(self, address: ServerAddress, max_bytes: int) -> None:
        self._path = URL(f"{address.url}/responses").raw_path
        self._address = msgspec.structs.replace(address, max_connections=1)
        self._max_bytes = max_bytes

    async def read(self, key: str, name: str) -> StoredTurn | None:
        """Return a response with all items before it, and the tags that bind them; None if the key's client has none of
        this name, or it must not leave its device. Raises InvalidRequest or PermissionDenied for the key, BodyTooLarge,
        NotEnded while the response is still being made, or BackendError.
        """
        if not _KEY.fullmatch(key):
            raise InvalidRequest(f"`{CLOUD_KEY}` must consist of visible ASCII characters.", param=CLOUD_KEY)
        server, until = OpenAIServer(self._address, FixedToken(key), _Unobserved()), asyncio.get_running_loop().time()
        server.start()
        try:
            return await self._read(server, name, until + _READ_S)
        except msgspec.MsgspecError as error:
            raise CloudUnreadable("The cloud's stored response is not valid.", phase="stream") from error
        finally:
            await server.close()

    async def _read(self, server: OpenAIServer, name: str, until: float) -> StoredTurn | None:
        call, path = UpstreamCall(name, "The cloud", until), f"{self._path}/{name}"
        found = await self._get(server, call, path, self._max_bytes)
        if found is None:
            return None
        response, tags = msgspec.json.decode(found[0], type=_Response), found[1]
        if response.status not in _ENDED:
            raise NotEnded(f"The response {name} has not ended with an answer.")
        items, after, left = list[msgspec.Raw](), "", self._max_bytes - len(found[0])
        while True:
            found = await self._get(server, call, f"{path}/input_items?order=asc&limit=100{after}", left)
            if found is None:
                return None
            page, left = msgspec.json.decode(found[0], type=_Page), left - len(found[0])
            items += page.data
            if not (page.has_more and page.last_id):
                break
            after = f"&after={quote(page.last_id)}"
        made = msgspec.json.encode({"id": name, "status": response.status, "output": response.output})
        return StoredTurn(id=name, input=tuple(items), response=msgspec.Raw(made), tags=tags)

    async def _get(
        self, server: OpenAIServer, call: UpstreamCall, target: str, left: int
    ) -> tuple[bytes, tuple[str, ...]] | None:
        """Return a body and its tags; None if it is not there, or must not leave its device."""
        response = await server.send(call, "GET", target, call.deadline)
        try:
            if response.status == 404 or response.header(_PREFER):
                return None
            if response.status in (401, 403):
                raise PermissionDenied(f"The cloud refuses the key in {CLOUD_KEY}.")
            if response.status != 200:
                raise await read_error(response, call, call.deadline)
            body = await read_whole(response, call)
            if len(body) > left:
                raise BodyTooLarge("The history is larger than the device stores for one client (responses.max_bytes).")
            return body, read_tags(response.header(_TAGS) or "")
        finally:
            response.release()
