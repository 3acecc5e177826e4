"""The bearer token of the cloud: a configured one, or one that changes."""

from __future__ import annotations

import asyncio
from typing import Protocol

import aiohttp


class Credentials(Protocol):
    """A bearer token that changes, such as a fleet's."""

    @property
    def token(self) -> str:
        """The token now; "" while there is none."""
        ...

    async def renew(self, refused: str) -> bool:
        """Get another token than the one that was refused; return whether there is one now."""
        ...


class BearerToken:
    """Keeps a token in the headers of a session, so that a request costs one comparison.

    Args:
        api_key: The configured token; "" for none.
        credentials: Take its place.
    """

    def __init__(self, api_key: str, credentials: Credentials | None) -> None:
        self._api_key = api_key
        self._credentials = credentials
        self._sent = ""

    def put(self, session: aiohttp.ClientSession) -> str:
        """Make the session send the token of this moment, and return it."""
        token = self._api_key if self._credentials is None else self._credentials.token
        if token != self._sent:
            session.headers.pop("Authorization", None)
            if token:
                session.headers["Authorization"] = f"Bearer {token}"
            self._sent = token
        return token

    async def renewed(self, refused: str, until: float) -> bool:
        """Return whether there is another token than the refused one, `until` (the loop's clock, s) at the latest."""
        if self._credentials is None:
            return False
        try:
            async with asyncio.timeout_at(until):
                return await self._credentials.renew(refused)
        except TimeoutError:
            return False
