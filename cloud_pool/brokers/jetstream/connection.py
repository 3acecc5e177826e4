"""A connection to NATS that is opened again whenever it is lost, and what messages are there."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from router.errors import ConfigError

from ..address import BrokerLogin, TopicAddress
from ..port import BrokerUnavailable, IncomingMessage, MessageTooLarge

TIMEOUT_S = 5.0
RECONNECT_S = 0.25
PAGE = 256
FAULTS = (nats.errors.Error, OSError, asyncio.TimeoutError, json.JSONDecodeError)
_PING_S = 5  # a partition is noticed after two pings
TO_DO = "Start the broker, or correct the address and `streams.login`."
_log = logging.getLogger("causeway.cloud.brokers")


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise MessageTooLarge("NATS takes no message of this size: see `max_payload` of its configuration") from error
    except FAULTS as error:
        raise BrokerUnavailable(_said(error), retry_after_s=1.0) from error


def _said(error: Exception) -> str:
    reason = error.description if isinstance(error, nats.js.errors.APIError) else None
    return f"NATS refuses: {reason}" if reason else f"NATS does not answer ({type(error).__name__})"


class NatsConnection:
    """One connection, which is opened again whenever it is lost. `generation` counts how often it was opened."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        self.address = address
        self._login = login
        self.generation = 0
        self._client: Client | None = None
        self._logged = ""

    async def open(self) -> JetStreamContext:
        """Connect, waiting for the broker as long as it takes."""
        login, options = self._login, dict[str, Any]()
        if login.username:
            options |= {"user": login.username, "password": login.password()}
        elif login.password_file:
            options["token"] = login.password()
        if self.address.tls:
            options["tls"] = login.tls_context()
        self._client = await nats.connect(
            [f"{'tls' if self.address.tls else 'nats'}://{host}" for host in self.address.hosts],
            name="causeway",
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_S,
            ping_interval=_PING_S,
            max_outstanding_pings=2,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            **options,
        )
        self.generation += 1
        return self._client.jetstream(timeout=TIMEOUT_S)

    @property
    def client(self) -> Client:
        assert self._client is not None, "open() comes first"
        return self._client

    async def stream_name(self, context: JetStreamContext) -> str:
        """Return the stream that holds the topic, waiting for JetStream as long as it takes. Raises ConfigError."""
        topic = self.address.topic
        while True:
            try:
                async with translated():
                    return await context.find_stream_name_by_subject(topic)
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, nats.js.errors.NotFoundError):
                    raise ConfigError(f"no JetStream stream has the subject {topic}", where=str(self.address)) from None
                await anyio.sleep(RECONNECT_S)

    async def close(self) -> None:
        if self._client is not None:
            with suppress(*FAULTS):
                await self._client.close()

    async def _on_error(self, error: Exception) -> None:
        fault = type(error).__name__
        if fault != self._logged:
            _log.warning("waiting for NATS: %s does not answer (%s). %s", self.address, fault, TO_DO)
        self._logged = fault

    async def _on_disconnected(self) -> None:
        self.generation += 1

    async def _on_reconnected(self) -> None:
        self.generation += 1
        self._logged = ""
        _log.info("%s: connected again", self.address)


def incoming(message: Msg) -> IncomingMessage:
    metadata = message.metadata
    return IncomingMessage(
        body=message.data,
        headers={name.lower(): value for name, value in (message.headers or {}).items()},
        position=str(metadata.sequence.stream),
        published_at=metadata.timestamp.timestamp(),
        receipt=message.reply,
    )
