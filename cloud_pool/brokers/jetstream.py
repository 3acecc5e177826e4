"""The adapter for NATS JetStream, by nats-py (extra `nats`): a subject as a source and as a sink.

A pipeline has one consumer, `<name>-<random>`, which belongs to one connection. Each session creates a new consumer
that starts after the contiguously acknowledged messages, and deletes the previous one. So all unacknowledged messages
are redelivered at once and in order, whereas redeliveries of an old consumer would come after new messages, each at a
different time. Messages acknowledged beyond a gap are redelivered too; the pipeline recognises them.

1. A session begins with the first `receive`, and again after the connection was lost or the consumer was deleted.
2. The consumer sends as many messages as were requested: `_requested` counts those that may still come.
3. A message that the consumer sends again, because its wait ran out, is a further delivery of the same position.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy

from causeway_server.router.errors import ConfigError

from .port import (
    BrokerLogin,
    BrokerUnavailable,
    IncomingMessage,
    MessageTooLarge,
    OutgoingMessage,
    TopicAddress,
    TopicLag,
)

TIMEOUT_S = 5.0
RECONNECT_S = 0.25
PAGE = 256
FAULTS = (nats.errors.Error, OSError, asyncio.TimeoutError, json.JSONDecodeError)
_PING_S = 5  # a partition is noticed after two pings
TO_DO = "Start the broker, or correct the address and `streams.login`."
log = logging.getLogger(__name__)
_LATE_S = 2.0  # a request that has no answer so long after its end was lost
_MIN_REQUEST_S = 0.01  # of a request
_MAX_UNACKNOWLEDGED = 4096
_ENDED = ("404", "408")  # statuses that end a request; 404: no messages, 408: its time is over
_FULL = "Exceeded MaxAckPending"
_ROUNDING_S = 0.001  # the server counts nanoseconds, and the client microseconds
MESSAGE_ID = "Nats-Msg-Id"
_CONTENT_TYPE = "Content-Type"


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise MessageTooLarge(
            "NATS does not accept a message of this size. See `max_payload` in the configuration of NATS."
        ) from error
    except FAULTS as error:
        reason = error.description if isinstance(error, nats.js.errors.APIError) else None
        reason_text = f"NATS refuses: {reason}" if reason else f"NATS does not answer ({type(error).__name__})"
        raise BrokerUnavailable(reason_text, retry_after_s=1.0) from error


class _Subject:
    """A subject with a separate connection, which is reopened whenever it is lost."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        self._address = address
        self._login = login
        self._generation = 0  # how often the connection was opened
        self._client: Client | None = None
        self._logged = ""

    async def open(self) -> None:
        """Connect, waiting for the broker indefinitely. Raises ConfigError if no stream has the subject."""
        login, options = self._login, dict[str, Any]()
        if login.username:
            options |= {"user": login.username, "password": login.password()}
        elif login.password_file:
            options["token"] = login.password()
        if self._address.tls:
            options["tls"] = login.tls_context()
        self._client = await nats.connect(
            [f"{'tls' if self._address.tls else 'nats'}://{host}" for host in self._address.hosts],
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
        self._generation += 1
        self._context = self._client.jetstream(timeout=TIMEOUT_S)
        self._stream = await self._stream_name()

    @property
    def client(self) -> Client:
        assert self._client is not None, "open() comes first"
        return self._client

    async def _stream_name(self) -> str:
        """Return the stream that holds the topic, waiting for JetStream indefinitely. Raises ConfigError."""
        topic = self._address.topic
        while True:
            try:
                async with translated():
                    return await self._context.find_stream_name_by_subject(topic)
            except BrokerUnavailable as error:
                if isinstance(error.__cause__, nats.js.errors.NotFoundError):
                    raise ConfigError(
                        f"No JetStream stream has the subject {topic}.", where=str(self._address)
                    ) from None
                await anyio.sleep(RECONNECT_S)

    async def close(self) -> None:
        if self._client is not None:
            with suppress(*FAULTS):
                await self._client.close()

    async def _on_error(self, error: Exception) -> None:
        fault = type(error).__name__
        if fault != self._logged:
            log.warning("Waiting for NATS: %s does not answer (%s). %s", self._address, fault, TO_DO)
        self._logged = fault

    async def _on_disconnected(self) -> None:
        self._generation += 1

    async def _on_reconnected(self) -> None:
        self._generation += 1
        self._logged = ""
        log.info("%s: connected again.", self._address)


def headers_of(message: Msg) -> dict[str, str]:
    """Return a message's headers; of several lines of a name (with `fast-mail-parser`: a list) the last."""
    headers: Mapping[str, str | list[str]] = message.headers or {}
    return {name: value if isinstance(value, str) else value[-1] for name, value in headers.items()}


def incoming(message: Msg) -> IncomingMessage:
    metadata = message.metadata
    return IncomingMessage(
        body=message.data,
        headers={name.lower(): value for name, value in headers_of(message).items()},
        position=str(metadata.sequence.stream),
        published_at=metadata.timestamp.timestamp(),
        receipt=message.reply,
    )


class JetStreamSource(_Subject):
    """A MessageSource for a subject, with or without wildcards. Only the holder of the pipeline's lease may receive."""

    needs_lease = True

    def __init__(self, address: TopicAddress, name: str, login: BrokerLogin, *, ack_wait_s: float) -> None:
        super().__init__(address, login)
        self._prefix = f"{name.replace('.', '_')}-"
        self._ack_wait_s = ack_wait_s
        self._session: _ConsumerSession | None = None

    async def receive(self, most: int, wait_s: float, gather_s: float) -> list[IncomingMessage]:
        async with translated():
            session = self._session
            if session is None or session.generation != self._generation or session.lost:
                session = await self._begin_session()  # (1)
            return [incoming(found) for found in await session.take(most, wait_s, gather_s)]

    async def acknowledge(self, message: IncomingMessage) -> None:
        assert isinstance(message.receipt, str)
        async with translated():
            await self.client.publish(message.receipt, Msg.Ack.Ack)

    async def extend_ack(self, messages: Sequence[IncomingMessage]) -> None:
        async with translated():
            for message in messages:
                assert isinstance(message.receipt, str)
                await self.client.publish(message.receipt, Msg.Ack.Progress)

    async def reset(self) -> None:
        """Begin a new session with the next `receive`."""
        if self._session is not None:
            self._session.lost = True

    async def lost_lanes(self) -> set[str]:
        """Wait forever, because a subject has no lanes."""
        await anyio.sleep_forever()
        return set()

    async def lag(self) -> TopicLag:
        async with translated():
            active = [consumer for consumer in await self._consumers() if _floor(consumer) or consumer.num_pending]
            last = max(active, key=_floor, default=None)
            if last is None:
                return TopicLag((await self._context.stream_info(self._stream)).state.messages, 0)
            return TopicLag(last.num_pending or 0, last.num_ack_pending or 0)

    async def _begin_session(self) -> _ConsumerSession:
        if self._session is not None:
            await self._session.end()
            self._session = None
        old = await self._consumers()
        floor = max(map(_floor, old), default=0)
        config = ConsumerConfig(
            durable_name=f"{self._prefix}{secrets.token_hex(4)}",
            filter_subject=self._address.topic,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE if floor else DeliverPolicy.ALL,
            opt_start_seq=floor + 1 if floor else None,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            max_ack_pending=_MAX_UNACKNOWLEDGED,
        )
        generation = self._generation
        made = await self._context.add_consumer(self._stream, config)
        for consumer in old:
            with suppress(nats.js.errors.NotFoundError):
                await self._context.delete_consumer(self._stream, consumer.name)
        self._session = await _ConsumerSession.begin(self.client, self._stream, made.name, generation)
        return self._session

    async def _consumers(self) -> list[ConsumerInfo]:
        """Return the pipeline's consumers: one, or two if a process was killed while it began a session."""
        consumers, read, total = list[ConsumerInfo](), 0, 1
        while read < total:
            asked = json.dumps({"offset": read}).encode()
            answer = await self.client.request(f"$JS.API.CONSUMER.LIST.{self._stream}", asked, TIMEOUT_S)
            page = json.loads(answer.data)
            if "error" in page:
                nats.js.errors.APIError.from_error(page["error"])
            # nats-server 2.9.10 lists null for a consumer that is being deleted, which nats-py cannot read.
            consumers += [ConsumerInfo.from_response(found) for found in page["consumers"] if found]
            read, total = read + len(page["consumers"]), page["total"] if page["consumers"] else 0
        return [consumer for consumer in consumers if consumer.name.startswith(self._prefix)]


class _ConsumerSession:
    """The messages that one consumer sends over one connection."""

    def __init__(self, client: Client, next_subject: str, generation: int) -> None:
        self._client = client
        self._next = next_subject
        self._inbox = client.new_inbox()
        self._received = asyncio.Queue[Msg]()
        self._subscription: Subscription | None = None
        self._requested = 0
        self._ends = 0.0  # of the last request, monotonic s
        self.generation = generation
        self.lost = False

    @classmethod
    async def begin(cls, client: Client, stream: str, consumer: str, generation: int) -> _ConsumerSession:
        session = cls(client, f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", generation)
        session._subscription = await client.subscribe(session._inbox, cb=session._received.put)
        return session

    async def end(self) -> None:
        """Stop listening."""
        if self._subscription is not None:
            with suppress(*FAULTS):
                await self._subscription.unsubscribe()

    async def take(self, most: int, wait_s: float, gather_s: float) -> list[Msg]:
        taken: list[Msg] = []
        await self._request(most, wait_s)
        ends = time.monotonic() + wait_s
        while len(taken) < most and not self.lost:
            # An earlier call's request may be counted on that ended without a word.
            until = ends if taken else min(ends, self._ends + _LATE_S)
            with anyio.move_on_after(until - time.monotonic()) as waiting:
                message = await self._received.get()
            if waiting.cancelled_caught:
                if until == ends:
                    break
                await self._request(most, max(_MIN_REQUEST_S, ends - time.monotonic()))
                continue
            headers = headers_of(message)
            if not headers.get("Status"):
                self._requested -= 1
                if not taken:
                    ends = time.monotonic() + gather_s
                taken.append(message)
            elif not self._on_status(headers):
                if taken:
                    break
                await self._request(most, max(_MIN_REQUEST_S, ends - time.monotonic()))
        return taken

    async def _request(self, most: int, wait_s: float) -> None:
        if time.monotonic() >= self._ends + _LATE_S:
            self._requested = 0
        missing = most - self._received.qsize() - self._requested
        if missing <= 0:
            return
        request = {"batch": missing, "expires": int(wait_s * 1e9)}
        self._requested += missing
        self._ends = time.monotonic() + wait_s
        await self._client.publish(self._next, json.dumps(request).encode(), self._inbox)

    def _on_status(self, headers: Mapping[str, str]) -> bool:
        """Return whether further ones of the requested messages can come."""
        status = headers["Status"]
        if status == "100":
            return True
        pending = int(headers.get("Nats-Pending-Messages", self._requested))
        self._requested = max(0, self._requested - pending)
        if status not in _ENDED and _FULL not in headers.get("Description", ""):
            self.lost = True  # the consumer was deleted, or its server is another one now
        return self._requested > 0


def _floor(consumer: ConsumerInfo) -> int:
    """Return the sequence number up to which all messages are acknowledged."""
    acknowledged = consumer.ack_floor.stream_seq if consumer.ack_floor is not None else 0
    return max(acknowledged or 0, (consumer.config.opt_start_seq or 1) - 1)


class JetStreamSink(_Subject):
    """A MessageSink that publishes to a subject. `Nats-Msg-Id` lets the stream drop duplicates (within 2 minutes)."""

    def __init__(self, address: TopicAddress, login: BrokerLogin) -> None:
        """Create the sink. Raises ConfigError for a wildcard."""
        if any(part in ("*", ">") for part in address.topic.split(".")):
            raise ConfigError("A topic that messages are published to must not contain wildcards.", where=str(address))
        super().__init__(address, login)
        self._last = 0  # sequence in the stream

    @property
    def max_bytes(self) -> int:
        """Return the maximum message size: NATS's `max_payload`."""
        return self.client.max_payload

    async def open(self) -> None:
        await super().open()
        while True:
            try:
                async with translated():
                    self._last = (await self._context.stream_info(self._stream)).state.last_seq
                return
            except BrokerUnavailable:
                await anyio.sleep(RECONNECT_S)

    async def position(self, lane: str) -> str:
        """Return the last sequence number that this process knows."""
        return str(self._last)

    async def publish(self, message: OutgoingMessage, lane: str, position: str, *, repeated: bool) -> bool:
        headers = {MESSAGE_ID: message.id, _CONTENT_TYPE: message.content_type}
        async with translated():
            if repeated and message.id in await self._ids(int(position)):
                return False
            stored = await self._context.publish(self._address.topic, message.body, TIMEOUT_S, self._stream, headers)
        self._last = max(self._last, stored.seq)
        return True

    async def _ids(self, after: int) -> Iterable[str]:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            inactive_threshold=TIMEOUT_S,
        )
        subscription = await self._context.pull_subscribe(self._address.topic, stream=self._stream, config=config)
        left, ids = (await subscription.consumer_info()).num_pending or 0, list[str]()
        while left > 0:
            fetched = await subscription.fetch(min(left, PAGE), timeout=TIMEOUT_S)
            left -= len(fetched)
            ids += [headers_of(message).get(MESSAGE_ID, "") for message in fetched]
        await subscription.unsubscribe()
        return ids
