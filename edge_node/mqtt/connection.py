"""A connection to a broker: MQTT 5 by paho, on the event loop.

paho is used directly because messages are acknowledged by hand, and the broker's reasons and limits matter: an answer
that the broker refuses was not sent. Connecting blocks, so a thread does that; all else is on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paho.mqtt import client as mqtt
from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from causeway_server.router.errors import ConfigError, InvalidRequest
from causeway_server.router.serving.request import combined
from causeway_server.router.serving.tls.contexts import TlsFiles, client_tls

from ..config.schema import MqttConfig
from .messages import AnswerTooLarge, BrokerError, Message, OutgoingAnswer, PublishRefused
from .topics import BrokerUrl

_CONNECT_S = 10.0  # timeout for TCP, and for TLS
_ACK_S = 60.0  # timeout of an acknowledgement by the broker
_GOODBYE_S = 1.0
_MISC_S = 1.0
_IN_FLIGHT = 16  # maximum number of answers that the broker has not acknowledged
_ENVELOPE_BYTES = 8192  # bytes of a packet besides payload and topic
_TAKEN_OVER = 142
_LASTING = {132, 133, 134, 135, 138, 140, 144, 154, 155, _TAKEN_OVER}  # reasons that only an operator can remove


class Connection:
    """A connection, to be opened once. `state_topic`: topic of the last will ``offline``; "" for none; `receive` gets
    each message, which `acknowledge` acknowledges.
    """

    def __init__(
        self, config: MqttConfig, client_id: str, state_topic: str, receive: Callable[[Message], None]
    ) -> None:
        self._config = config
        self._broker = BrokerUrl(config.url)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._lost = asyncio.Event()
        self._error = BrokerError("The connection was closed.")
        self._pending: dict[int, asyncio.Future[None]] = {}
        self._room = asyncio.Semaphore(_IN_FLIGHT)
        self._max_packet_bytes: int | None = None
        self._fd = -1
        self.session_present = False
        client = mqtt.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=mqtt.MQTTv5, reconnect_on_failure=False, manual_ack=True
        )
        client.connect_timeout = _CONNECT_S
        client.on_connect = self._on_connect
        client.on_message = self._on_message
        client.on_publish = self._on_acknowledged
        client.on_subscribe = self._on_acknowledged
        client.on_disconnect = self._on_disconnect
        if state_topic:
            client.will_set(state_topic, b"offline", qos=1, retain=True)
        self._client = client

    # --- calls -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect. Raises BrokerError."""
        try:
            await _in_thread(self._connect)
        except BrokerError:
            raise
        except ssl.SSLEOFError as error:
            raise BrokerError(f"{self._broker} closed the connection during the TLS handshake.") from error
        except ssl.SSLError as error:
            raise BrokerError(f"TLS with {self._broker}: {error.reason or error}", lasting=True) from error
        except OSError as error:
            raise BrokerError(f"{self._broker}: {error.strerror or error}") from error
        sock = self._client.socket()
        if sock is None:
            raise BrokerError(f"{self._broker} closed the connection.")
        self._fd = sock.fileno()
        self._client.on_socket_register_write = self._start_writing
        self._client.on_socket_unregister_write = self._stop_writing
        self._client.on_socket_close = self._forget_socket
        self._loop.add_reader(self._fd, self._read)
        if self._client.want_write():
            self._start_writing()
        await self._within(_CONNECT_S, self._connected, "does not answer")

    async def subscribe(self, filters: Sequence[str]) -> list[str]:
        """Subscribe with QoS 1. Return the refused filters, each with the broker's reason. Raises BrokerError."""
        refused = []
        for text in filters:
            # A retained message is not a request; `noLocal` is not allowed for shared subscriptions.
            options = SubscribeOptions(
                qos=1, noLocal=not text.startswith("$share/"), retainAsPublished=True, retainHandling=2
            )
            _, mid = self._client.subscribe(text, options=options)
            try:
                await self._acknowledged(mid or 0)
            except PublishRefused as error:
                refused.append(f"{text!r}: {error}")
        return refused

    async def publish(self, answer: OutgoingAnswer) -> None:
        """Publish with QoS 1; return once the broker has acknowledged it. Raises BrokerError if the connection was
        lost, when it is unknown whether the broker has the answer; PublishRefused; AnswerTooLarge for the broker's
        limit.
        """
        size = len(answer.payload) + len(answer.topic.encode()) + _ENVELOPE_BYTES
        if self._max_packet_bytes is not None and size > self._max_packet_bytes:
            raise AnswerTooLarge(f"The broker's maximum message size is {self._max_packet_bytes} bytes.")
        properties = _properties_of(
            PacketTypes.PUBLISH,
            ContentType=answer.content_type,
            PayloadFormatIndicator=1,
            UserProperty=list(answer.properties) or None,
            CorrelationData=answer.correlation or None,
        )
        await self._publish(answer.topic, answer.payload, properties=properties)

    async def publish_state(self, topic: str, state: str) -> None:
        """Publish the state of this device, retained. Raises BrokerError or PublishRefused."""
        await self._publish(topic, state.encode(), retain=True)

    def acknowledge(self, message: Message) -> None:
        """Acknowledge a message, so that the broker does not deliver it again."""
        if message.qos and not self._lost.is_set():
            self._client.ack(message.mid, message.qos)

    async def lost(self) -> BrokerError:
        """Keep the connection alive until it is lost. Return the reason."""
        while not self._lost.is_set():
            self._client.loop_misc()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MISC_S):
                    await self._lost.wait()
        return self._error

    async def close(self) -> None:
        """Disconnect properly, so that the broker does not publish the last will."""
        if self._client.socket() is None:
            return
        self._client.disconnect()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._lost.wait()
        if (sock := self._client.socket()) is not None:  # it accepts no bytes any more
            self._forget_socket()
            # paho closes it once more when its client is deleted; the number may be another file's by then.
            self._client.on_socket_unregister_write = self._client.on_socket_close = None
            sock.close()

    # --- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect, in a thread. Raises BrokerError or OSError."""
        config, client = self._config, self._client
        if config.username:
            client.username_pw_set(config.username, _read_password(config.password_file))
        if self._broker.tls:
            client.tls_set_context(_tls_context(config))
        properties = _properties_of(
            PacketTypes.CONNECT,
            SessionExpiryInterval=int(config.session_expiry_s),
            ReceiveMaximum=config.receive_maximum,
            # A message that is slightly too large is answered with an error; the broker drops larger ones.
            MaximumPacketSize=4 * config.max_message_bytes + (1 << 16),
        )
        client.connect(
            self._broker.host, self._broker.port, int(config.keepalive_s), clean_start=False, properties=properties
        )

    async def _publish(
        self, topic: str, payload: bytes, *, retain: bool = False, properties: Properties | None = None
    ) -> None:
        async with self._room:
            if self._lost.is_set():
                raise self._error
            info = self._client.publish(topic, payload, qos=1, retain=retain, properties=properties)
            await self._acknowledged(info.mid)

    async def _acknowledged(self, mid: int) -> None:
        """Wait for the acknowledgement of a packet. Raises PublishRefused or BrokerError."""
        if self._lost.is_set():
            raise self._error
        future = self._pending[mid] = self._loop.create_future()
        try:
            await self._within(_ACK_S, future, "acknowledges nothing")
        finally:
            self._pending.pop(mid, None)

    async def _within(self, seconds: float, future: asyncio.Future[None], problem: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            error = BrokerError(f"{self._broker} {problem} for {seconds:g} s.")
            self._lose(error)
            raise error from None

    def _lose(self, error: BrokerError) -> None:
        if self._lost.is_set():
            return
        self._error = error
        self._lost.set()
        for future in (self._connected, *self._pending.values()):
            if not future.done():
                future.set_exception(error)

    def _read(self) -> None:
        try:
            while self._client.loop_read() == mqtt.MQTT_ERR_SUCCESS:
                sock = self._client.socket()
                if not isinstance(sock, ssl.SSLSocket) or not sock.pending():
                    return
        except Exception as error:
            self._lose(BrokerError(f"{self._broker} violated the MQTT protocol ({type(error).__name__})."))

    def _write(self) -> None:
        try:
            self._client.loop_write()
        except Exception as error:
            self._lose(BrokerError(f"{self._broker}: sending failed with {type(error).__name__}."))

    # --- paho's callbacks, in the loop -------------------------------------------------------------------------------

    def _on_connect(
        self, _client: mqtt.Client, _data: Any, flags: mqtt.ConnectFlags, reason: ReasonCode, limits: Properties | None
    ) -> None:
        if reason.is_failure:
            self._lose(BrokerError(f"{self._broker} refuses this device: {reason}", lasting=reason.value in _LASTING))
            return
        self.session_present = flags.session_present
        self._max_packet_bytes = getattr(limits, "MaximumPacketSize", None)
        self._room = asyncio.Semaphore(min(_IN_FLIGHT, getattr(limits, "ReceiveMaximum", _IN_FLIGHT)))
        if not self._connected.done():
            self._connected.set_result(None)

    def _on_message(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        self._receive(_message_of(message))

    def _on_acknowledged(
        self, _client: mqtt.Client, _data: Any, mid: int, reasons: ReasonCode | list[ReasonCode], _: Properties | None
    ) -> None:
        """Resolve the acknowledgement of a message (one reason) or of a subscription (a list of one reason)."""
        reason = reasons[0] if isinstance(reasons, list) else reasons
        future = self._pending.get(mid)
        if future is None or future.done():
            return
        if reason.is_failure:
            future.set_exception(PublishRefused(str(reason)))
        else:
            future.set_result(None)

    def _on_disconnect(
        self,
        _client: mqtt.Client,
        _data: Any,
        flags: mqtt.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if not flags.is_disconnect_packet_from_server:
            during = (
                ""
                if self._connected.done()
                else " before it accepted the connection: does it require TLS or a certificate?"
            )
            self._lose(BrokerError(f"{self._broker} closed the connection{during}."))
            return
        taken_over = ": another client has the same mqtt.client_id" if reason.value == _TAKEN_OVER else ""
        message = f"{self._broker} ended the connection: {reason}{taken_over}"
        self._lose(BrokerError(message, lasting=reason.value in _LASTING))

    def _start_writing(self, *_: object) -> None:
        self._loop.add_writer(self._fd, self._write)

    def _stop_writing(self, *_: object) -> None:
        self._loop.remove_writer(self._fd)

    def _forget_socket(self, *_: object) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)


def _message_of(message: MQTTMessage) -> Message:
    properties = message.properties
    user_properties: dict[str, str] = {}
    fault: InvalidRequest | None = None
    try:
        user_properties = combined(getattr(properties, "UserProperty", ()))
    except InvalidRequest as error:
        fault = error
    return Message(
        mid=message.mid,
        topic=message.topic,
        payload=bytes(message.payload),
        qos=message.qos,
        retain=message.retain,
        dup=message.dup,
        response_topic=getattr(properties, "ResponseTopic", ""),
        correlation=bytes(getattr(properties, "CorrelationData", b"")),
        expires_s=getattr(properties, "MessageExpiryInterval", None),
        content_type=getattr(properties, "ContentType", ""),
        properties=user_properties,
        fault=fault,
    )


def _properties_of(packet: int, **values: object) -> Properties:
    """Return the properties of a packet, by their names in paho; None values are left out."""
    properties = Properties(packet)
    for name, value in values.items():
        if value is not None:
            setattr(properties, name, value)
    return properties


def _read_password(file: str) -> str | None:
    """Return the password in a file; None without a file. Raises BrokerError."""
    if not file:
        return None
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"The file {file} (mqtt.password_file) cannot be read: {error}", lasting=True) from error


def _tls_context(config: MqttConfig) -> ssl.SSLContext:
    """Return the TLS settings. Raises BrokerError."""
    files = TlsFiles(
        where="mqtt", ca_file=config.ca_file, cert_file=config.cert_file, key_file=config.key_file or config.cert_file
    )
    try:
        return client_tls(files, alpn=())
    except ConfigError as error:
        raise BrokerError(error.message, lasting=True) from error


async def _in_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a thread that does not delay a shutdown."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def deliver(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(deliver, failure)

    threading.Thread(target=run, name="mqtt-connect", daemon=True).start()
    await done
