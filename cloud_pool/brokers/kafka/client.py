"""The shared part of Kafka's source and sink: connecting, and recognising the errors of an unresponsive cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError, MessageSizeTooLargeError

from causeway_server.router.errors import ConfigError

from ..port import BrokerLogin, BrokerUnavailable, MessageTooLarge, TopicAddress

TIMEOUT_S = 5.0
CLOSE_S = 2.0
MAX_BYTES = 1_000_000  # the default of Kafka's `message.max.bytes` is a little more
READ_COMMITTED = "read_committed"
FAULTS = (KafkaError, OSError, asyncio.TimeoutError, AssertionError)
_CONNECT_S = 0.5
TO_DO = "Start the broker, or correct the address and `streams.login`."
log = logging.getLogger(__name__)


@asynccontextmanager
async def translated(timeout_s: float = TIMEOUT_S) -> AsyncIterator[None]:
    """Translate Kafka's errors in the block to BrokerUnavailable or MessageTooLarge, and limit its duration."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except FAULTS as error:
        raise translate(error) from error


def translate(error: BaseException) -> BrokerUnavailable | MessageTooLarge:
    if isinstance(error, MessageSizeTooLargeError):
        return MessageTooLarge("Kafka does not accept a message of this size. See `max.message.bytes` of the topic.")
    # The client raises a bare KafkaError for what it did not expect, with the cause.
    cause = type(error if type(error) is not KafkaError else error.__cause__ or error).__name__
    return BrokerUnavailable(f"Kafka does not answer ({cause}).", retry_after_s=1.0)


def client_options(address: TopicAddress, login: BrokerLogin) -> dict[str, Any]:
    """Return aiokafka's arguments for each client. Raises ConfigError."""
    if login.password_file and not login.username:
        raise ConfigError(
            "Kafka does not support authentication by token, so set `username`, too.", where="streams.login.username"
        )
    if login.username and login.sasl == "PLAIN" and not address.tls:
        raise ConfigError(
            "PLAIN sends the password unencrypted, so use a kafka+tls:// address.", where="streams.login.sasl"
        )
    # It logs each attempt to connect; what matters comes as an exception.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    protocol = ("SASL_" if login.username else "") + ("SSL" if address.tls else "PLAINTEXT")
    options: dict[str, Any] = {
        "bootstrap_servers": list(address.hosts),
        "client_id": "causeway",
        "request_timeout_ms": int(TIMEOUT_S * 1000),
        "security_protocol": protocol,
    }
    if address.tls:
        options["ssl_context"] = login.tls_context()
    if login.username:
        options["sasl_mechanism"] = login.sasl
        options["sasl_plain_username"] = login.username
        options["sasl_plain_password"] = login.password()
    return options


async def started(make: Callable[[], Any], address: TopicAddress) -> Any:
    """Return a started client, waiting for the cluster indefinitely."""
    logged = False
    while True:
        client = make()
        try:
            await client.start()
            return client
        except FAULTS as error:
            if not logged:
                log.warning("Waiting for Kafka: %s does not answer (%s). %s", address, type(error).__name__, TO_DO)
            logged = True
            await stop(client)
            await anyio.sleep(_CONNECT_S)
        except BaseException:
            await stop(client)
            raise


async def stop(client: Any) -> None:
    """Stop a client; if its cluster does not answer, drop it without waiting."""
    # In a task of its own: a consumer that is about to fetch again cancels the task that stops it.
    stopping = asyncio.ensure_future(client.stop())
    with anyio.CancelScope(shield=True):
        await asyncio.wait([stopping], timeout=CLOSE_S)
    stopping.cancel()
    stopping.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def require_topic(consumer: AIOKafkaConsumer, address: TopicAddress) -> None:
    """Wait for the cluster indefinitely. Raises ConfigError if it has no such topic."""
    while True:
        with suppress(BrokerUnavailable):
            async with translated():
                topics = await consumer.topics()
            if address.topic in topics:
                return
            raise ConfigError(f"The Kafka cluster has no topic {address.topic}.", where=str(address))
        await anyio.sleep(_CONNECT_S)
